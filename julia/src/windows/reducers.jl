# What a reducer is to a fold: how it begins, combines two elements, and how a step is undone.

const Extremum = Union{typeof(max), typeof(min)}

"An init that is used only where a window has no cell: the identity of a maximum or minimum."
struct Spare{T}
    value::T
end

"`max` or `min` with a rule for ties, `:first` or `:split`."
struct Extreme{Ties, Op <: Extremum}
    op::Op
end
Extreme{Ties}(op::Op) where {Ties, Op} = Extreme{Ties, Op}(op)

"The mean of equal elements, whose derivatives differ, and how many they are."
struct Tied{T}
    value::T
    count::Int
end

element(_, x) = x
element(::Extreme{:split}, x) = Tied(x, 1)
lower(a) = a
lower(a::Tied) = a.value
lower(a::Spare) = lower(a.value)

start(_, init) = init
function start(op::Extreme, init)
    return isidentity(op.op, _plain(init)) ? Spare(element(op, init)) : element(op, init)
end

combine(op, a, b) = _returned(a, op(a, b))
combine(_, ::Spare, b) = b

# Checked by types where they are inferred, which costs nothing, and else by the values.
accepted(::Type, ::Type) = true
accepted(::Type{<:Number}, ::Type{B}) where {B} = B <: Number
@generated function accepted(::Type{A}, ::Type{B}) where {A <: Tuple, B}
    B <: Tuple && fieldcount(A) == fieldcount(B) || return false
    # A place in the operand is an index, not a number.
    return all(b <: Number || !(a <: Number) for (a, b) in zip(A.parameters, B.parameters))
end
_returned(a, y) = accepted(typeof(a), typeof(y)) ?
    y :
    _refused(a, "the $(typeof(y)) $(repr(y))")
function _refused(init, what)
    wanted = init isa Tuple ? "a tuple of $(length(init)) numbers" : "a number"
    throw(ArgumentError(
        "reduce_window: op must return $wanted, as init is, and returns $what; a reducer combines one accumulator and one cell, op(a, b), to one accumulator",
    ))
end

"Reducers that may be reassociated without a promise."
const Associative = Union{Extreme, typeof(+), typeof(*), typeof(&), typeof(|), typeof(xor)}
isassociative(op) = op isa Associative

### Maximum and minimum

# ForwardDiff compares dual numbers by their partials too where the values are equal, so that ties
# would be broken by the direction of differentiation: what is compared here are plain numbers.
_plain(x) = x
_plain(x::Dual) = _plain(ForwardDiff.value(x))

beats(::typeof(max), a, b) = a > b || (isnan(a) && !isnan(b))
beats(::typeof(min), a, b) = a < b || (isnan(a) && !isnan(b))
isidentity(::typeof(max), a) = !isnan(a) && !(a > typemin(typeof(a)))
isidentity(::typeof(min), a) = !isnan(a) && !(a < typemax(typeof(a)))

# Which of two elements is the extreme one; 0 for a tie.
function _winner(op::Extreme, a, b)
    u, v = _plain(lower(a)), _plain(lower(b))
    return beats(op.op, v, u) ? 2 : beats(op.op, u, v) ? 1 : 0
end

(op::Extreme{:first})(a, b) = _winner(op, a, b) == 2 ? b : a

function (op::Extreme{:split})(a::Tied, b::Tied)
    winner = _winner(op, a, b)
    winner == 1 && return a
    winner == 2 && return b
    return Tied(_mean(a.value, a.count, b.value, b.count), a.count + b.count)
end

# Exactly the value of both where it is finite.
_mean(a::Integer, m, b::Integer, n) = a
function _mean(a, m, b, n)
    isfinite(_plain(a)) && return a + (b - a) * n / (m + n)
    return (a * m + b * n) / (m + n)
end

### Steps undone

_zero(x) = zero(x)
_zero(x::Tuple) = map(_zero, x)
_zero(::Type{T}) where {T <: Tuple} = map(_zero, fieldtypes(T))
_plus(a, b) = a + b
_plus(a::Tuple, b::Tuple) = map(_plus, a, b)

"The cotangents of op itself, the accumulator and the cell."
undo(_, op, ::Spare, b, ȳ) = NoTangent(), _zero(ȳ), ȳ
undo(config, op, a, b, ȳ) = _undo(config, op, a, b, ȳ)

function _undo(config, op, a, b, ȳ)
    _, back = ChainRulesCore.rrule_via_ad(config, op, a, b)
    ōp, ā, b̄ = back(ȳ)
    return unthunk(ōp), _cotangent(ā, ȳ), _cotangent(b̄, ȳ)
end
_undo(_, ::typeof(*), a::Number, b::Number, ȳ) = NoTangent(), ȳ * conj(b), conj(a) * ȳ
_undo(_, ::typeof(+), a::Number, b::Number, ȳ) = NoTangent(), ȳ, ȳ
function _undo(_, op::Extreme{:first}, a, b, ȳ)
    return _winner(op, a, b) == 2 ? (NoTangent(), zero(ȳ), ȳ) : (NoTangent(), ȳ, zero(ȳ))
end
function _undo(_, op::Extreme{:split}, a::Tied, b::Tied, ȳ)
    winner = _winner(op, a, b)
    winner == 1 && return NoTangent(), ȳ, zero(ȳ)
    winner == 2 && return NoTangent(), zero(ȳ), ȳ
    n = a.count + b.count
    return NoTangent(), ȳ * a.count / n, ȳ * b.count / n
end

_cotangent(t::AbstractZero, like) = _zero(like)
_cotangent(t, like) = unthunk(t)
_cotangent(t::AbstractZero, like::Tuple) = _zero(like)
_cotangent(t, like::Tuple) = ntuple(i -> _cotangent(unthunk(t)[i], like[i]), length(like))

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

isassociative(::typeof(logaddexp)) = true

function _undo(_, ::typeof(logaddexp), a, b, ȳ)
    same = isinf(_plain(a)) && _plain(a) == _plain(b)
    difference = same ? zero(a + b) : a - b
    return NoTangent(), ȳ / (1 + exp(-difference)), ȳ / (1 + exp(difference))
end
