# Directions put on nested structures, and partials taken off them.

"""
    lift(G, x, s)

`x + ε s` with the tag `G`, for nests `x` and `s` of one structure; wherever `s` is `nothing` (zero), the
leaf of `x` itself. The numbers keep the float type of `x`.
"""
lift(::Type, x, ::Nothing) = x
lift(::Type, ::Nothing, ::Nothing) = nothing
lift(::Type{G}, x::Real, s::Real) where {G} = dual(G, float(x), floatlike(x, s))
function lift(::Type{G}, x::Complex, s::Number) where {G}
    return Complex(lift(G, real(x), real(s)), lift(G, imag(x), imag(s)))
end
# An array of bits (an SVector) stays one; its numbers are lifted one by one.
lift(::Type{G}, x::AbstractArray{<:Real}, s::AbstractArray{<:Real}) where {G} = isbits(x) ?
    map((a, b) -> lift(G, a, b), x, s) :
    dual(G, float(x), floatlike(x, s))
lift(::Type{G}, x::AbstractArray, s::AbstractArray) where {G} = map(
    (a, b) -> lift(G, a, b),
    x,
    s,
)
lift(::Type{G}, x::Tuple, s::Tuple) where {G} = map((a, b) -> lift(G, a, b), x, s)
function lift(::Type{G}, x::NamedTuple{names}, s::NamedTuple) where {G, names}
    return NamedTuple{names}(map(name -> lift(G, x[name], get(s, name, nothing)), names))
end
lift(::Type, x, s) = throw(ArgumentError(
    "a direction of type $(typeof(s)) does not fit an argument of type $(typeof(x))",
))

"`s` in the float type of `x`, unless `s` holds dual numbers that `x` does not."
floatlike(x::Real, s::Real) = convert(floattype(typeof(x), typeof(s)), s)
function floatlike(x::AbstractArray{T}, s::AbstractArray{S}) where {T, S}
    F = floattype(T, S)
    return S === F ? s : convert(AbstractArray{F}, s)
end
floattype(::Type{T}, ::Type{S}) where {T <: Real, S <: Real} = basefloat(T) ===
    basefloat(S) ?
    S :
    refloat(S, basefloat(T))
basefloat(::Type{T}) where {T <: Real} = float(T)
basefloat(::Type{Dual{G, T, N}}) where {G, T, N} = basefloat(T)
refloat(::Type{<:Real}, ::Type{F}) where {F} = F
refloat(::Type{Dual{G, T, N}}, ::Type{F}) where {G, T, N, F} = Dual{G, refloat(T, F), N}

"""
    takepartials(G, y)

The partials with tag `G` of every leaf of the nest `y`; `nothing` where a leaf does not depend on it.
"""
takepartials(::Type, ::Any) = nothing
takepartials(::Type{G}, y::Dual{G, T, 1}) where {G, T} = y.partials[1]
takepartials(::Type{G}, y::Dual{S}) where {G, S} = depends(typeof(y), G) ?
    unexpected(y, G) :
    nothing
takepartials(::Type{G}, y::DualArray{Dual{G, T, 1}}) where {G, T} = now(y.partial)
function takepartials(::Type{G}, y::Complex) where {G}
    re, im = takepartials(G, real(y)), takepartials(G, imag(y))
    re === im === nothing && return nothing
    return Complex(re === nothing ? zero(im) : re, im === nothing ? zero(re) : im)
end
takepartials(::Type{G}, y::Union{Tuple, NamedTuple}) where {G} = map(
    a -> takepartials(G, a),
    y,
)
takepartials(::Type{G}, y::AbstractArray{Dual{G, T, 1}}) where {G, T} = map(
    d -> d.partials[1],
    y,
)
takepartials(::Type{G}, y::AbstractArray{T}) where {G, T <: Number} = depends(T, G) ?
    elementwise(G, y) :
    nothing
takepartials(::Type{G}, y::AbstractArray) where {G} = elementwise(G, y)

# Of numbers, one that does not depend on G counts as a zero among others that do.
function elementwise(::Type{G}, y) where {G}
    p = map(a -> takepartials(G, a), y)
    all(isnothing, p) && return nothing
    any(a -> a isa Number, p) || return p
    return map((a, b) -> a === nothing ? zero(only(filter(!isnothing, p)[1:1])) : a, p, y)
end
unexpected(y, G) = throw(ArgumentError(
    "dual numbers with an inner tag reached a result outside of $G: $(typeof(y))",
))
