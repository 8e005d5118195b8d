# A function taken apart into what it captured and the rest, and put together again.

"""
    unwrap(f) -> (skeleton, params)

What `f` captured, as a nest `params` of `NamedTuple`s and `Tuple`s with the names of the fields, and a
function that takes it as its last argument: `skeleton(args..., params) == f(args...)`.

Looks through closures, callable structs, compositions, `Base.Fix1` and `Base.Fix2`, `NamedTuple`s and
`Tuple`s, `Ref`s and the `Core.Box`es of captured variables that are assigned more than once, at any
depth. A leaf is a floating point or complex number, or an array of them; integers, `Bool`s, `Symbol`s,
strings, types and modules stay in the skeleton: what a module holds is global, as in Python. The same
array captured twice is two leaves. `f` must not change what it captured. `params` is `(;)` if nothing
that varies was captured.

Throws an `ArgumentError` that names the field if a capture can neither be taken apart nor be constant,
such as a `Dict` or a `Set` that holds arrays.

```jldoctest
julia> using NestedGradients

julia> skeleton, params = unwrap(let W = [1.0 2.0], b = [3.0]; x -> W * x .+ b; end);

julia> params
(W = [1.0 2.0], b = [3.0])

julia> skeleton([1.0, 1.0], (W = [1.0 2.0], b = [0.0]))
1-element Vector{Float64}:
 3.0
```
"""
function unwrap(f)
    params = captured(f, ())
    return Skeleton(f), params === nothing ? (;) : params
end

"The function half of [`unwrap`](@ref)."
struct Skeleton{F} <: Function
    f::F
end
(skeleton::Skeleton)(args...) = rebuild(skeleton.f, last(args))(Base.front(args)...)

const Leaf = Union{
    AbstractFloat,
    Dual,
    Complex,
    AbstractArray{<:Union{AbstractFloat, Dual, Complex}},
}
const Fixed = Union{
    Integer,
    Symbol,
    AbstractString,
    AbstractChar,
    Type,
    Module,
    Val,
    Nothing,
    Missing,
    Rational,
    AbstractArray{<:Integer},
    Regex,
    IO,
    AbstractRNG,
    Ptr,
    Method,
    AbstractIrrational,
    AbstractRange{<:Integer},
    VersionNumber,
    Base.AbstractLock,
}

"""
    captured(x, path)

The leaves of `x`: itself, a nest, or `nothing` if nothing in `x` varies. `path` names the place of `x`.
"""
captured(x::Leaf, path) = x
captured(::Fixed, path) = nothing
const Opaque = Union{AbstractDict, AbstractSet, Channel, Core.SimpleVector, Task, WeakRef}
captured(x::Opaque, path) = isconstant(x, path) ? nothing : uncaptured(x, path)
function captured(x::AbstractArray, path)
    leaves = map(i -> captured(x[i], (path..., i)), eachindex(IndexLinear(), x))
    return all(isnothing, leaves) ? nothing : reshape(leaves, size(x))
end
captured(x::Tuple, path) = present(fieldleaves(x, path))
captured(x, path) = present(Val(fieldnames(typeof(x))), fieldleaves(x, path))

@generated function fieldleaves(x, path)
    place(name) = :((path..., $(QuoteNode(name))))
    leaf(i, name) = :(
        isdefined(x, $i) ? captured(getfield(x, $i), $(place(name))) : nothing
    )
    return Expr(:tuple, [leaf(i, name) for (i, name) in enumerate(fieldnames(x))]...)
end

# Only the fields that hold something that varies; a tuple keeps its places.
present(leaves::Tuple) = all(isnothing, leaves) ? nothing : leaves
@generated function present(::Val{names}, leaves::Tuple) where {names}
    kept = [i for (i, P) in enumerate(fieldtypes(leaves)) if P !== Nothing]
    isempty(kept) && return nothing
    return :(
        NamedTuple{$(Tuple(names[kept]))}($(Expr(:tuple, [:(leaves[$i]) for i in kept]...)))
    )
end

# What is reached otherwise than by fields and indices that `rebuild` could set. A key that is a number
# is what a Dict is asked by.
isconstant(x::AbstractDict, path) = all(x) do (k, v)
    return (k isa Number || isconstant(k, path)) && isconstant(v, path)
