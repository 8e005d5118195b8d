# Lux's dense layer on our arrays: products on BLAS, and one fused loop each way; and Lux's operators.
module NestedGradientsLuxExt

using ChainRulesCore:
    ChainRulesCore,
    HasReverseMode,
    NoTangent,
    RuleConfig,
    Tangent,
    ZeroTangent,
    rrule_via_ad,
    unthunk
using Lux: Lux, LuxLib, NNlib, StatefulLuxLayer
using NestedGradients:
    NestedGradients,
    AutoNested,
    DualMatrix,
    captured,
    holds,
    later,
    leafcotangents,
    tangent

const fused_dense = LuxLib.fused_dense_bias_activation

# Lux computes σ.(W * x .+ b) in its own loops for plain arrays and broadcasts for any others, saving
# each step for the reverse pass. With these activations the result alone is enough.
fromresult(::typeof(tanh), y) = 1 - y * y
fromresult(::typeof(NNlib.tanh_fast), y) = 1 - y * y
fromresult(::typeof(NNlib.sigmoid), y) = y * (1 - y)
fromresult(::typeof(NNlib.sigmoid_fast), y) = y * (1 - y)
const FromResult = Union{
    typeof(tanh),
    typeof(NNlib.tanh_fast),
    typeof(NNlib.sigmoid),
    typeof(NNlib.sigmoid_fast),
}

activated(::typeof(identity), z, ::Nothing) = z
activated(σ::F, z, ::Nothing) where {F} = inplace!(σ, z, z)
activated(σ::F, z, b) where {F} = inplace!((a, c) -> σ(a + c), z, z, b)

"`f.(args...)`, in the fresh array `z` if that can hold it."
function inplace!(f::F, z, args...) where {F}
    T = Broadcast.combine_eltypes(f, args)
    return holds(z, T) ? broadcast!(f, z, args...) : broadcast(f, args...)
end

function products(δ, W, x, b)
    db = b === nothing ? NoTangent() : vec(sum(δ; dims = 2))
    return later(δ, x'), W' * δ, db
end

for (TW, TX) in (
        (AbstractMatrix, DualMatrix),
        (DualMatrix, AbstractMatrix),
        (DualMatrix, DualMatrix),
    )
    @eval begin
        function ChainRulesCore.rrule(
            ::RuleConfig{>:HasReverseMode},
            ::typeof(fused_dense),
            σ::Union{typeof(identity), FromResult},
            W::$TW,
            x::$TX,
            b::Union{Nothing, AbstractVector},
        )
            y = activated(σ, W * x, b)
            function dense_pullback(Δ)
                δ = σ === identity ?
                    unthunk(Δ) :
                    broadcast((d, a) -> d * fromresult(σ, a), unthunk(Δ), y)
                return NoTangent(), NoTangent(), products(δ, W, x, b)...
            end
            return y, dense_pullback
        end
        # any other activation: its broadcast differentiated by the AD
        function ChainRulesCore.rrule(
            cfg::RuleConfig{>:HasReverseMode},
            ::typeof(fused_dense),
            σ::F,
            W::$TW,
            x::$TX,
            b::Union{Nothing, AbstractVector},
        ) where {F}
            y, back = rrule_via_ad(cfg, broadcast, σ, activated(identity, W * x, b))
            function dense_pullback(Δ)
                _, dσ, δ = back(Δ)
                return NoTangent(), dσ, products(unthunk(δ), W, x, b)...
            end
            return y, dense_pullback
        end
    end
end

# ---- StatefulLuxLayer ----
#
# Mutable, but Lux gives it a structural tangent with the one field `ps`; its state does not vary.

function NestedGradients.captured(s::StatefulLuxLayer, path)
    ps = captured(s.ps, (path..., :ps))
    return ps === nothing ? nothing : (; ps)
end
function NestedGradients.tangent(cfg, s::StatefulLuxLayer, c)
    return c === nothing ?
        ZeroTangent() :
        Tangent{typeof(s)}(; ps = tangent(cfg, s.ps, c.ps))
end
function NestedGradients.cotangents_of(cfg, s::StatefulLuxLayer, params, c)
    return c === nothing ?
        nothing :
        (; ps = leafcotangents(cfg, s.ps, params.ps, get(c, :ps, nothing)))
end

# ---- Lux's own operators, for who names a nested backend there ----

function Lux.batched_jacobian(f::F, backend::AutoNested, x::AbstractArray) where {F}
    return NestedGradients.batched_jacobian(f, backend, x)
end
function Lux.vector_jacobian_product(f::F, backend::AutoNested, x, u) where {F}
    return NestedGradients.covector(f, backend, x, u, ())
end
function Lux.jacobian_vector_product(f::F, backend::AutoNested, x, u) where {F}
    return last(NestedGradients.value_and_directional(f, backend, x, u, ()))
end

end
