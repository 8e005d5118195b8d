# The derivatives of `form`: forms again.
#
# In the open slot's direction c, F(z; s₀, …, sₙ) = ⟨s₀, Dⁿh(z)[s₁, …, sₙ]⟩ is a number. Its derivative in
# z is the form with one slot more, open; its derivative in sⱼ is the form with slot j open. Both have c
# in the slot that was open.

function ChainRulesCore.rrule(
    cfg::RuleConfig{>:HasReverseMode},
    ::typeof(form),
    backend,
    h,
    args::Tuple,
    slots::Tuple,
    open::Val{O};
    wanted = nothing,
) where {O}
    y = form(backend, h, args, slots, open; wanted)
    function form_pullback(Δ)
        H, z, s = opened(h, args, slots)
        s = replaced(s, inslot(plain(Δ), open, h !== H), Val(O + 1))
        dz = form(backend, H, z, (s..., nothing), Val(length(s)))
        dh = h === H ? NoTangent() : tangent(cfg, h, last(dz))
        dslots = ntuple(Val(length(slots))) do i
            (i == O + 1 || isconstantslot(slots[i])) && return NoTangent()
            ds = form(backend, H, z, replaced(s, nothing, Val(i)), Val(i - 1))
            return tangent(cfg, slots[i], i == 1 || h === H ? ds : Base.front(ds))
        end
        dargs = tangent(cfg, args, h === H ? dz : Base.front(dz))
        return NoTangent(),
            NoTangent(),
            dh,
            dargs,
            Tangent{typeof(slots)}(dslots...),
            NoTangent()
    end
    return y, form_pullback
end

"""
    Weighted(h)

`(args..., w) -> w * h(args...)`. Its gradient's derivative at `w = 1` along `(c, dy)` is `H c + dy ∇h`: what
`h`'s value and gradient pull back together, from one reverse pass.
"""
struct Weighted{H}
    h::H
end
(weighted::Weighted)(args...) = last(args) * weighted.h(Base.front(args)...)

function ChainRulesCore.rrule(
    cfg::RuleConfig{>:HasReverseMode},
    ::typeof(value_and_cotangents),
    backend,
    h,
    args::Tuple,
    wanted,
)
    result = value_and_cotangents(backend, h, args, wanted)
    function value_and_cotangents_pullback(Δ)
        dy, c = nests(plain(Δ), (nothing, nothing))
        H, z, _ = opened(h, args, (Unit(), nothing))
        c = inslot(c, Val(1), h !== H)
        dz = pulled(backend, H, z, c, dy, one(first(result)))
        dh = h === H ? NoTangent() : tangent(cfg, h, last(dz))
        return NoTangent(),
            NoTangent(),
            dh,
            tangent(cfg, args, h === H ? dz : Base.front(dz)),
            NoTangent()
    end
    return result, value_and_cotangents_pullback
end
pulled(backend, h, z, ::Nothing, dy, w) = form(backend, h, z, (dy, nothing), Val(1))
pulled(backend, h, z, c, ::Nothing, w) = form(backend, h, z, (Unit(), c, nothing), Val(2))
pulled(backend, h, z, ::Nothing, ::Nothing, w) = map(_ -> nothing, z)
function pulled(backend, h, z, c, dy, w)
    slots = (Unit(), (c..., dy), nothing)
    return Base.front(form(backend, Weighted(h), (z..., w), slots, Val(2)))
end

