# Derivatives: forward mode is the reduction of dual numbers; in reverse mode a sum is linear, and any
# other reducer has its steps undone. The rules are made of functions that have rules themselves, so
# that reverse mode can differentiate them once more.

### Forward mode

function ChainRulesCore.frule(
    (_, ȯp, i̇nit, ẋ)::Tuple,
    ::typeof(reduce_window),
    op,
    init,
    x;
    kwargs...,
)
    if !(ȯp isa AbstractZero)
        throw(ArgumentError(
            "reduce_window: forward mode by rules has no derivative with respect to what op captures; differentiate with ForwardDiff, or in reverse mode",
        ))
    end
    i̇nit, ẋ = _filled(i̇nit, init), _filled(ẋ, x)
    T = _realtype(init, x, i̇nit, ẋ)
    y = reduce_window(op, _duals(T, init, i̇nit), _duals(T, x, ẋ); kwargs...)
    return _undual(T, y), _tangent(T, y)
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
_undual(::Type{T}, y) where {T} = map(v -> _undual(T, v), y)
function _tangent(::Type{T}, y::Complex) where {T}
    return Complex(_tangent(T, real(y)), _tangent(T, imag(y)))
end
function _tangent(::Type{T}, y::Real) where {T}
    return y isa Dual{_tag(T)} ? ForwardDiff.partials(y, 1) : zero(y)
end
_tangent(::Type{T}, y) where {T} = map(v -> _tangent(T, v), y)

# By map, since broadcasting an array without axes gives a scalar. Integers are data.
_duals(::Type{T}, x::Number, ẋ) where {T} = _dual(T, x, ẋ)
_duals(::Type{T}, x::AbstractArray, ẋ) where {T} = map((v, t) -> _dual(T, v, t), x, ẋ)
_duals(::Type{T}, x::Tuple, ẋ) where {T} = map(x, ẋ) do v, t
    return eltype(v) <: Integer ? v : _duals(T, v, t)
end

"A tangent or cotangent without zeros that are not there."
_filled(t, like::Number) = t isa AbstractZero || t === nothing ? zero(like) : unthunk(t)
_filled(t, like::AbstractArray) = t isa AbstractZero || t === nothing ?
    map(zero, like) :
    unthunk(t)
function _filled(t, like::Tuple)
    parts = t isa AbstractZero || t === nothing ? map(_ -> ZeroTangent(), like) : unthunk(t)
    return ntuple(i -> _filled(parts[i], like[i]), length(like))
end

_realtype(values...) = float(mapreduce(_real, promote_type, values))
_real(v) = real(eltype(v))
_real(v::Tuple) = mapreduce(_real, promote_type, v)

### Reverse mode

function ChainRulesCore.rrule(
    config::RuleConfig{>:HasReverseMode},
    ::typeof(reduce_window),
    op,
    init,
    x;
    kwargs...,
)
    reducer, w, doubles = _arguments(op, init, x; kwargs...)
    y, back = ChainRulesCore.rrule(config, _windowed, reducer, init, x, w, doubles)
    reduce_window_pullback(ȳ) = back(ȳ)[1:4]
    return y, reduce_window_pullback
end

# For engines that cannot call back: reducers whose steps have rules here.
function ChainRulesCore.rrule(
    ::typeof(reduce_window),
    op::Union{Extremum, typeof(+), typeof(*), typeof(logaddexp)},
    init,
    x::AbstractArray{<:Number};
    kwargs...,
)
    reducer, w, doubles = _arguments(op, init, x; kwargs...)
    y, back = _pullback(nothing, reducer, init, x, w, doubles)
    reduce_window_pullback(ȳ) = back(ȳ)[1:4]
    return y, reduce_window_pullback
end

ChainRulesCore.rrule(
    config::RuleConfig{>:HasReverseMode},
    ::typeof(_windowed),
    op,
    init,
    x,
    w::Windows,
    doubles::Bool,
) = _pullback(config, op, init, x, w, doubles)

function _pullback(config, op, init, x, w, doubles)
    y = _windowed(op, init, x, w, doubles)
    function windowed_pullback(ȳ)
        ōp, īnit, x̄ = undone(config, op, init, x, _filled(ȳ, y), w, doubles)
        return NoTangent(),
            ōp,
            _project(init, īnit),
            _project(x, x̄),
            NoTangent(),
            NoTangent()
    end
    return y, windowed_pullback
