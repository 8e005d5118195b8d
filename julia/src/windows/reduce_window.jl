# The public function: arguments, and which way a reduction is computed.

"""
    reduce_window(op, init, x; window, stride=1, padding=:valid, base_dilation=1,
                  window_dilation=1, ties=:first, associative=nothing)

Reduce each window of the array `x`, or of a tuple of arrays at once, differentiably.

Each window is folded left to right in row-major order (the last axis fastest, as on the Python
side), starting from `init`, which is used exactly once; padding and the holes of a base dilation are
skipped. A window without any cell returns `init`. Sums and products of `Float16` accumulate in
`Float32`.

With a tuple of arrays of one size, `init` is a tuple of numbers, `op` takes and returns tuples, and
so does `reduce_window`.

`window`, `stride`, `base_dilation` and `window_dilation` are positive integers, one an axis of `x` or
one for all; `padding` is `:valid`, `:same`, `:same_lower`, or for each axis an integer or a pair
`(low, high)`, which may be negative. As in XLA, `:same` and `:same_lower` pad by the size before base
dilation.

In `max` and `min` a NaN propagates. Of equal elements the first has the derivative (`ties = :first`),
or all in equal shares (`ties = :split`), NaNs too; `init` counts as the first element, but wins no tie
where it is the identity (`-Inf` for `max`).

`associative = true` promises that `op` is associative (it need not commute): windows of more than
$UNROLLED positions then cost only a logarithm of their size, within rounding of the written order.
`nothing` means true of `+`, `*`, `max`, `min`, `&`, `|`, `xor` and `NestedGradients.logaddexp`;
`false` keeps the written order exactly.

There are derivatives of any order for dual numbers of ForwardDiff, and rules for reverse mode
(ChainRules), which also give the gradients of `init` and of what `op` captures; forward over reverse
gives every higher derivative. Reverse over reverse gives second derivatives of one array, except in
what `op` captures; what it cannot give is an error.

Throws an `ArgumentError` that names the argument where the geometry is malformed, or where `op` returns
anything but a number (for a tuple of arrays: a tuple of as many numbers).

# Example

```jldoctest
julia> using NestedGradients

julia> reduce_window(max, 2.5, [1.0, 3.0, 2.0, -1.0, 4.0]; window=2)
4-element Vector{Float64}:
 3.0
 3.0
 2.5
 4.0

julia> larger(a, b) = b[1] > a[1] ? b : a;

julia> reduce_window(larger, (-Inf, 0), ([1.0, 3.0, 2.0], [1, 2, 3]); window=2)
([3.0, 3.0], [2, 2])
```
"""
function reduce_window(op, init, x; kwargs...)
    reducer, w, doubles = _arguments(op, init, x; kwargs...)
    return _windowed(reducer, init, x, w, doubles)
end

function _arguments(
    op,
    init,
    x;
    window,
    stride = 1,
    padding = :valid,
    base_dilation = 1,
    window_dilation = 1,
    ties = :first,
    associative = nothing,
)
    sizes = _sizes(init, x)
    w = Windows(sizes, window, stride, padding, base_dilation, window_dilation)
    if ties ∉ (:first, :split)
        throw(ArgumentError(
            "reduce_window: ties must be :first or :split, got $(repr(ties))",
        ))
    elseif ties === :split && !(op isa Extremum)
        throw(ArgumentError(
            "reduce_window: ties = :split applies to max and min only, got $op",
        ))
    elseif !(associative isa Union{Nothing, Bool})
        throw(ArgumentError(
            "reduce_window: associative must be nothing, true or false, got $(repr(associative))",
        ))
    end
    reducer = op isa Extremum && !(x isa Tuple) ? Extreme{ties}(op) : op
    promised = associative === nothing ? isassociative(reducer) : associative
    return reducer, w, promised && prod(w.window) > UNROLLED
end

_sizes(_, x::AbstractArray) = size(x)
function _sizes(init, x::Tuple)
    if isempty(x) || !all(a -> a isa AbstractArray && size(a) == size(first(x)), x)
        throw(ArgumentError(
            "reduce_window: x must be an array or a tuple of arrays of one size, got $(summary.(x))",
        ))
    elseif !(init isa Tuple && length(init) == length(x))
        throw(ArgumentError(
            "reduce_window: init must be a tuple of $(length(x)) numbers, one for each array of x, got $init",
        ))
    end
    return size(first(x))
end
function _sizes(_, x)
    throw(ArgumentError(
        "reduce_window: x must be an array or a tuple of arrays, got a $(typeof(x))",
    ))
end

function _windowed(op, init, x, w::Windows, doubles::Bool)
    T = elementtype(op, init, x)
    if any(iszero, outsize(w))
        E = T === Any ? _promote(typeof(init), _celltype(x)) : T
        return _unzip(x, Array{E}(undef, outsize(w)))
    end
    begun, cells = _promoted(op, init, x, T, doubles)
    return _unzip(x, (doubles ? doubled : written)(op, start(op, begun), cells, w))
end

# Narrow floats accumulate in Float32; a maximum accumulates nothing.
function _windowed(op, init, x::AbstractArray{Float16}, w::Windows, doubles::Bool)
    wide = _windowed(op, Float32(init), map(Float32, x), w, doubles)
    return eltype(wide) === Float32 ? map(Float16, wide) : wide
end
_windowed(op::Extreme, init, x::AbstractArray{Float16}, w::Windows, doubles::Bool) = invoke(
    _windowed,
    Tuple{Any, Any, Any, Windows, Bool},
    op,
    init,
    x,
    w,
    doubles,
)

"The type of what the fold reaches from init; `Any` where it is not one type."
function elementtype(op, init, x)
    T = Base.promote_op(op, typeof(init), _celltype(x))
    isconcretetype(T) || return Any
    accepted(typeof(init), T) || _refused(init, "a $T")
    return _promote(typeof(init), T)
end
elementtype(::Extreme, init, x) = promote_type(typeof(init), eltype(x))

_celltype(x::AbstractArray) = eltype(x)
_celltype(x::Tuple) = Tuple{map(eltype, x)...}
_promote(A, B) = promote_type(A, B)
_promote(::Type{A}, ::Type{B}) where {A <: Tuple, B <: Tuple} = Tuple{map(
    promote_type,
    fieldtypes(A),
    fieldtypes(B),
)...}

# init in the type of the result, and the cells too where they are combined with each other.
function _promoted(op, init, x, T, doubles)
    cells = doubles || op isa Extreme ? _converted(T, x) : x
    return _to(T, init), cells
end

_to(::Type, v) = v
_to(::Type{T}, v::Number) where {T <: Number} = convert(T, v)
_to(::Type{T}, v::Tuple) where {T <: Tuple} = map(_to, fieldtypes(T), v)
_converted(::Type{T}, x::AbstractArray) where {T} = eltype(x) === T ?
    x :
    map(v -> _to(T, v), x)
_converted(::Type{T}, x::Tuple) where {T <: Tuple} = map(_converted, fieldtypes(T), x)
_converted(::Type, x::Tuple) = x

# Results of several operands come as an array of tuples.
_unzip(_, y) = y
function _unzip(x::Tuple, y)
    return ntuple(length(x)) do i
        isempty(y) && return similar(y, fieldtype(eltype(y), i))
        column = map(t -> t[i], y)
        isconcretetype(eltype(column)) && return column
        return convert(Array{mapreduce(typeof, promote_type, column)}, column)
    end
end
