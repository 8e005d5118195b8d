# Arrays of dual numbers that keep values and partials apart, each in an array of its own.
#
# An `Array` of duals interleaves the two: every product would separate and join them again. Here a
# product is two or three products of plain arrays (products.jl), a broadcast is one loop over two
# streams, and what only moves elements about (reshape, view, cat, ...) does so to both arrays.
# A second direction nests: values and partials may themselves be `DualArray`s of an inner tag.

"""
    DualArray{D,N,V,P} <: AbstractArray{D,N}

An array of the dual numbers `D = Dual{G,T,1}`: `values(V)` and `partials(P)` of the same axes. One of
the two may have a narrower element type than `T`, as when the partials do not depend on an inner
direction: no zeros are stored for it.
"""
struct DualArray{D <: Dual, N, V <: AbstractArray, P <: AbstractArray} <:
    AbstractArray{D, N}
    value::V
    partial::P

    function DualArray{D}(
        value::AbstractArray{<:Any, N},
        partial::AbstractArray{<:Any, N},
    ) where {D <: Dual, N}
        axes(value) == axes(partial) ||
            throw(DimensionMismatch(
                "a direction of size $(size(partial)) for an array of size $(size(value)); they must agree",
            ))
        return new{D, N, typeof(value), typeof(partial)}(value, partial)
    end
end

"""
    dual(G, value, partial)

The number or array with tag `G`, value `value` and partial `partial`; just the value if the partial is
`nothing`, which stands for zero.
"""
dual(::Type, value, ::Nothing) = value
dual(::Type{G}, value::Real, partial::Real) where {G} = Dual{G}(value, Partials((partial,)))
function dual(::Type{G}, value::AbstractArray, partial::AbstractArray) where {G}
    D = Dual{G, promote_type(eltype(value), eltype(partial)), 1}
    isrow(value) == isrow(partial) && return DualArray{D}(value, partial)
    return isrow(value) ?
        DualArray{D}(value, row(partial)) :
        DualArray{D}(value, matrix(partial))
end

const DualVector{D, V, P} = DualArray{D, 1, V, P}
const DualMatrix{D, V, P} = DualArray{D, 2, V, P}
# A row that was made of a vector is one with respect to products: times a vector it is a number. Either
# both parts are such rows or none is.
const Row = Union{Adjoint{<:Any, <:AbstractVector}, Transpose{<:Any, <:AbstractVector}}
isrow(::AbstractArray) = false
isrow(::Row) = true
isrow(A::DualMatrix) = isrow(A.value)
row(A) = size(A, 1) == 1 ?
    transpose(vec(A)) :
    A # else the sizes do not agree, which is an error of its own
matrix(A::Row) = reshape(vec(A), 1, :)
matrix(A::DualMatrix) = moved(matrix, A)

const DualVecOrMat{D} = Union{DualVector{D}, DualMatrix{D}}

tag(::DualArray{Dual{G, T, 1}}) where {G, T} = G

# ---- the interface of arrays ----

Base.size(A::DualArray) = size(A.value)
Base.axes(A::DualArray) = axes(A.value)
function Base.IndexStyle(::Type{<:DualArray{D, N, V, P}}) where {D, N, V, P}
    return IndexStyle(IndexStyle(V), IndexStyle(P))
end

@inline function element(::Type{Dual{G, T, 1}}, v, p) where {G, T}
    return Dual{G, T, 1}(convert(T, v), Partials{1, T}((convert(T, p),)))
end
Base.@propagate_inbounds Base.getindex(A::DualArray{D}, i::Int) where {D} = element(
    D,
    A.value[i],
    A.partial[i],
)
Base.@propagate_inbounds function Base.getindex(
    A::DualArray{D},
    i::Int,
    j::Int,
    k::Int...,
) where {D}
    return element(D, A.value[i, j, k...], A.partial[i, j, k...])
end
Base.@propagate_inbounds function store!(A::DualArray{D}, x, i...) where {D}
    d = convert(D, x)
    A.value[i...] = ForwardDiff.value(d)
    A.partial[i...] = ForwardDiff.partials(d, 1)
    return A
end
Base.@propagate_inbounds Base.setindex!(A::DualArray, x, i::Int) = store!(A, x, i)
Base.@propagate_inbounds Base.setindex!(
    A::DualArray,
    x,
    i::Int,
    j::Int,
    k::Int...,
) = store!(A, x, i, j, k...)

