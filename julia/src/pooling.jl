# Pooling layers on `reduce_window`, the twins of Python's `pybridge.max_pool` and so on.

"""
    max_pool(x, kernel; stride=kernel, padding=0, dilation=1, ceil_mode=false, dims, ties=:first,
             return_indices=false)
    min_pool(x, kernel; ...)

The maximum (minimum) of each window along the axes `dims` of `x`, by default the first
`length(kernel)`, as in arrays of width, height, channels and batch.

`kernel`, `stride` and `dilation` are positive integers, one an axis of `dims`; `padding` an integer or
a pair `(low, high)` for each, or `:valid`, `:same`, `:same_lower`. With `ceil_mode` the output's size
rounds up, and a last window that would begin beyond `x` and its low padding is dropped. `ties` as in
[`reduce_window`](@ref). With `return_indices` the result is a pair, as of `findmax`: the values and the
`CartesianIndex` in `x` of each, of equal elements the first in row-major order.

# Example

```jldoctest
julia> using NestedGradients

julia> max_pool([5.0, 3.0, 1.0, 2.0, 5.0], (2,); stride=1)
4-element Vector{Float64}:
 5.0
 3.0
 2.0
 5.0
```
"""
function max_pool(x, kernel; ties = :first, return_indices = false, options...)
    layout = _layout(:max_pool, size(x), kernel; options...)
    return _extreme(max, typemin(eltype(x)), x, layout, ties, return_indices)
end

@doc (@doc max_pool) function min_pool(
    x,
    kernel;
    ties = :first,
    return_indices = false,
    options...,
)
    layout = _layout(:min_pool, size(x), kernel; options...)
    return _extreme(min, typemax(eltype(x)), x, layout, ties, return_indices)
end

"""
    sum_pool(x, kernel; stride=kernel, padding=0, dilation=1, ceil_mode=false, dims)

The sum of each window; arguments as for [`max_pool`](@ref).
"""
function sum_pool(x, kernel; options...)
    layout = _layout(:sum_pool, size(x), kernel; options...)
    return reduce_window(+, zero(eltype(x)), x; _geometry(layout)...)
end

"""
    avg_pool(x, kernel; count_include_pad=true, divisor_override=nothing, ...)

The mean of each window; arguments as for [`max_pool`](@ref). Padding counts unless
`count_include_pad=false`; what hangs over the padded `x` with `ceil_mode` never does.
"""
function avg_pool(
    x,
    kernel;
    count_include_pad = true,
    divisor_override = nothing,
    options...,
)
    layout = _layout(:avg_pool, size(x), kernel; options...)
    total = reduce_window(+, zero(eltype(x)), x; _geometry(layout)...)
    divisor_override === nothing || return total ./ divisor_override
    return total ./ _counts(layout, size(x), count_include_pad)
end

"""
    lp_pool(x, p, kernel; ...)

`(sum of x^p)^(1/p)` of each window; arguments as for [`max_pool`](@ref). As in torch the powers are of
`x`, not of its magnitude; `p = Inf` is `max_pool`. Where the sum is 0 the derivative is taken as 0.
"""
function lp_pool(x, p::Real, kernel; options...)
    p >= 1 || throw(ArgumentError("lp_pool: p must be at least 1, got $p"))
    isinf(p) && return max_pool(x, kernel; options...)
    power = isinteger(p) ? Int(p) : p
    return _root.(sum_pool(x.^power, kernel; options...), power)
end

_root(total, p) = p == 1 ? total : iszero(_plain(total)) ? zero(total) : total^(1 / p)

"""
    logsumexp_pool(x, kernel; ...)

`log(sum of exp(x))` of each window, a smooth maximum; arguments as for [`max_pool`](@ref).
"""
function logsumexp_pool(x, kernel; options...)
    layout = _layout(:logsumexp_pool, size(x), kernel; options...)
    return reduce_window(logaddexp, typemin(float(eltype(x))), x; _geometry(layout)...)
end

"""
    adaptive_max_pool(x, outputs; return_indices=false, dims)
    adaptive_avg_pool(x, outputs; dims)

The maximum (mean) of each of `outputs` windows along each axis of `dims`, by default the first
`length(outputs)`. Window `i` of `m` along an axis of length `n` is, counted from 0,
`floor(i n / m)` to `ceil((i + 1) n / m) - 1`, as in torch. With `return_indices`, as for
[`max_pool`](@ref), a pair.
"""
function adaptive_max_pool(x, outputs; return_indices = false, dims = nothing)
    at, inside, window = _adaptive(:adaptive_max_pool, size(x), outputs, dims)
    lowest = typemin(eltype(x))
    spread = ifelse.(inside, x[at...], lowest)
    values = reduce_window(max, lowest, spread; window, stride = window)
    return_indices || return values
    where_ = _places(max, lowest, spread, inside; window, stride = window)
    return values, _taken(at, where_)
end

@doc (@doc adaptive_max_pool) function adaptive_avg_pool(x, outputs; dims = nothing)
    at, inside, window = _adaptive(:adaptive_avg_pool, size(x), outputs, dims)
    spread = ifelse.(inside, x[at...], zero(eltype(x)))
    counts = reduce_window(+, 0, Int.(inside); window, stride = window)
    return reduce_window(+, zero(eltype(x)), spread; window, stride = window) ./ counts
end

### Where the extreme element is

function _extreme(op, lowest, x, layout, ties, return_indices)
    values = reduce_window(op, lowest, x; ties, _geometry(layout)...)
    return_indices || return values
    return values, _places(op, lowest, x, trues(size(x)); _geometry(layout)...)
end

