# The backend that users name, and backends other than Zygote for the reverse pass.

"""
    AutoNested(backend)

An ADTypes backend whose operators can be differentiated again, with respect to the point, the
`DifferentiationInterface.Constant` contexts and what the function captured: `backend` runs one reverse
pass, and each further derivative is a dual number over it. A `Constant` is constant for the operator
itself and active for an outer AD.

The outer AD can be Zygote, ForwardDiff, ReverseDiff, or another `AutoNested`.

```jldoctest
julia> using NestedGradients, ADTypes, Zygote; import DifferentiationInterface as DI

julia> backend = AutoNested(AutoZygote());

julia> f(x, p) = p * sum(abs2, x);

julia> DI.gradient(f, backend, [1.0, 2.0], DI.Constant(3.0))
2-element Vector{Float64}:
  6.0
 12.0

julia> Zygote.gradient(p -> sum(DI.gradient(f, backend, [1.0, 2.0], DI.Constant(p))), 3.0)
(6.0,)
```
"""
struct AutoNested{B <: AbstractADType} <: AbstractADType
    backend::B
end

ADTypes.mode(nested::AutoNested) = ADTypes.mode(nested.backend)
DI.check_available(nested::AutoNested) = DI.check_available(nested.backend)
DI.inplace_support(::AutoNested) = DI.InPlaceNotSupported()

inner(nested::AutoNested) = inner(nested.backend)
inner(backend) = backend

# A backend that differentiates one array only gets all leaves in one vector.
function reversepass(backend::AbstractADType, h::H, s0, z::Tuple) where {H}
    leaves = captured(z, ())
    leaves === nothing && return h(z...), map(_ -> nothing, z)
    restored(v) = h(rebuild(z, first(unravel(leaves, v, 0)))...)
    flat = ravel(leaves)
    gradient = DI.gradient(v -> paired(restored(v), s0), inner(backend), flat)
    return restored(flat), first(unravel(leaves, gradient, 0))
end

paired(y, s0::Unit) = seed(s0, y) * y
paired(y::Number, s0::Number) = real(conj(s0) * y)
paired(y::AbstractArray, s0::AbstractArray) = sum(map(paired, y, s0))
paired(y::Union{Tuple, NamedTuple}, s0::Union{Tuple, NamedTuple}) = sum(map(
    paired,
    values(y),
    values(s0),
))
paired(y, ::Nothing) = false

ravel(x::Number) = [x]
ravel(x::AbstractArray{<:Number}) = vec(x)
ravel(::Nothing) = Bool[]
ravel(x::Union{Tuple, NamedTuple, AbstractArray}) = mapreduce(
    ravel,
    vcat,
    values(x);
    init = Bool[],
)

function ChainRulesCore.rrule(cfg::RuleConfig{>:HasReverseMode}, ::typeof(ravel), x)
    function ravel_pullback(Δ)
        c = plain(Δ)
        nest = c === nothing ? nothing : first(unravel(x, c, 0))
        return NoTangent(), tangent(cfg, x, nest)
    end
    return ravel(x), ravel_pullback
end

"The nest like `x` whose leaves are read from `v` after `offset`, and the offset after it."
unravel(::Nothing, v, offset) = nothing, offset
unravel(x::Number, v, offset) = v[offset + 1], offset + 1
function unravel(x::AbstractArray{<:Number}, v, offset)
    return reshape(v[(offset + 1):(offset + length(x))], size(x)), offset + length(x)
end
unravel(x::Tuple{}, v, offset) = (), offset
function unravel(x::Tuple, v, offset)
    head, offset = unravel(first(x), v, offset)
    rest, offset = unravel(Base.tail(x), v, offset)
    return (head, rest...), offset
end
function unravel(x::NamedTuple{names}, v, offset) where {names}
    parts, offset = unravel(values(x), v, offset)
    return NamedTuple{names}(parts), offset
end
function unravel(x::AbstractArray, v, offset)
    parts, offset = unravel(Tuple(x), v, offset)
    return reshape(collect(Any, parts), size(x)), offset
end
