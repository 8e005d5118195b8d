# NNlib's layers on our arrays.
module NestedGradientsNNlibExt

using ForwardDiff: Dual
using NestedGradients: Level
using NNlib: NNlib

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

end