function ChainRulesCore.frule(
    (_, _, Δh, Δargs, Δslots, _)::Tuple,
    ::typeof(form),
    backend,
    h,
    args::Tuple,
    slots::Tuple,
    open::Val{O};
    wanted = nothing,
) where {O}
    y = form(backend, h, args, slots, open; wanted)
    H, z, s = opened(h, args, slots)
    shown(dy) = O == 0 || h === H ? dy : Base.front(dy)
    direction = h === H ?
        nests(plain(Δargs), args) :
        (nests(plain(Δargs), args)..., plain(Δh))
    dy = shown(form(backend, H, z, (s..., direction), open))
    for (i, ds) in enumerate(nests(plain(Δslots), slots))
        (i == O + 1 || ds === nothing) && continue
        dy = added(
            dy,
            shown(form(
                backend,
                H,
                z,
                replaced(s, i == 1 || h === H ? ds : (ds..., nothing), Val(i)),
                open,
            )),
        )
    end
    return y, tangent(nothing, y, dy)
end

# ChainRules projects a cotangent element by element, which would copy ours, and look at products that
# are not wanted. The shape is all there is to do: `form` projects the partials in the end.
function (project::ProjectTo{AbstractArray})(dx::DualArray)
    return axes(dx) == project.axes ? dx : reshape(dx, map(length, project.axes))
end

# ChainRules has no rule for `vec`: an AD would look into ours, which builds a `DualArray`.
function ChainRulesCore.rrule(::typeof(vec), A::DualArray)
    vec_pullback(Δ) = (NoTangent(), reshape(unthunk(Δ), size(A)))
    return vec(A), vec_pullback
end

"`h` with what it captured as one more argument, with zero directions; unchanged if that is nothing."
function opened(h, args, slots)
    skeleton, params = unwrap(h)
    isempty(params) && return h, args, slots
    widen(s) = s isa Tuple ? (s..., nothing) : s
    return skeleton, (args..., params), (first(slots), map(widen, Base.tail(slots))...)
end
# `Base.setindex` of a tuple, in a way that Zygote can differentiate whatever the entries are.
replaced(t::Tuple, x, ::Val{1}) = (x, Base.tail(t)...)
replaced(t::Tuple, x, ::Val{I}) where {I} = (
    first(t),
    replaced(Base.tail(t), x, Val(I - 1))...,
)
inslot(c, ::Val{O}, widened) where {O} = O > 0 && widened && c !== nothing ?
    (c..., nothing) :
    c
isconstantslot(s) = s isa Unit || iszerodirection(s)

"A tangent of ChainRules as a nest of `Tuple`s, `NamedTuple`s and arrays, `nothing` for zero."
plain(c) = c
plain(::AbstractZero) = nothing
plain(c::AbstractThunk) = plain(unthunk(c))
plain(c::Tangent) = plain(ChainRulesCore.backing(c))
plain(c::Union{Tuple, NamedTuple}) = map(plain, c)
plain(c::AbstractArray) = eltype(c) <: Number ? c : map(plain, c)
# Zygote has `nothing` for the elements of an array whose branch did not use them.
function plain(c::AbstractArray{<:Union{Nothing, Number}})
    eltype(c) <: Number && return c
    T = promote_type(Base.uniontypes(Base.nonnothingtype(eltype(c)))...)
    return T === Union{} ? nothing : map(a -> a === nothing ? zero(T) : convert(T, a), c)
end
nests(c, like) = c === nothing ? map(_ -> nothing, like) : c

added(::Nothing, ::Nothing) = nothing
added(a, ::Nothing) = a
added(::Nothing, b) = b
added(a, b) = a + b
added(a::Union{Tuple, NamedTuple}, b::Union{Tuple, NamedTuple}) = map(added, a, b)

"""
    tangent(cfg, x, c)

The structural tangent of `x` for the nest `c` of cotangents of its leaves: `NoTangent` where `x` cannot
vary, `ZeroTangent` where it can but the cotangent is zero.
"""
tangent(cfg, x::Leaf, c) = c === nothing ? ZeroTangent() : c
tangent(cfg, ::Fixed, c) = NoTangent()
tangent(cfg, x::AbstractArray, c) = c === nothing ?
    ZeroTangent() :
    map((a, b) -> tangent(Element(cfg), a, b), x, c)