"Does `A` hold whatever number of type `T` is stored in it? Not where one of its two arrays is narrower."
holds(A::AbstractArray, ::Type{T}) where {T} = eltype(A) === T
holds(A::DualArray, ::Type) = false
function holds(A::DualArray{D}, ::Type{D}) where {G, T, D <: Dual{G, T, 1}}
    return holds(A.value, T) && holds(A.partial, T)
end

Base.dataids(A::DualArray) = (Base.dataids(A.value)..., Base.dataids(A.partial)...)
function Base.unaliascopy(A::DualArray{D}) where {D}
    return DualArray{D}(Base.unaliascopy(A.value), Base.unaliascopy(A.partial))::typeof(A)
end

"An uninitialised array: of two arrays for our duals, an `Array` for all else."
allocate(::Type{T}, dims::Dims) where {T} = Array{T}(undef, dims)
function allocate(::Type{D}, dims::Dims) where {J, C, T, D <: LevelDual{J, C, T}}
    return DualArray{D}(allocate(T, dims), allocate(T, dims))
end
Base.similar(::DualArray, ::Type{T}, dims::Dims) where {T} = allocate(T, dims)

Base.copy(A::DualArray{D}) where {D} = DualArray{D}(copy(A.value), copy(A.partial))

# ---- what only moves elements about ----

"`f` of the values and of the partials, for an `f` that is linear and does not mix elements of its own."
@inline moved(f::F, A::DualArray{Dual{G, T, 1}}) where {F, G, T} = dual(
    G,
    f(now(A.value)),
    f(now(A.partial)),
)

Base.reshape(A::DualArray, dims::Dims) = moved(a -> reshape(a, dims), A)
Base.vec(A::DualArray) = moved(vec, A)
Base.vec(A::DualVector) = A
Base.permutedims(A::DualArray, perm) = moved(a -> permutedims(a, perm), A)
Base.permutedims(A::DualMatrix) = moved(permutedims, A)
Base.permutedims(A::DualVector) = moved(permutedims, A)
Base.adjoint(A::DualVecOrMat) = turned(adjoint, A)
Base.transpose(A::DualVecOrMat) = turned(transpose, A)
Base.dropdims(A::DualArray; dims) = moved(a -> dropdims(a; dims), A)
Base.reverse(A::DualArray; dims = :) = moved(a -> reverse(a; dims), A)
Base.reverse(A::DualVector; dims = :) = moved(reverse, A)
Base.repeat(A::DualArray, counts...) = moved(a -> repeat(a, counts...), A)
Base.repeat(A::DualArray; inner = nothing, outer = nothing) = moved(
    a -> repeat(a; inner, outer),
    A,
)
LinearAlgebra.diag(A::DualMatrix, k::Integer = 0) = moved(a -> diag(a, k), A)

Base.view(A::DualArray, I::Vararg{Any}) = moved(a -> view(a, I...), A)

# The adjoint of a row is a vector where the row was made of one. Where only one part was, both are columns.
function turned(f::F, A::DualArray{Dual{G, T, 1}}) where {F, G, T}
    v, p = f(now(A.value)), f(now(A.partial))
    return ndims(v) == ndims(p) ? dual(G, v, p) : dual(G, column(v), column(p))
end
column(a::AbstractVector) = reshape(a, length(a), 1)
column(a::AbstractMatrix) = a

# A range of indices in one of the first four places; anything else Base does element by element.
const Several = Union{AbstractArray, Colon}
Base.getindex(A::DualArray, i::Several, I...) = moved(a -> a[i, I...], A)
Base.getindex(A::DualArray, i::Int, j::Several, I...) = moved(a -> a[i, j, I...], A)
Base.getindex(A::DualArray, i::Int, j::Int, k::Several, I...) = moved(
    a -> a[i, j, k, I...],
    A,
)
Base.getindex(A::DualArray, i::Int, j::Int, k::Int, l::Several, I...) = moved(
    a -> a[i, j, k, l, I...],
    A,
)

# ---- parts ----

"The parts of `x` with respect to the tag `G`: `(value, partial)`, the partial `nothing` if `x` does not depend on it."
parts(::Type, x) = (x, nothing)
parts(::Type{G}, x::Dual{G, T, 1}) where {G, T} = (x.value, x.partials[1])
parts(::Type{G}, x::DualArray{Dual{G, T, 1}}) where {G, T} = (now(x.value), now(x.partial))
function parts(::Type{G}, x::AbstractArray{Dual{G, T, 1}}) where {G, T}
    return map(ForwardDiff.value, x), map(d -> d.partials[1], x)