# The index of each window's first extreme element among those that count, or first NaN.
function _places(op, lowest, x, counts; geometry...)
    function later(a, b)
        (b[2] && (!a[2] || beats(op, b[1], a[1]))) ? b : a
    end
    nothing_yet = (_plain(lowest), false, zero(first(CartesianIndices(x))))
    cells = (map(_plain, x), counts, CartesianIndices(x))
    return reduce_window(later, nothing_yet, cells; associative = true, geometry...)[3]
end

_taken(at, places) = map(i -> CartesianIndex(map(getindex, at, Tuple(i))), places)

@non_differentiable _places(::Any...)
@non_differentiable _taken(::Any...)

### Where the windows lie

struct _Layout{N}
    window::NTuple{N, Int}
    stride::NTuple{N, Int}
    dilation::NTuple{N, Int}
    asked::NTuple{N, NTuple{2, Int}}   # the padding asked for
    padding::NTuple{N, NTuple{2, Int}} # with the overhang of ceil_mode
end

function _geometry(l::_Layout)
    return (
        window = l.window,
        stride = l.stride,
        padding = l.padding,
        window_dilation = l.dilation,
    )
end

function _axes(name, n, count, dims)
    axes = dims === nothing ? ntuple(identity, count) : Tuple(dims)
    if length(axes) != count || !allunique(axes) || !all(d -> 1 <= d <= n, axes)
        throw(ArgumentError(
            "$name: $count axes are pooled, and dims = $axes of an array of $n axes do not fit",
        ))
    end
    return axes
end

function _layout(
    name,
    sizes::NTuple{N, Int},
    kernel;
    stride = kernel,
    padding = 0,
    dilation = 1,
    ceil_mode = false,
    dims = nothing,
) where {N}
    count = kernel isa Integer ? 1 : length(kernel)
    axes = _axes(name, N, count, dims)
    lengths = map(d -> sizes[d], axes)
    k, s, d = (
        _positive(label, v, count)
        for (label, v) in ((:kernel, kernel), (:stride, stride), (:dilation, dilation))
    )
    low, high = _padding(padding, lengths, k, s, d)
    if any(<(0), low) || any(<(0), high)
        throw(ArgumentError("$name: padding must not be negative, got $padding"))
    end
    over = ntuple(count) do i
        span = (k[i] - 1) * d[i] + 1
        room = lengths[i] + low[i] + high[i] - span
        out = fld(room, s[i]) + 1
        extra = 0
        if ceil_mode && mod(room, s[i]) != 0 && out * s[i] < lengths[i] + low[i]
            extra = max(0, out * s[i] + span - lengths[i] - low[i] - high[i])
            out += 1
        end
        out >= 1 ||
            throw(ArgumentError(
                "$name: the kernel spans $span and the padded axis $(axes[i]) has $(room + span)",
            ))
        w = Windows((lengths[i],), k[i], s[i], ((low[i], high[i] + extra),), 1, d[i])
        ks = offsets(w)
        if !all(o -> any(k -> cell(w, o, k) !== nothing, ks), CartesianIndices(outsize(w)))
            throw(ArgumentError(
                "$name: padding $padding leaves a window along axis $(axes[i]) without any element; give less",
            ))
        end
        return extra
    end
    at(values, other) = ntuple(N) do i
        j = findfirst(==(i), axes)
        return j === nothing ? other : values[j]
    end
    asked = ntuple(i -> (low[i], high[i]), count)
    padded = ntuple(i -> (low[i], high[i] + over[i]), count)
    return _Layout{N}(at(k, 1), at(s, 1), at(d, 1), at(asked, (0, 0)), at(padded, (0, 0)))
end

# How many elements, and padding if asked for, each window has.
function _counts(l::_Layout{N}, sizes, include_padding) where {N}
    along = ntuple(N) do i
        n, pads = sizes[i], l.padding[i]
        if include_padding
            n, pads = n + sum(l.asked[i]), (0, last(l.padding[i]) - last(l.asked[i]))
        end
        w = Windows((n,), l.window[i], l.stride[i], (pads,), 1, l.dilation[i])
        counts = _windowed(+, 0, ones(Int, n), w, false)
        return reshape(counts, ntuple(j -> j == i ? length(counts) : 1, N))
    end
    return broadcast(*, along...)
end

# Indices that lay every window's elements side by side, which of them are, and the window.
function _adaptive(name, sizes::NTuple{N, Int}, outputs, dims) where {N}
    count = outputs isa Integer ? 1 : length(outputs)
    axes = _axes(name, N, count, dims)
    m = _positive(:outputs, outputs, count)
    at = Vector{Int}[collect(1:n) for n in sizes]
    inside = [trues(n) for n in sizes]
    window = ones(Int, N)
    for (i, axis) in enumerate(axes)
        n = sizes[axis]
        first_(o) = o * n ÷ m[i]
        last_(o) = cld((o + 1) * n, m[i])
        longest = maximum(o -> last_(o) - first_(o), 0:(m[i] - 1))
        window[axis] = longest
        at[axis] = [
            min(first_(o) + j, last_(o) - 1) + 1
            for o in 0:(m[i] - 1)
            for j in 0:(longest - 1)
        ]
        inside[axis] = [
            first_(o) + j < last_(o)
            for o in 0:(m[i] - 1)
            for j in 0:(longest - 1)
        ]
    end
    shaped = ntuple(
        i -> reshape(inside[i], ntuple(j -> j == i ? length(inside[i]) : 1, N)),
        N,
    )
    return Tuple(at), broadcast(&, shaped...), Tuple(window)
end

@non_differentiable _layout(::Any...)
@non_differentiable _counts(::Any...)
@non_differentiable _adaptive(::Any...)