end

# A sum is linear.
function _pullback(_, op::typeof(+), init::Number, x::AbstractArray{<:Number}, w, doubles)
    y = _windowed(op, init, x, w, doubles)
    function windowed_pullback(ȳ)
        ȳ = _filled(ȳ, y)
        x̄ = _windowed(+, zero(eltype(ȳ)), ȳ, transposed(w), doubles)
        parts = _project(init, sum(ȳ)), _project(x, x̄)
        return NoTangent(), NoTangent(), parts..., NoTangent(), NoTangent()
    end
    return y, windowed_pullback
end

_project(x, x̄) = ProjectTo(x)(x̄)
_project(x::Tuple, x̄) = Tangent{typeof(x)}(map(_project_part, x, x̄)...)
_project_part(x, x̄) = eltype(x) <: Integer ? NoTangent() : _project(x, x̄)

@non_differentiable Windows(::Any...)
@non_differentiable transposed(::Any)

"The gradient of <ȳ, reduction> in (op, init, x)."
function undone(config, op, init, x, ȳ, w::Windows, doubles::Bool)
    if eltype(x) === Float16 && !(op isa Extreme)
        x, init = map(Float32, x), Float32(init)
    end
    T = elementtype(op, init, x)
    begun, cells = _promoted(op, init, x, T, doubles)
    zipped = ȳ isa Tuple ? map(tuple, ȳ...) : ȳ
    x̄ = Base.fill(_zeroelement(T, ȳ), w.size)
    back! = doubles ? undo_doubled! : undo_written!
    ōp, īnit = back!(x̄, config, op, start(op, begun), cells, zipped, w)
    return ōp, īnit, ȳ isa Tuple ? ntuple(i -> map(t -> t[i], x̄), length(ȳ)) : x̄
end

_zeroelement(T, ȳ) = zero(float(T <: Number ? promote_type(T, eltype(ȳ)) : eltype(ȳ)))
_zeroelement(::Type{T}, ȳ::Tuple) where {T <: Tuple} = map(_zeroelement, fieldtypes(T), ȳ)
_zeroelement(::Type, ȳ::Tuple) = map(a -> zero(float(eltype(a))), ȳ)

# The second derivative is symmetric, so the reverse pass over `undone` is `undone` on dual numbers.
function ChainRulesCore.rrule(
    ::typeof(undone),
    config,
    op,
    init,
    x,
    ȳ,
    w::Windows,
    doubles::Bool,
)
    function undone_pullback(c)
        c̄op, c̄init, c̄ = unthunk(c)
        if !(c̄op isa AbstractZero) && c̄op !== nothing
            _only_forward("with respect to what op captures")
        end
        x isa Tuple && _only_forward("of several operands")
        directions = _filled(c̄init, init), _filled(c̄, x)
        ī, x̄, ẏ = bent(config, op, init, x, ȳ, directions, w, doubles)
        cotangents = _project(init, ī), _project(x, x̄), _project(ȳ, ẏ)
        return NoTangent(),
            NoTangent(),
            NoTangent(),
            cotangents...,
            NoTangent(),
            NoTangent()
    end
    return undone(config, op, init, x, ȳ, w, doubles), undone_pullback
end

_only_forward(what) = throw(ArgumentError(
    "reduce_window: reverse over reverse mode has no derivative $what; take the outer derivative in forward mode (ForwardDiff)",
))

"The pushforward along the directions of `undone` and of the reduction."
function bent(config, op, init, x, ȳ, (i̇, ẋ), w, doubles)
    # Cotangents are conjugate to tangents.
    T = _realtype(init, x, ȳ, i̇, ẋ)
    init_dual, x_dual = _dual(T, init, conj(i̇)), _duals(T, x, map(conj, ẋ))
    ẏ = map(v -> conj(_tangent(T, v)), _windowed(op, init_dual, x_dual, w, doubles))
    _, ī, x̄ = undone(config, op, init_dual, x_dual, ȳ, w, doubles)
    return conj(_tangent(T, ī)), map(v -> conj(_tangent(T, v)), x̄), ẏ
end

function ChainRulesCore.rrule(
    ::typeof(bent),
    config,
    op,
    init,
    x,
    ȳ,
    directions,
    w,
    doubles,
)
    bent_pullback(_) = _only_forward("of third order")
    return bent(config, op, init, x, ȳ, directions, w, doubles), bent_pullback
end
