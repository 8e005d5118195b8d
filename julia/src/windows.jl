# Windowed reductions with derivatives in every case, the twin of Python's `pybridge.reduce_window`.
#
# The primal code is generic, so dual numbers carry forward mode. For reverse mode each kind of
# reducer has its rule: a sum is linear, a maximum selects, anything else replays its steps.

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

"""
    reduce_window(op, init, x; window, stride=1, padding=:valid, base_dilation=1,
                  window_dilation=1, ties=:first)

Reduce each window of the array `x`, differentiably.

Each window is folded left to right in row-major order (the last axis fastest, as on the Python
side), starting from `init`, which is used exactly once; padding and the holes of a base dilation are
skipped. A window without any cell returns `init`. Sums and products of `Float16` accumulate in
`Float32`.

`window`, `stride`, `base_dilation` and `window_dilation` are positive integers, one an axis of `x` or
one for all; `padding` is `:valid`, `:same`, `:same_lower`, or for each axis an integer or a pair
`(low, high)`, which may be negative.

In `max` and `min` a NaN propagates and the first NaN has the derivative. Of equal elements the first
has it (`ties = :first`), or all in equal shares (`ties = :split`); `init` counts as the first element,
but wins no tie where it is the identity (`-Inf` for `max`).

There are derivatives of any order for dual numbers of ForwardDiff, and rules for reverse mode
(ChainRules), which also give the gradients of `init` and of what `op` captures; forward over reverse
gives second derivatives of everything, reverse over reverse of all but the captures.

Throws an `ArgumentError` that names the argument where the geometry is malformed.

# Example

```jldoctest
julia> using NestedGradients

julia> reduce_window(max, 2.5, [1.0, 3.0, 2.0, -1.0, 4.0]; window=2)
4-element Vector{Float64}:
 3.0
 3.0
 2.5
 4.0
```
"""
function reduce_window(
    op,
    init,
    x::AbstractArray;
    window,
    stride = 1,
    padding = :valid,
    base_dilation = 1,
    window_dilation = 1,
    ties = :first,
)
    w = Windows(size(x), window, stride, padding, base_dilation, window_dilation)
    return _reduce(op, init, x, w, _ties(op, ties))
end

function _ties(op, ties)
    if ties ∉ (:first, :split)
        throw(ArgumentError(
            "reduce_window: ties must be :first or :split, got $(repr(ties))",
        ))
    elseif ties === :split && !(op isa Extremum)
        throw(ArgumentError(
            "reduce_window: ties = :split applies to max and min only, got $op",
        ))
    end
    return ties
end

const Extremum = Union{typeof(max), typeof(min)}

# The element type of the result: what the fold reaches from init.
function _eltype(op, init, x)
    T = Base.promote_op(op, typeof(init), eltype(x))
    return isconcretetype(T) ? promote_type(typeof(init), T) : Any
end

function _reduce(op, init, x, w::Windows, ties)
    T = _eltype(op, init, x)
    start = T <: Number && isconcretetype(T) ? convert(T, init) : init
    any(iszero, outsize(w)) && return Array{T}(undef, outsize(w))
    ks = offsets(w)
    return map(o -> _fold(op, start, x, w, o, ks), CartesianIndices(outsize(w)))
end

function _reduce(op, init, x::AbstractArray{Float16}, w::Windows, ties)
    wide = _reduce(op, Float32(init), map(Float32, x), w, ties)
    return eltype(wide) === Float32 ? map(Float16, wide) : wide
end

@inline function _fold(op, init, x, w, o, ks)
    accumulated = init
    for k in ks
        c = cell(w, o, k)
        c === nothing || (accumulated = op(accumulated, @inbounds x[c]))
    end
    return accumulated
end

### Maximum and minimum

# ForwardDiff compares dual numbers by their partials too where the values are equal, so that ties
# would be broken by the direction of differentiation: what is compared here are plain numbers.
_plain(x) = x
_plain(x::Dual) = _plain(ForwardDiff.value(x))
_beats(::typeof(max), a, b) = a > b || (isnan(a) && !isnan(b))
_beats(::typeof(min), a, b) = a < b || (isnan(a) && !isnan(b))
_ties_with(op, a, b) = !_beats(op, a, b) && !_beats(op, b, a)
_isidentity(::typeof(max), a) = !isnan(a) && !(a > typemin(typeof(a)))
_isidentity(::typeof(min), a) = !isnan(a) && !(a < typemax(typeof(a)))