end
isconstant(x::Union{AbstractSet, Core.SimpleVector}, path) = all(
    v -> isconstant(v, path),
    x,
)
isconstant(x::Channel, path) = isconstant(x.data, path)
isconstant(x::Task, path) = !istaskdone(x) || isconstant(x.result, path)
isconstant(x::WeakRef, path) = isconstant(x.value, path)
isconstant(x, path) = captured(x, path) === nothing
function uncaptured(x, path)
    place = isempty(path) ? "an argument" : "the captured field `$(join(path, '.'))`"
    throw(ArgumentError(
        "$place is a $(typeof(x)), which holds numbers that vary but cannot be taken apart; put its arrays in a NamedTuple, or pass them as arguments of their own",
    ))
end

"""
    rebuild(f, params)

`f` with the leaves `params` in place of its own. Types with parameters change theirs to hold the new
leaves; a field of a fixed type that cannot hold them is an `ArgumentError`.
"""
rebuild(f, params) = params === nothing ? f : rebuilt(f, params)
rebuilt(::Leaf, leaf) = leaf
rebuilt(f::Tuple, params) = map(rebuild, f, params)
rebuilt(f::AbstractArray, params) = map(rebuild, f, params)
rebuilt(f::NamedTuple{names}, params) where {names} = NamedTuple{names}(newfields(
    f,
    params,
))
rebuilt(f::Core.Box, params) = Core.Box(rebuild(f.contents, params.contents))
rebuilt(f::Base.RefValue, params) = Ref(rebuild(f[], params.x))
rebuilt(f, params) = construct(typeof(f), newfields(f, params))

@generated function newfields(f, params::NamedTuple{names}) where {names}
    old(name) = :(getfield(f, $(QuoteNode(name))))
    new(name) = :(rebuild($(old(name)), getfield(params, $(QuoteNode(name)))))
    return Expr(
        :tuple,
        [name in names ? new(name) : old(name) for name in fieldnames(f)]...,
    )
end

# The type that differs from T in the parameters that the new field types imply.
function solve!(found, declared, actual)
    if declared isa TypeVar
        found[declared] = actual
    elseif declared isa DataType && !isempty(declared.parameters)
        S = actual
        while S isa DataType && S !== Any && S.name !== declared.name
            S = supertype(S)
        end
        S isa DataType &&
            S.name === declared.name &&
            foreach((d, a) -> solve!(found, d, a), declared.parameters, S.parameters)
    end
end
function retyped(T::DataType, fields)
    T.parameters === Core.svec() && return T
    generic = Base.unwrap_unionall(Base.typename(T).wrapper)
    found = IdDict{Any, Any}()
    for (declared, actual) in zip(generic.types, fields)
        solve!(found, declared, actual)
    end
    # A parameter that no field is declared with stays; but the element type of a field that changes
    # goes with it, as in a factorization `Cholesky{T, S}` of `factors::S`.
    for (p, old) in zip(generic.parameters, T.parameters)
        i = findfirst(F -> F <: AbstractArray && eltype(F) === old, collect(fieldtypes(T)))
        get!(found, p, i === nothing ? old : eltype(fields[i]))
    end
    try
        return Base.typename(T).wrapper{[found[p] for p in generic.parameters]...}
    catch
        return T
    end
end
# What a field declared as F can hold of a value of type A: the value, an `Array` of the same elements, or nothing.
function fits(F, A)
    A <: F && return identity
    A <: DualArray && Array{eltype(A), ndims(A)} <: F && return interleaved
    return nothing
end
interleaved(A::AbstractArray) = Array(A)

@generated function construct(::Type{T}, fields::Tuple) where {T}
    types = collect(Any, fieldtypes(fields))
    S = retyped(T, types)
    ways = map(fits, fieldtypes(S), types)
    if any(isnothing, ways)
        # Once more with ordinary arrays of duals, for fields declared as `Array`.
        types = map(A -> A <: DualArray ? Array{eltype(A), ndims(A)} : A, types)
        S = retyped(T, types)
        ways = map(fits, fieldtypes(S), fieldtypes(fields))
    end
    bad = findfirst(isnothing, ways)
    if bad !== nothing
        message = "the field `$(fieldname(T, bad))` of $T is declared as $(fieldtype(S, bad)) and cannot hold dual numbers ($(fieldtypes(fields)[bad])); give the type a parameter for it"
        return :(throw(ArgumentError($message)))
    end
    return Expr(:new, S, [:($(ways[i])(fields[$i])) for i in eachindex(ways)]...)
end
