# Where the windows of a reduction lie: everything static about it.
#
# Along an axis the cells lie on a line, spread out by the base dilation, with padding around; output
# `o` (from 0) sees the positions `o * stride + k * dilation` of it.

"""
    Windows

Where the windows of a reduction lie: what is static about it, one entry an axis.
"""
struct Windows{N}
    size::NTuple{N, Int}
    window::NTuple{N, Int}
    stride::NTuple{N, Int}
    low::NTuple{N, Int}
    high::NTuple{N, Int}
    base::NTuple{N, Int}
    dilation::NTuple{N, Int}
end

function Windows(
    sizes::NTuple{N, Int},
    window,
    stride,
    padding,
    base_dilation,
    window_dilation,
) where {N}
    w = _positive(:window, window, N)
    s = _positive(:stride, stride, N)
    b = _positive(:base_dilation, base_dilation, N)
    d = _positive(:window_dilation, window_dilation, N)
    low, high = _padding(padding, sizes, w, s, d)
    return Windows{N}(sizes, w, s, low, high, b, d)
end

function _positive(name, value, n)
    given = value isa Integer ? ntuple(_ -> Int(value), n) : Tuple(value)
    if !(all(v -> v isa Integer, given) && length(given) == n && all(>(0), given))
        throw(ArgumentError(
            "reduce_window: $name must be $n positive integers, one an axis of x (or one for all), got $value",
        ))
    end
    return ntuple(i -> Int(given[i]), n)
end

function _padding(padding, sizes::NTuple{N, Int}, window, stride, dilation) where {N}
    if padding isa Union{Symbol, AbstractString}
        name = Symbol(lowercase(String(padding)))
        name === :valid && return ntuple(_ -> 0, N), ntuple(_ -> 0, N)
        if name ∉ (:same, :same_lower)
            throw(ArgumentError(
                "reduce_window: padding $padding is unknown; give :valid, :same, :same_lower, an integer or a pair (low, high) an axis",
            ))
        end
        total = ntuple(N) do i
            span = (window[i] - 1) * dilation[i] + 1
            return max(0, (cld(sizes[i], stride[i]) - 1) * stride[i] + span - sizes[i])
        end
        less = total .÷ 2
        return name === :same ? (less, total .- less) : (total .- less, less)
    end
    pads = padding isa Integer ? ntuple(_ -> padding, N) : Tuple(padding)
    ispair(p) = p isa Integer || (length(p) == 2 && all(v -> v isa Integer, p))
    if length(pads) != N || !all(ispair, pads)
        throw(ArgumentError(
            "reduce_window: padding must be an integer or a pair (low, high) for each of the $N axes of x, got $padding",
        ))
    end
    return ntuple(i -> Int(first(pads[i])), N), ntuple(i -> Int(last(pads[i])), N)
end

"The size of a reduction's result."
function outsize(w::Windows{N}) where {N}
    return ntuple(N) do i
        spread = w.size[i] == 0 ? 0 : (w.size[i] - 1) * w.base[i] + 1
        room = spread + w.low[i] + w.high[i] - (w.window[i] - 1) * w.dilation[i] - 1
        return room < 0 ? 0 : room ÷ w.stride[i] + 1
    end
end

"The window's positions in the written order: row-major, the last axis fastest."
function offsets(w::Windows{N}) where {N}
    return [
        CartesianIndex(reverse(Tuple(k)) .- 1)
        for k in vec(CartesianIndices(reverse(w.window)))
    ]
end

# The cell that output `o` (from 1) sees at offset `k` (from 0), or nothing.
@inline function cell(w::Windows{N}, o::CartesianIndex{N}, k::CartesianIndex{N}) where {N}
    at = ntuple(i -> (o[i] - 1) * w.stride[i] + k[i] * w.dilation[i] - w.low[i], Val(N))
    for i in 1:N
        (at[i] < 0 || at[i] % w.base[i] != 0 || at[i] ÷ w.base[i] >= w.size[i]) &&
            return nothing
    end
    return CartesianIndex(ntuple(i -> at[i] ÷ w.base[i] + 1, Val(N)))
end

"Where the cell `i` (from 1) of an axis lies on its line, counted from 0; negative where it is cut."
@inline position(w::Windows, axis, i) = (i - 1) * w.base[axis] + w.low[axis]

"How many positions a window spans along an axis."
span(w::Windows, axis) = (w.window[axis] - 1) * w.dilation[axis] + 1

"""
    transposed(w)

The windows of the transpose of a windowed sum, which is a windowed sum of the cotangents: a cell is
seen by the outputs whose windows cover it.
"""
function transposed(w::Windows{N}) where {N}
    out = outsize(w)
    low = ntuple(i -> span(w, i) - 1 - w.low[i], N)
    high = ntuple(N) do i
        spread = out[i] == 0 ? 0 : (out[i] - 1) * w.stride[i] + 1
        return (w.size[i] - 1) * w.base[i] + span(w, i) - spread - low[i]
    end
    return Windows{N}(out, w.window, w.base, low, high, w.stride, w.dilation)
end