# The elements that have window `o`'s derivative, as linear indices of x; 0 is init.
function _winners!(found, op, init, x, w, o, ks, ties)
    empty!(found)
    for k in ks
        c = cell(w, o, k)
        c === nothing && continue
        i = LinearIndices(x)[c]
        if isempty(found) || _beats(op, x[i], x[first(found)])
            empty!(found)
            push!(found, i)
        elseif ties === :split && _ties_with(op, x[i], x[first(found)])
            push!(found, i)
        end
    end
    if isempty(found) || _beats(op, init, x[first(found)])
        empty!(found)
        push!(found, 0)
    elseif !_isidentity(op, init) && _ties_with(op, init, x[first(found)])
        ties === :first && empty!(found)
        pushfirst!(found, 0)
    end
    return found
end

"The elements that have each window's derivative: linear indices of x, 0 for init."
function selection(op::Extremum, init, x, w::Windows, ties)
    ks, start, values = offsets(w), _plain(init), map(_plain, x)
    return map(CartesianIndices(outsize(w))) do o
        return _winners!(Int[], op, start, values, w, o, ks, ties)
    end
end

function _reduce(op::Extremum, init, x, w::Windows, ties)
    T = promote_type(typeof(init), eltype(x))
    return _pick(convert(T, init), x, selection(op, init, x, w, ties), T)
end
_reduce(op::Extremum, init, x::AbstractArray{Float16}, w::Windows, ties) = invoke(
    _reduce,
    Tuple{Extremum, Any, Any, Windows, Any},
    op,
    init,
    x,
    w,
    ties,
)

# The mean of the selected elements, which are equal; only their derivatives differ.
function _pick(init, x, selected, ::Type{T}) where {T}
    element(i) = i == 0 ? init : convert(T, x[i])
    result = Array{T}(undef, size(selected))
    for (o, found) in pairs(selected)
        one = element(first(found))
        if length(found) > 1
            if isfinite(one)
                one += sum(i -> element(i) - one, found) / length(found)
            else
                one = sum(element, found) / length(found)
            end
        end
        result[o] = one
    end
    return result
end

# The transpose of `_pick` in (init, x).
function _spread(ȳ, selected, sizes)
    x̄ = zeros(eltype(ȳ), sizes)
    īnit = zero(eltype(ȳ))
    for (o, found) in pairs(selected), i in found
        share = length(found) == 1 ? ȳ[o] : ȳ[o] / length(found)
        i == 0 ? (īnit += share) : (x̄[i] += share)
    end
    return īnit, x̄
end

### Rules

# Each rule's primal is `reduce_window` again and its selection has no derivative, so that reverse
# mode can differentiate the rules themselves.

function ChainRulesCore.frule(
    (_, ȯp, i̇nit, ẋ),
    ::typeof(reduce_window),
    op,
    init,
    x::AbstractArray;
    kwargs...,
)
    if !(ȯp isa AbstractZero)
        throw(ArgumentError(
            "reduce_window: forward mode by rules has no derivative with respect to what op captures; differentiate with ForwardDiff, or in reverse mode",
        ))
    end
    i̇nit = i̇nit isa AbstractZero ? zero(init) : unthunk(i̇nit)
    ẋ = ẋ isa AbstractZero ? zero(x) : unthunk(ẋ)
    T = _realtype(init, x, i̇nit, ẋ)
    y = reduce_window(op, _dual(T, init, i̇nit), _duals(T, x, ẋ); kwargs...)
    return map(v -> _undual(T, v), y), map(v -> _tangent(T, v), y)
end

struct WindowTag end

# A tag of its own for each number type T, so that what is nested in T lies within.
_tag(::Type{T}) where {T} = typeof(ForwardDiff.Tag(WindowTag(), T))

_dual(::Type{T}, x::Real, ẋ) where {T} = Dual{_tag(T)}(convert(T, x), convert(T, ẋ))
function _dual(::Type{T}, x::Complex, ẋ) where {T}
    return Complex(_dual(T, real(x), real(ẋ)), _dual(T, imag(x), imag(ẋ)))
end

_undual(::Type{T}, y::Complex) where {T} = Complex(_undual(T, real(y)), _undual(T, imag(y)))
_undual(::Type{T}, y::Real) where {T} = y isa Dual{_tag(T)} ? ForwardDiff.value(y) : y
_tangent(::Type{T}, y::Complex) where {T} = Complex(
    _tangent(T, real(y)),
    _tangent(T, imag(y)),
)
_tangent(::Type{T}, y::Real) where {T} = y isa Dual{_tag(T)} ?
    ForwardDiff.partials(y, 1) :
    zero(y)

