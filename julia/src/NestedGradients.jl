"""
    NestedGradients

Gradients that hold gradients: nested derivatives for users of DifferentiationInterface, Zygote and
Lux, and the Julia engine of the Python package pybridge.
"""
module NestedGradients

using ADTypes: ADTypes, AbstractADType
using Base.Broadcast: AbstractArrayStyle, Broadcast, Broadcasted, Extruded
using ChainRulesCore:
    ChainRulesCore,
    AbstractThunk,
    AbstractZero,
    HasForwardsMode,
    HasReverseMode,
    NoTangent,
    ProjectTo,
    RuleConfig,
    Tangent,
    ZeroTangent,
    rrule_via_ad,
    unthunk,
    @non_differentiable
using DifferentiationInterface: DifferentiationInterface as DI
using ForwardDiff: ForwardDiff, Dual, Partials
using LinearAlgebra:
    LinearAlgebra,
    Adjoint,
    Hermitian,
    Symmetric,
    Transpose,
    cholesky,
    diag,
    dot,
    kron,
    logabsdet,
    mul!,
    pinv,
    tr
using Random: AbstractRNG

include("levels.jl")
include("dualarrays.jl")
include("products.jl")
include("matrices.jl")
include("lift.jl")
include("skeletons.jl")
include("closures.jl")
include("forms.jl")
include("rules.jl")
include("backend.jl")
include("nested.jl")
include("operators/gradient.jl")
include("operators/derivative.jl")
include("operators/pushforward.jl")
include("operators/pullback.jl")
include("operators/jacobian.jl")
include("operators/hvp.jl")
include("operators/preparation.jl")
include("sow.jl")
include("harvested.jl")

export AutoNested,
    Slot,
    Unit,
    batched_jacobian,
    collect_sown,
    form,
    mixed_vjp,
    nested_gradient,
    sow,
    unwrap,
    value_and_nested_gradient

include("windows.jl")
include("pooling.jl")

export adaptive_avg_pool,
    adaptive_max_pool,
    avg_pool,
    logsumexp_pool,
    lp_pool,
    max_pool,
    min_pool,
    reduce_window,
    sum_pool

include("loops.jl")

export bounded_fori_loop, bounded_scan_until, bounded_while_loop

end
