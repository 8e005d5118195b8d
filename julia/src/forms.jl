# The one operation behind all others: the multilinear form of a function, with one slot open.

"""
    form(backend, h, args::Tuple, slots::Tuple, ::Val{open}; wanted=nothing)

The multilinear form `⟨s₀, Dⁿh(z)[s₁, …, sₙ]⟩` of `h` at `z = args`, with exactly one slot open.

- `slots` is the tuple `(s₀, s₁, …, sₙ)`: `s₀` a covector structured like `h(args...)`, and each other
  `sⱼ` a tuple structured like `args`, `nothing` wherever the direction is zero (for whole arguments too;
  integers and whatever else does not vary always are). The entry of the open slot is ignored.
- `open == 0`: returns the directional derivative `Dⁿh(z)[s₁, …, sₙ]`, structured like `h`'s result, from
  one evaluation of `h`.
- `open >= 1`: returns the covector that the form is in slot `open`, a tuple structured like `args`, from
  one reverse pass of `backend` over `n - 1` nested dual numbers. The cotangent of each leaf that varies
  has the leaf's shape and float type.

A `nothing` in the result is a zero by structure, or a leaf that does not vary. `wanted`, a tuple of
`Bool` one an argument, leaves out the cotangents of whole arguments.

The form is symmetric in its slots and linear in each: its derivatives and transposes are forms again,
and its `rrule` and `frule` say so. The reference is stevengj's account of forward over reverse
differentiation.

```jldoctest
julia> using NestedGradients, Zygote, ADTypes

julia> h(x, p) = p * x^3;

julia> form(AutoZygote(), h, (2.0, 5.0), (1.0, nothing), Val(1))  # gradient: (3p x², x³)
(60.0, 8.0)

julia> form(AutoZygote(), h, (2.0, 5.0), (1.0, (1.0, nothing), nothing), Val(2))  # (6p x, 3x²)
(60.0, 12.0)
```
"""
function form(
    backend,
    h::H,
    args::Tuple,
    slots::Tuple,
    open::Val{O};
    wanted = nothing,
) where {H, O}
    checkslots(args, slots, open)
    C = context((h, args, slots))
    return evaluated(taped(C), C, backend, h, args, slots, open, wanted)
end
function evaluated(
    ::Type{Nothing},
    ::Type{C},
    backend,
    h::H,
    args,
    slots,
    open::Val{O},
    wanted,
) where {C, H, O}
    directions = given(slots, open)
    if any(iszerodirection, directions) || (O > 0 && iszerodirection(slots[1]))
        return O == 0 ? nothing : map(_ -> nothing, args)
    end
    z = liftall(Val(1), C, args, directions)
    O == 0 && return takeall(C, h(z...), directions)
    _, cotangents = reversepass(backend, h, slots[1], z)
    return project(args, takeall(C, select(cotangents, wanted), directions))
end

"`h(args...)` and the gradient of this number in the wanted arguments, from one reverse pass."
function value_and_cotangents(backend, h::H, args::Tuple, wanted) where {H}
    taped(context((h, args))) === Nothing ||
        return h(args...), form(backend, h, args, (Unit(), nothing), Val(1); wanted)
    y, cotangents = reversepass(backend, h, Unit(), args)
    return y, project(args, select(cotangents, wanted))
end

"""
    Unit()

The covector 1 of a scalar result, in the result's own float type. As a constant it has no cotangent.
"""
struct Unit end

"The covector `s₀` for a result `y`, checked."
seed(::Unit, y::Real) = one(basefloat(typeof(y)))
seed(::Unit, y) = throw(ArgumentError(
    "a gradient needs a function with a real scalar result; got $(summary(y)). Use a pullback or a jacobian for other results",
))
seed(s0, y) = s0

"""
    reversepass(backend, h, s0, z::Tuple) -> (h(z...), cotangents)

The value, and the cotangents of all of `z` for the covector `s0` of it, from one reverse pass.
"""
function reversepass end

# The slots that hold directions, in order.
given(slots::Tuple, ::Val{O}) where {O} = given(Val(1), Base.tail(slots), Val(O))
given(::Val{J}, ::Tuple{}, ::Val) where {J} = ()
function given(::Val{J}, slots::Tuple, ::Val{O}) where {J, O}
    rest = given(Val(J + 1), Base.tail(slots), Val(O))
    return J == O ? rest : (first(slots), rest...)
end

liftall(::Val, ::Type, z, ::Tuple{}) = z
function liftall(::Val{J}, ::Type{C}, z, directions) where {J, C}
    return liftall(
        Val(J + 1),
        C,
        lift(Level{J, C}, z, first(directions)),
        Base.tail(directions),
    )
end

takeall(::Type, y, ::Tuple{}) = y
function takeall(::Type{C}, y, directions::NTuple{K, Any}) where {C, K}
    return takeall(C, takepartials(Level{K, C}, y), Base.front(directions))
end

"Is the direction zero by structure?"
iszerodirection(s) = false
iszerodirection(::Nothing) = true
iszerodirection(s::Union{Tuple, NamedTuple}) = all(iszerodirection, s)

select(cotangents, ::Nothing) = cotangents
select(cotangents::Tuple, wanted::Tuple) = map(
    (c, w) -> w ? c : nothing,
    cotangents,
    wanted,
)

function checkslots(args, slots, ::Val{O}) where {O}
    n = length(slots) - 1
    0 <= O <= n ||
        throw(ArgumentError("slot $O is to be open, but there are only slots 0 to $n"))
    for j in 1:n
        s = slots[j + 1]
        j == O ||
            s === nothing ||
            (s isa Tuple && length(s) == length(args)) ||
            throw(ArgumentError(
                "slot $j must be `nothing` or a tuple with an entry for each of the $(length(args)) arguments; got $(typeof(s))",
            ))
    end
end

"""
    project(x, cotangent)

The cotangent in the shape and float type of each leaf of `x`; `nothing` for a leaf that does not vary.
"""
project(x, cotangent) = cotangent === nothing ? nothing : projected(x, cotangent)
projected(x, c) = c
projected(::Integer, c) = nothing
projected(x::Real, c) = floatlike(x, real(c))
projected(x::Complex, c) = Complex(floatlike(real(x), real(c)), floatlike(real(x), imag(c)))
projected(::AbstractArray{<:Integer}, c) = nothing
projected(x::AbstractArray{<:Real}, c) = floatlike(x, real(shaped(x, c)))
projected(x::AbstractArray{<:Number}, c) = map(projected, x, shaped(x, c))
projected(x::AbstractArray, c) = map(project, x, c)
projected(x::Tuple, c) = map(project, x, c)
function projected(x::NamedTuple{names}, c) where {names}
    return NamedTuple{names}(map(name -> project(x[name], get(c, name, nothing)), names))
end
shaped(x, c) = size(x) == size(c) ? c : reshape(c, size(x))