# By map, since broadcasting an array without axes gives a scalar.
_duals(::Type{T}, x, ẋ) where {T} = map((v, t) -> _dual(T, v, t), x, ẋ)

_realtype(values...) = float(mapreduce(v -> real(eltype(v)), promote_type, values))

function ChainRulesCore.rrule(
    ::typeof(reduce_window),
    op::Extremum,
    init,
    x::AbstractArray;
    window,
    stride = 1,
    padding = :valid,
    base_dilation = 1,
    window_dilation = 1,
    ties = :first,
)
    y = reduce_window(
        op,
        init,
        x;
        window,
        stride,
        padding,
        base_dilation,
        window_dilation,
        ties,
    )
    w = Windows(size(x), window, stride, padding, base_dilation, window_dilation)
    selected = selection(op, init, x, w, ties)
    function reduce_window_pullback(ȳ)
        īnit, x̄ = _spread(unthunk(ȳ), selected, size(x))
        return NoTangent(), NoTangent(), _project(init, īnit), _project(x, x̄)
    end
    return y, reduce_window_pullback
end

_project(x, x̄) = ProjectTo(x)(x̄)

@non_differentiable Windows(::Any...)
@non_differentiable selection(::Any...)
@non_differentiable offsets(::Any...)

function ChainRulesCore.rrule(::typeof(_spread), ȳ, selected, sizes)
    function spread_pullback(c)
        c̄init, c̄ = unthunk(c)
        T = eltype(ȳ)
        init = c̄init isa AbstractZero ? zero(T) : unthunk(c̄init)
        x = c̄ isa AbstractZero ? zeros(T, sizes) : unthunk(c̄)
        S = promote_type(typeof(init), eltype(x))
        picked = map(selected) do found
            return sum(i -> convert(S, i == 0 ? init : x[i]), found) / length(found)
        end
        return NoTangent(), _project(ȳ, picked), NoTangent(), NoTangent()
    end
    return _spread(ȳ, selected, sizes), spread_pullback
end

function ChainRulesCore.rrule(
    ::typeof(reduce_window),
    op::typeof(+),
    init,
    x::AbstractArray;
    window,
    stride = 1,
    padding = :valid,
    base_dilation = 1,
    window_dilation = 1,
    ties = :first,
)
    y = reduce_window(
        op,
        init,
        x;
        window,
        stride,
        padding,
        base_dilation,
        window_dilation,
        ties,
    )
    w = Windows(size(x), window, stride, padding, base_dilation, window_dilation)
    function reduce_window_pullback(ȳ)
        ȳ = unthunk(ȳ)
        return NoTangent(),
            NoTangent(),
            _project(init, sum(ȳ)),
            _project(x, _spread_sum(ȳ, w))
    end
    return y, reduce_window_pullback
end

# The transpose of a windowed sum.
function _spread_sum(ȳ, w::Windows)
    x̄ = zeros(eltype(ȳ), w.size)
    ks = offsets(w)
    for o in CartesianIndices(ȳ), k in ks
        c = cell(w, o, k)
        c === nothing || (x̄[c] += ȳ[o])
    end
    return x̄
end

function ChainRulesCore.rrule(::typeof(_spread_sum), ȳ, w::Windows)
    function spread_sum_pullback(c)
        c = unthunk(c)
        return NoTangent(),
            _project(ȳ, _reduce(+, zero(eltype(c)), c, w, :first)),
            NoTangent()
    end
    return _spread_sum(ȳ, w), spread_sum_pullback
end

# Any other reducer: the steps of each window again, backwards.
function ChainRulesCore.rrule(
    config::RuleConfig{>:HasReverseMode},
    ::typeof(reduce_window),
    op,
    init,
    x::AbstractArray;
    window,
    stride = 1,
    padding = :valid,
    base_dilation = 1,
    window_dilation = 1,
    ties = :first,
)
    y = reduce_window(
        op,
        init,
        x;
        window,
        stride,
        padding,
        base_dilation,
        window_dilation,
        ties,
    )
    w = Windows(size(x), window, stride, padding, base_dilation, window_dilation)
    function reduce_window_pullback(ȳ)
        ōp, īnit, x̄ = _replay(config, op, init, x, unthunk(ȳ), w)
        return NoTangent(), ōp, _project(init, īnit), _project(x, x̄)
    end
    return y, reduce_window_pullback
end

