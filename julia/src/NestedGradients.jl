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
    HasReverseMode,
    NoTangent,
    RuleConfig,
    Tangent,
    ZeroTangent,
    unthunk
using ForwardDiff: ForwardDiff, Dual, Partials
using LinearAlgebra:
    LinearAlgebra,
    Adjoint,
    Diagonal,
    Transpose,
    diag,
    dot,
    kron,
    logabsdet,
    mul!,
    tr
using Random: AbstractRNG

include("levels.jl")
include("dualarrays.jl")
include("products.jl")
include("lift.jl")
include("skeletons.jl")
include("closures.jl")
include("forms.jl")
include("rules.jl")
include("sow.jl")

export Slot, Unit, form, unwrap, sow, collect_sown

# Windows, pooling and bounded loops: each engineer's include lines go here.

end
