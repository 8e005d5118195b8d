# NNlib's layers on our arrays.
module NestedGradientsNNlibExt

using ForwardDiff: ForwardDiff, Dual
using NestedGradients: Level, LevelDual, dual
using NNlib: NNlib

# Base's `tanh` and `exp` of a dual number leave SIMD; NNlib's fast ones stay on it, and their
# derivatives follow from their values.
@inline function NNlib.tanh_fast(x::LevelDual{J, C, T}) where {J, C, T}
    y = NNlib.tanh_fast(x.value)
    return dual(Level{J, C}, y, (1 - y * y) * x.partials[1])
end
@inline function NNlib.sigmoid_fast(x::LevelDual{J, C, T}) where {J, C, T}
    y = NNlib.sigmoid_fast(x.value)
    return dual(Level{J, C}, y, y * (1 - y) * x.partials[1])
end

end