end

"The parts of `x`, zeros in place of a missing partial."
function allparts(::Type{G}, x) where {G}
    v, p = parts(G, x)
    return v, p === nothing ? zero(v) : p
end

"The outermost of our tags among the element types of `xs`, or `Nothing`."
outermost(xs...) = outertag(map(x -> tagof(typeof(x)), xs)...)
tagof(::Type{<:AbstractArray{T}}) where {T} = tagof(T)
tagof(::Type) = Nothing
tagof(::Type{Union{}}) = Nothing
tagof(::Type{LevelDual{J, C, T}}) where {J, C, T} = Level{J, C}
outertag(::Type{G}) where {G} = G
outertag(::Type{G}, ::Type{H}, rest...) where {G, H} = outertag(outer(G, H), rest...)
outer(::Type{Nothing}, ::Type{Nothing}) = Nothing
outer(::Type{G}, ::Type{Nothing}) where {G} = G
outer(::Type{Nothing}, ::Type{H}) where {H} = H
outer(::Type{G}, ::Type{G}) where {G} = G
outer(::Type{G}, ::Type{H}) where {G, H} = ForwardDiff.:≺(G, H) ? H : G

# ---- sums ----

Base.sum(A::DualArray; dims = :, kw...) = moved(a -> sum(a; dims, kw...), A)
Base.cumsum(A::DualArray; dims) = moved(a -> cumsum(a; dims), A)
Base.cumsum(A::DualVector; dims = 1) = moved(a -> cumsum(a; dims), A)

# ---- broadcasts: Base's loop, over two streams ----

struct DualStyle{N} <: AbstractArrayStyle{N} end
DualStyle{M}(::Val{N}) where {M, N} = DualStyle{N}()
Base.BroadcastStyle(::Type{<:DualArray{D, N}}) where {D, N} = DualStyle{N}()
Base.BroadcastStyle(
    ::DualStyle{M},
    ::Broadcast.DefaultArrayStyle{N},
) where {M, N} = DualStyle{max(M, N)}()
Base.BroadcastStyle(::DualStyle{M}, ::DualStyle{N}) where {M, N} = DualStyle{max(M, N)}()
Base.similar(bc::Broadcasted{<:DualStyle}, ::Type{T}) where {T} = allocate(
    T,
    map(length, axes(bc)),
)

@inline function Base.copyto!(dest::DualArray, bc::Broadcasted{Nothing})
    axes(dest) == axes(bc) ||
        throw(DimensionMismatch(
            "a broadcast of axes $(axes(bc)) into an array of axes $(axes(dest))",
        ))
    ready = Broadcast.preprocess(dest, bc)
    # One flat loop where every array has the shape of the result, since columns may be short.
    if IndexStyle(dest) isa IndexLinear && isflat(axes(dest), ready)
        @simd ivdep for i in eachindex(IndexLinear(), dest)
            @inbounds dest[i] = flatindex(ready, i)
        end
    else
        @simd ivdep for i in eachindex(ready)
            @inbounds dest[i] = ready[i]
        end
    end
    return dest
end

isflat(shape, bc::Broadcasted) = all(map(x -> isflat(shape, x), bc.args))
isflat(shape, x::Extruded) = isflat(shape, x.x)
isflat(shape, x::AbstractArray) = (IndexStyle(x) isa IndexLinear && axes(x) == shape) ||
    ndims(x) == 0
isflat(shape, x::Tuple) = false
isflat(shape, x) = true

@inline flatindex(bc::Broadcasted, i) = bc.f(flatindices(bc.args, i)...)
@inline flatindices(args::Tuple, i) = (
    flatindex(first(args), i),
    flatindices(Base.tail(args), i)...,
)
@inline flatindices(::Tuple{}, i) = ()
@inline flatindex(x::Extruded, i) = flatindex(x.x, i)
Base.@propagate_inbounds flatindex(x::AbstractArray, i) = x[i]
Base.@propagate_inbounds flatindex(x::AbstractArray{<:Any, 0}, i) = x[]
@inline flatindex(x::Ref, i) = x[]
@inline flatindex(x, i) = x
