# Products of our arrays on BLAS: d(AB) = A dB + dA B, each a product of plain arrays.

"""
    bilinear(f, A, B)

`f(A, B)` for a bilinear `f`, from products of the separated parts. With respect to the outermost tag
of the two; the parts may hold inner tags, and `f` of them comes back here.
"""
@inline bilinear(f::F, A, B) where {F} = bilinear(f, outermost(A, B), A, B)
@inline function bilinear(f::F, ::Type{G}, A, B) where {F, G}
    a, da = parts(G, A)
    b, db = parts(G, B)
    return dual(G, f(a, b), productpartial(f, a, da, b, db))
end
@inline bilinear(f::F, ::Type{Nothing}, A, B) where {F} = f(A, B)

productpartial(f, a, ::Nothing, b, ::Nothing) = nothing
productpartial(f::F, a, ::Nothing, b, db) where {F} = f(a, db)
productpartial(f::F, a, da, b, ::Nothing) where {F} = f(da, b)
productpartial(f::F, a, da, b, db) where {F} = f(a, db) .+ f(da, b)
productpartial(f::F, a::Number, da::Number, b::Number, db::Number) where {F} = f(a, db) +
    f(da, b)

# A dense product can add the second to the first in place.
const Dense{T} = Union{
    StridedVecOrMat{T},
    Adjoint{T, <:StridedVecOrMat{T}},
    Transpose{T, <:StridedVecOrMat{T}},
}
function productpartial(
    ::typeof(*),
    a::Dense{T},
    da::Dense{T},
    b::Dense{T},
    db::Dense{T},
) where {T <: LinearAlgebra.BlasReal}
    return addproduct(a * db, da, b)
end
addproduct(c::Number, da, b) = c + da * b
addproduct(c::AbstractArray, da, b) = mul!(c, da, b, true, true)

# ---- products that may not be wanted ----
#
# The cotangent of a weight is a product too, and often nobody asks for all of it: of a parameter that
# carries no dual numbers only the partial is wanted, and in a gradient in x alone nothing.

"""
    Later(f, A, B)

The matrix `f(A, B)`, computed when it is first looked at.
"""
mutable struct Later{T, F, A, B} <: AbstractMatrix{T}
    const f::F
    const a::A
    const b::B
    const size::Dims{2}
    computed::Union{Nothing, Matrix{T}}

    function Later{T}(f::F, a::A, b::B, size) where {T, F, A, B}
        return new{T, F, A, B}(f, a, b, size, nothing)
    end
end
Base.size(L::Later) = L.size
Base.IndexStyle(::Type{<:Later}) = IndexLinear()
Base.@propagate_inbounds Base.getindex(L::Later, i::Int) = now(L)[i]
function now(L::Later{T}) where {T}
    computed = L.computed
    computed === nothing || return computed
    return L.computed = convert(Matrix{T}, L.f(L.a, L.b))
end
now(A) = A

"`A * B`, value and partial each computed when looked at, where both are plain; else at once."
later(A, B) = later(outermost(A, B), A, B)
later(::Type, A, B) = A * B
function later(::Type{Level{J, C}}, A, B) where {J, C}
    a, da = parts(Level{J, C}, A)
    b, db = parts(Level{J, C}, B)
    all(isdense, (a, da, b, db)) || return A * B
    T = promote_type(eltype(a), eltype(b))
    dims = (size(a, 1), size(b, 2))
    value = Later{T}(*, a, b, dims)
    partial = Later{T}(
        (x, y) -> productpartial(*, first(x), last(x), first(y), last(y)),
        (a, da),
        (b, db),
        dims,
    )
    return dual(Level{J, C}, value, partial)
end
isdense(::Dense{T}) where {T <: LinearAlgebra.BlasReal} = true
isdense(::Nothing) = true
isdense(A) = false

# The plain partners that BLAS knows. Other wrappers (`Diagonal`, triangular, sparse, filled, ...) have
# methods of their own, which work on any array.
const PARTNERS = (
    :(StridedVector{<:Real}),
    :(StridedMatrix{<:Real}),
    :(Adjoint{<:Real, <:StridedVector}),
    :(Adjoint{<:Real, <:StridedMatrix}),
    :(Transpose{<:Real, <:StridedVector}),
    :(Transpose{<:Real, <:StridedMatrix}),
)
for ours in (:DualVector, :DualMatrix)
    for plain in PARTNERS
        @eval Base.:*(A::$plain, B::$ours) = bilinear(*, A, B)
        @eval Base.:*(A::$ours, B::$plain) = bilinear(*, A, B)
    end
    for other in (:DualVector, :DualMatrix)
        @eval Base.:*(A::$ours, B::$other) = bilinear(*, A, B)
    end
end
LinearAlgebra.dot(A::DualArray, B::DualArray) = bilinear(dot, A, B)
LinearAlgebra.dot(A::DualArray, B::StridedArray{<:Real}) = bilinear(dot, A, B)
LinearAlgebra.dot(A::StridedArray{<:Real}, B::DualArray) = bilinear(dot, A, B)
LinearAlgebra.kron(A::DualVecOrMat, B::DualVecOrMat) = bilinear(kron, A, B)
LinearAlgebra.kron(A::DualVecOrMat, B::StridedVecOrMat{<:Real}) = bilinear(kron, A, B)
LinearAlgebra.kron(A::StridedVecOrMat{<:Real}, B::DualVecOrMat) = bilinear(kron, A, B)

# Code that fills buffers of its own (`[...]` of our numbers, `similar` of a plain array) has them
# interleaved. Its products are separated, done on BLAS and joined again.
for A in PARTNERS, B in PARTNERS
    @eval function LinearAlgebra.mul!(
        C::StridedVecOrMat{<:LevelDual},
        A::$A,
        B::$B,
        α::Number,
        β::Number,
    )
        return addto!(C, bilinear(*, A, B), α, β)
    end
end
for A in (PARTNERS..., :DualVector, :DualMatrix), B in (
        PARTNERS...,
        :DualVector,
        :DualMatrix,
    )
    @eval function LinearAlgebra.mul!(C::DualVecOrMat, A::$A, B::$B, α::Number, β::Number)
        return addto!(C, A * B, α, β)
    end
end
addto!(C, P, α, β) = iszero(β) ? (C .= α .* P) : (C .= α .* P .+ β .* C)
