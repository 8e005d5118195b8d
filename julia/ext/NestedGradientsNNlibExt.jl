# NNlib's layers on our arrays: what is linear or bilinear is done on values and partials apart.
#
# Lux defines some of these for any array of dual numbers; ours are more specific, since they keep the
# two streams, and since two of Lux's are not the derivative (∇meanpool, logsoftmax; see test/layers.jl).
module NestedGradientsNNlibExt

using ChainRulesCore: ChainRulesCore, NoTangent, unthunk
using ForwardDiff: Dual
using NestedGradients: DualArray, Level, bilinear, dual, moved, parts
using NNlib: NNlib, ConvDims, PoolDims

# ---- activations ----

# Base's `tanh` and `exp` of a dual number leave SIMD; NNlib's fast ones stay on it, and their
# derivatives follow from their values.
@inline function NNlib.tanh_fast(x::Dual{Level{J, C}, T, N}) where {J, C, T, N}
    y = NNlib.tanh_fast(x.value)
    return Dual{Level{J, C}}(y, (1 - y * y) * x.partials)
end
@inline function NNlib.sigmoid_fast(x::Dual{Level{J, C}, T, N}) where {J, C, T, N}
    y = NNlib.sigmoid_fast(x.value)
    return Dual{Level{J, C}}(y, (y * (1 - y)) * x.partials)
end

# ---- products ----

# Lux has methods for arrays of dual numbers of one tag; of the partners of ours, it keeps the interleaved.
const Plain = Union{AbstractFloat, Integer}
for op in (:conv, :∇conv_data, :∇conv_filter)
    @eval begin
        function NNlib.$op(
            a::DualArray{<:Dual{G, T, P}, N},
            b::AbstractArray{<:Plain, N},
            cdims::ConvDims;
            kw...,
        ) where {G, T, P, N}
            return bilinear((x, y) -> NNlib.$op(x, y, cdims; kw...), a, b)
        end
        function NNlib.$op(
            a::AbstractArray{<:Plain, N},
            b::DualArray{<:Dual{G, T, P}, N},
            cdims::ConvDims;
            kw...,
        ) where {G, T, P, N}
            return bilinear((x, y) -> NNlib.$op(x, y, cdims; kw...), a, b)
        end
        function NNlib.$op(
            a::DualArray{<:Dual{G, T, P}, N},
            b::DualArray{<:Dual{G, <:Real, P}, N},
            cdims::ConvDims;
            kw...,
        ) where {G, T, P, N}
            return bilinear((x, y) -> NNlib.$op(x, y, cdims; kw...), a, b)
        end
        function NNlib.$op(
            a::DualArray{<:Dual{G, T, P}, N},
            b::DualArray{<:Dual{<:Any, <:Real}, N},
            cdims::ConvDims;
            kw...,
        ) where {G, T, P, N}
            return bilinear((x, y) -> NNlib.$op(x, y, cdims; kw...), a, b)
        end
    end
end

const Stack{D} = DualArray{D, 3}
NNlib.batched_mul(A::Stack, B::Stack) = bilinear(NNlib.batched_mul, A, B)
NNlib.batched_mul(A::Stack, B::AbstractArray{<:Real, 3}) = bilinear(NNlib.batched_mul, A, B)
NNlib.batched_mul(A::AbstractArray{<:Real, 3}, B::Stack) = bilinear(NNlib.batched_mul, A, B)
NNlib.batched_adjoint(A::Stack) = moved(NNlib.batched_adjoint, A)
NNlib.batched_transpose(A::Stack) = moved(NNlib.batched_transpose, A)

# ---- softmax ----

function NNlib.softmax(x::DualArray{<:Dual{G, T, P}}; dims = 1) where {G, T, P}
    v, dv = parts(G, x)
    y = NNlib.softmax(v; dims)
    return dual(G, y, y .* (dv .- sum(y .* dv; dims)))
end
function NNlib.logsoftmax(x::DualArray{<:Dual{G, T, P}}; dims = 1) where {G, T, P}
    v, dv = parts(G, x)
    return dual(G, NNlib.logsoftmax(v; dims), dv .- sum(NNlib.softmax(v; dims) .* dv; dims))
end

# ---- pooling ----

# Linear: pool both parts. The gradient needs only the sizes of `y` and `x`.
function NNlib.meanpool(
    x::DualArray{<:Dual{G, T, P}},
    pdims::PoolDims;
    kw...,
) where {G, T, P}
    return moved(a -> NNlib.meanpool(a, pdims; kw...), x)
end
function ChainRulesCore.rrule(
    ::typeof(NNlib.meanpool),
    x::DualArray,
    pdims::PoolDims;
    kw...,
)
    y = NNlib.meanpool(x, pdims; kw...)
    meanpool_pullback(Δ) = (
        NoTangent(),
        unpooled(dense(unthunk(Δ)), size(x), pdims; kw...),
        NoTangent(),
    )
    return y, meanpool_pullback
end
unpooled(dy::DualArray, dims, pdims; kw...) = moved(
    d -> unpooled(d, dims, pdims; kw...),
    dy,
)
function unpooled(dy, dims, pdims; kw...)
    return NNlib.∇meanpool(dy, dy, similar(dy, dims), pdims; kw...)
end
dense(Δ::DualArray) = Δ
dense(Δ) = collect(Δ)

# The cell that is the greatest moves; so its index is found once, and values and partials are read there.
function NNlib.maxpool(
    x::DualArray{<:Dual{G, T, P}},
    pdims::PoolDims;
    kw...,
) where {G, T, P}
    return x[winners(x, pdims)]
end
function ChainRulesCore.rrule(::typeof(NNlib.maxpool), x::DualArray, pdims::PoolDims; kw...)
    I = winners(x, pdims)
    maxpool_pullback(Δ) = (NoTangent(), spread(dense(unthunk(Δ)), I, size(x)), NoTangent())
    return x[I], maxpool_pullback
end

"The linear index of the greatest cell of each window, the first of equal ones."
function winners(x, pdims)
    v = plainvalue(x)
    spatial = ndims(x) - 2
    kernel, stride = NNlib.kernel_size(pdims), NNlib.stride(pdims)
    padding, dilation = NNlib.padding(pdims), NNlib.dilation(pdims)
    out = (NNlib.output_size(pdims)..., size(x)[(end - 1):end]...)
    cells = CartesianIndices(kernel)
    linear = LinearIndices(v)
    return map(CartesianIndices(out)) do o
        best = 0
        for k in cells
            at = ntuple(
                d -> (o[d] - 1) * stride[d] -
                    padding[2d - 1] +
                    (k[d] - 1) * dilation[d] +
                    1,
                spatial,
            )
            all(d -> 1 <= at[d] <= size(v, d), 1:spatial) || continue
            i = linear[at..., o[spatial + 1], o[spatial + 2]]
            (best == 0 || v[i] > v[best]) && (best = i)
        end
        best == 0 &&
            throw(ArgumentError(
                "a window of this max pooling lies in the padding entirely",
            ))
        return best
    end
end
plainvalue(x) = x
plainvalue(x::DualArray) = plainvalue(x.value)

spread(dy::DualArray, I, dims) = moved(d -> spread(d, I, dims), dy)
function spread(dy, I, dims)
    dx = fill!(similar(dy, dims), false)
    for i in eachindex(dy, I)
        dx[I[i]] += dy[i]
    end
    return dx
end

end
