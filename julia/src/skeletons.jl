# Nested structures made from a flat tuple of leaves, and taken apart again.

"""
    Slot{I}()

The place of leaf `I` in a skeleton. A skeleton is a nest of `Tuple`s and `NamedTuple`s; whatever in
it is not a slot (`nothing`, a number, a `String`) is a constant of the structure.
"""
struct Slot{I} end

# Both ways are written out from the types, so that a nest of any depth is inferred.
filled(::Type{Slot{I}}, place) where {I} = :(leaves[$I])
filled(::Type, place) = place
function filled(::Type{S}, place) where {S <: Union{Tuple, NamedTuple}}
    part(name, T) = filled(T, :(getfield($place, $(QuoteNode(name)))))
    parts = Expr(:tuple, map(part, fieldnames(S), fieldtypes(S))...)
    return S <: Tuple ? parts : :(NamedTuple{$(fieldnames(S))}($parts))
end

"""
    NestedGradients.fill(skeleton, leaves::Tuple)

The structure that `skeleton` describes, with `leaves[I]` in the place of `Slot{I}()`.

```jldoctest
julia> using NestedGradients: NestedGradients, Slot

julia> NestedGradients.fill((Slot{2}(), (a = Slot{1}(), b = nothing)), (1.0, [2.0]))
([2.0], (a = 1.0, b = nothing))
```
"""
@generated fill(skeleton, leaves::Tuple) = filled(skeleton, :skeleton)

locate!(places, ::Type{Slot{I}}, place) where {I} = (places[I] = place)
locate!(places, ::Type, place) = nothing
function locate!(places, ::Type{S}, place) where {S <: Union{Tuple, NamedTuple}}
    for (name, T) in zip(fieldnames(S), fieldtypes(S))
        locate!(places, T, :(child($place, $(Val(name)))))
    end
end

child(::Nothing, ::Val) = nothing
child(x, ::Val{name}) where {name} = getfield(x, name)

"""
    NestedGradients.flatten(skeleton, structure) -> Tuple

The inverse of [`NestedGradients.fill`](@ref): leaf `I` is what `structure` has in the place of
`Slot{I}()`. Where the structure is `nothing`, at any depth, so are its leaves. Fields are found by
name, so the order of a `NamedTuple`'s fields may differ.

```jldoctest
julia> using NestedGradients: NestedGradients, Slot

julia> NestedGradients.flatten((Slot{2}(), (a = Slot{1}(), b = Slot{3}())), ([2.0], nothing))
(nothing, [2.0], nothing)
```
"""
@generated function flatten(skeleton, structure)
    places = Dict{Int, Any}()
    locate!(places, skeleton, :structure)
    n = maximum(keys(places); init = 0)
    gap = findfirst(i -> !haskey(places, i), 1:n)
    if gap !== nothing
        message = "the skeleton has a Slot{$n}() but no Slot{$gap}(); number the slots 1, 2, ... without gaps"
        return :(throw(ArgumentError($message)))
    end
    return Expr(:tuple, [places[i] for i in 1:n]...)
end