# Of what an inner gradient leaves alone because it cannot be taken apart: as an argument it is seen only here.
tangent(cfg, x::Opaque, c) = c === nothing && isconstant(x, ()) ?
    NoTangent() :
    uncaptured(x, ())
function tangent(cfg, x::Tuple, c)
    c === nothing && return captured(x, ()) === nothing ? NoTangent() : ZeroTangent()
    return Tangent{typeof(x)}(map((a, b) -> tangent(cfg, a, b), x, c)...)
end
function tangent(cfg, x::T, c) where {T}
    c === nothing && return captured(x, ()) === nothing ? NoTangent() : ZeroTangent()
    fields = fieldtangents(cfg, x, c)
    return ismutabletype(T) ? mutabletangent(cfg, x, fields) : Tangent{T}(; fields...)
end
@generated function fieldtangents(cfg, x, c::NamedTuple{names}) where {names}
    of(name) = name in names ?
        :(tangent(cfg, getfield(x, $(QuoteNode(name))), getfield(c, $(QuoteNode(name))))) :
        :(NoTangent())
    return :(
        NamedTuple{$(fieldnames(x))}(
            $(Expr(:tuple, [of(name) for name in fieldnames(x)]...)),
        )
    )
end

"A mutable value has no structural tangent; where the outer AD keeps mutable gradients of its own, they are added there."
function mutabletangent(cfg, x, fields)
    throw(ArgumentError(
        "cannot hand a gradient to a captured $(typeof(x)): it is mutable, and $(typeof(cfg)) has no place for it. Capture the value itself (`let` around a closure avoids a Core.Box) or pass it as an argument",
    ))
end

# Zygote adds the gradient of a mutable value twice where an array literal holds it (0.7.12, without us too).
struct Element{C}
    cfg::C
end
function mutabletangent(::Element, x, fields)
    throw(ArgumentError(
        "cannot hand a gradient to a captured $(typeof(x)) in an array: it is mutable, and its gradient would count twice. Put it in a Tuple or NamedTuple, or make it immutable",
    ))
end

# `unwrap` and `rebuild` are inverse to each other and linear: code that calls them is differentiated by
# copying cotangents from the fields to the leaves and back.
function ChainRulesCore.rrule(cfg::RuleConfig{>:HasReverseMode}, ::typeof(unwrap), f)
    skeleton, params = unwrap(f)
    function unwrap_pullback(Δ)
        c = plain(Δ)
        leaves = c === nothing ? nothing : last(c)
        return NoTangent(), isempty(params) ? NoTangent() : tangent(cfg, f, leaves)
    end
    return (skeleton, params), unwrap_pullback
end
function ChainRulesCore.rrule(
    cfg::RuleConfig{>:HasReverseMode},
    ::typeof(rebuild),
    f,
    params,
)
    g = rebuild(f, params)
    rebuild_pullback(Δ) = (
        NoTangent(),
        NoTangent(),
        tangent(cfg, params, leafcotangents(cfg, g, params, plain(Δ))),
    )
    return g, rebuild_pullback
end

"The cotangents of the leaves of `g` named by `params`, from the cotangent `c` of `g`."
leafcotangents(cfg, g, params, c) = params === nothing ?
    nothing :
    cotangents_of(cfg, g, params, c)
cotangents_of(cfg, ::Leaf, params, c) = c
function cotangents_of(cfg, g::Union{Tuple, AbstractArray}, params, c)
    c === nothing && return nothing
    return map((a, p, b) -> leafcotangents(cfg, a, p, b), g, params, c)
end
function cotangents_of(cfg, g::T, params, c) where {T}
    fields = ismutabletype(T) ? mutablecotangent(cfg, g, c) : c
    fields === nothing && return nothing
    of(name) = leafcotangents(
        cfg,
        getfield(g, name),
        params[name],
        get(fields, name, nothing),
    )
    return NamedTuple{keys(params)}(map(of, keys(params)))
end
mutablecotangent(cfg, g, c) = c
