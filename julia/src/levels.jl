# The tags of our dual numbers, and which of two tags lies outside.

"""
    Level{J,C}

Tag of the `J`-th direction of one [`form`](@ref). `C` is the context: `Nothing`, or a `Tuple` of the
dual number types that were already in the arguments when the form began. A form begun inside
another one therefore has another tag, and whatever is in the context lies inside our numbers.

The tag is a type of this package, so that methods for it are nobody else's.
"""
struct Level{J, C} end

"Real numbers that one of our forms made."
const LevelDual{J, C, T} = Dual{Level{J, C}, T, 1}

"Does the number type `T` (or a tuple of such types) hold dual numbers with the tag `G`?"
depends(::Type, ::Type) = false
depends(::Type{Dual{S, T, N}}, ::Type{G}) where {S, T, N, G} = S === G || depends(T, G)
depends(::Type{Complex{T}}, ::Type{G}) where {T, G} = depends(T, G)
depends(::Type{Tuple{}}, ::Type) = false
function depends(::Type{T}, ::Type{G}) where {T <: Tuple, G}
    return depends(Base.tuple_type_head(T), G) || depends(Base.tuple_type_tail(T), G)
end

# Directions of one form are ordered by their number. Otherwise: what was in the context when a form
# began lies inside its numbers; any other tag (an inner ForwardDiff call, Zygote's own untagged
# numbers in a broadcast) was made later, and lies outside. Two forms that do not know of each
# other cannot meet, unless a capture was hidden from `unwrap`: ForwardDiff then throws.
ForwardDiff.:≺(::Type{Level{J, C}}, ::Type{S}) where {J, C, S} = !depends(C, S)
ForwardDiff.:≺(::Type{S}, ::Type{Level{J, C}}) where {J, C, S} = depends(C, S)
function ForwardDiff.:≺(::Type{Level{I, C}}, ::Type{Level{J, D}}) where {I, C, J, D}
    C === D && return I < J
    depends(D, Level{I, C}) && return true
    depends(C, Level{J, D}) && return false
    throw(ForwardDiff.DualMismatchError(Level{I, C}, Level{J, D}))
end

# ---- which dual numbers an argument, or what a function captured, already holds ----

"""
Add the dual types, and other ADs' own, that values of type `T` hold to `found`; false if `T` alone does not tell.
`seen` holds the types under way, since types may be recursive.
"""
function complete!(found, T::Type, seen = Any[])
    isconcretetype(T) || return T === Union{}
    if T <: Dual || isforeign(T)
        T in found || push!(found, T)
        return true
    elseif T <: AbstractArray && (isbitstype(eltype(T)) || isforeign(eltype(T)))
        return complete!(found, eltype(T), seen)
    elseif T <: Union{Type, Module, Symbol, AbstractString, Core.Box} || T in seen
        return T !== Core.Box
    end
    push!(seen, T)
    T <: Array && return complete!(found, eltype(T), seen)
    return all([complete!(found, F, seen) for F in fieldtypes(T)])
end

isforeign(T) = T <: Real &&
    !(T <: Union{AbstractFloat, Integer, Rational, AbstractIrrational})

"""
The first number type of the context `C` that an outer AD writes to a tape with, which runs the form on
plain numbers and records it as one operation; `Nothing` if there is none.
"""
taped(::Type{Nothing}) = Nothing
taped(::Type{Tuple{}}) = Nothing
function taped(::Type{C}) where {C <: Tuple}
    T = Base.tuple_type_head(C)
    return records(T) ? T : taped(Base.tuple_type_tail(C))
end
records(::Type) = false

contexttype(found) = isempty(found) ? Nothing : Tuple{found...}

"""
    context(x) -> Type

The number types of other ADs in `x`, dual numbers first of all, as a `Tuple` type; `Nothing` if there
are none. Looks through nests, arrays and the captured fields of functions: by type alone where the types say it all, by value
where a field is a `Core.Box` or of abstract type.
"""
@generated function context(x)
    found = Any[]
    complete!(found, x) || return :(contexttype(collectduals!(Any[], x, Base.IdSet{Any}())))
    return contexttype(found)
end

function collectduals!(found, x, seen)
    (complete!(found, typeof(x)) || x in seen) && return found
    x isa Union{Task, IO, Base.AbstractLock} && return found
    push!(seen, x)
    x isa AbstractArray &&
        !isbitstype(eltype(x)) &&
        foreach(i -> isassigned(x, i) && collectduals!(found, x[i], seen), eachindex(x))
    for i in 1:nfields(x)
        isdefined(x, i) && collectduals!(found, getfield(x, i), seen)
    end
    return found
end