# Here too the cheaper rules of `max`, `min` and `+` apply.
ChainRulesCore.rrule(
    ::RuleConfig{>:HasReverseMode},
    f::typeof(reduce_window),
    op::Union{Extremum, typeof(+)},
    init,
    x::AbstractArray;
    kwargs...,
) = ChainRulesCore.rrule(f, op, init, x; kwargs...)

# The gradient of <ȳ, reduce_window(op, init, x)> in (op, init, x).
function _replay(config, op, init, x, ȳ, w::Windows)
    if eltype(x) === Float16
        x, init = map(Float32, x), Float32(init)
    end
    T = promote_type(_eltype(op, init, x), eltype(ȳ))
    x̄ = T === Any ? zeros(eltype(ȳ), size(x)) : zeros(T, size(x))
    īnit = zero(eltype(x̄))
    ōp = NoTangent()
    ks = offsets(w)
    for o in CartesianIndices(ȳ)
        cells = CartesianIndex{ndims(x)}[]
        accumulators = Any[init]
        for k in ks
            c = cell(w, o, k)
            c === nothing && continue
            push!(cells, c)
            push!(accumulators, op(last(accumulators), x[c]))
        end
        ā = ȳ[o]
        for j in length(cells):-1:1
            c = cells[j]
            step, ā, b̄ = _step_back(config, op, accumulators[j], x[c], ā)
            ōp = _accumulate(ōp, step)
            x̄[c] += b̄
        end
        īnit += ā
    end
    return ōp, īnit, x̄
end

_accumulate(::AbstractZero, b) = b
_accumulate(a, ::AbstractZero) = a
_accumulate(::AbstractZero, b::AbstractZero) = b
_accumulate(a, b) = a + b

# The cotangents of op itself, the accumulator and the cell.
function _step_back(config, op, a, b, ȳ)
    _, back = ChainRulesCore.rrule_via_ad(config, op, a, b)
    ōp, ā, b̄ = back(ȳ)
    plain(t, like) = t isa AbstractZero ? zero(like) : unthunk(t)
    return unthunk(ōp), plain(ā, ȳ), plain(b̄, ȳ)
end
_step_back(_, ::typeof(*), a::Number, b::Number, ȳ) = NoTangent(), ȳ * conj(b), conj(a) * ȳ

# The second derivative is symmetric, so the reverse pass over `_replay` is `_replay` on dual numbers.
function ChainRulesCore.rrule(::typeof(_replay), config, op, init, x, ȳ, w::Windows)
    function replay_pullback(c)
        c̄op, c̄init, c̄ = unthunk(c)
        if !(c̄op isa AbstractZero) && c̄op !== nothing
            throw(ArgumentError(
                "reduce_window: reverse over reverse has no derivative with respect to what op captures; take the outer derivative in forward mode",
            ))
        end
        i̇ = c̄init isa AbstractZero || c̄init === nothing ? zero(init) : unthunk(c̄init)
        ẋ = c̄ isa AbstractZero || c̄ === nothing ? zero(x) : unthunk(c̄)
        # Cotangents are conjugate to tangents.
        T = _realtype(init, x, ȳ, i̇, ẋ)
        init_dual, x_dual = _dual(T, init, conj(i̇)), _duals(T, x, map(conj, ẋ))
        ẏ = map(v -> conj(_tangent(T, v)), _reduce(op, init_dual, x_dual, w, :first))
        _, ī, x̄ = _replay(config, op, init_dual, x_dual, ȳ, w)
        return NoTangent(),
            NoTangent(),
            NoTangent(),
            _project(init, conj(_tangent(T, ī))),
            _project(x, map(v -> conj(_tangent(T, v)), x̄)),
            _project(ȳ, ẏ),
            NoTangent()
    end
    return _replay(config, op, init, x, ȳ, w), replay_pullback
end

### A reducer of ours

"""
    logaddexp(a, b)

`log(exp(a) + exp(b))` of real numbers, with a derivative that is finite everywhere: equal infinities
share it equally.
"""
function logaddexp(a::Real, b::Real)
    u, v = _plain(a), _plain(b)
    u > v && return a + log1p(exp(b - a))
    v > u && return b + log1p(exp(a - b))
    return isinf(u) && isinf(v) ? (a + b) / 2 : a + log1p(exp(b - a))
end

function _step_back(_, ::typeof(logaddexp), a, b, ȳ)
    same = isinf(_plain(a)) && _plain(a) == _plain(b)
    difference = same ? zero(a + b) : a - b
    return NoTangent(), ȳ / (1 + exp(-difference)), ȳ / (1 + exp(difference))
end
