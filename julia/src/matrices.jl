# Functions of whole matrices of dual numbers: solutions, determinants, the exponential, Cholesky factors.
# Each is written with the same function of the parts, so that it serves every order.

Base.inv(A::DualMatrix) = inverse(tag(A), A)
function inverse(::Type{G}, A) where {G}
    a, da = parts(G, A)
    v = inv(a)
    return dual(G, v, -(v * da * v))
end

Base.:\(A::DualMatrix, B::DualVecOrMat) = solve(outermost(A, B), A, B)
Base.:\(A::DualMatrix, B::StridedVecOrMat{<:Real}) = solve(outermost(A, B), A, B)
Base.:\(A::StridedMatrix{<:Real}, B::DualVecOrMat) = solve(outermost(A, B), A, B)
function solve(::Type{G}, A, B) where {G}
    a, da = parts(G, A)
    b, db = parts(G, B)
    x = a \ b
    right = da === nothing ? db : db === nothing ? -(da * x) : db - da * x
    dx = a \ right
    (da === nothing || size(a, 1) == size(a, 2)) && return dual(G, x, dx)
    # least squares, or the least norm: what the pseudoinverse's derivative has besides (Golub, Pereyra 1973)
    w = da' * (a' \ x)
    return dual(G, x, dx + a \ (a' \ (da' * (b - a * x))) + w - a \ (a * w))
end
function LinearAlgebra.pinv(A::DualMatrix; kw...)
    G = tag(A)
    a, da = parts(G, A)
    v = pinv(a; kw...)
    w, r = v * v' * da', da' * v' * v
    return dual(G, v, w - w * a * v + r - v * a * r - v * da * v)
end
Base.:/(A::DualVecOrMat, B::DualMatrix) = transpose(transpose(B) \ transpose(A))
Base.:/(A::DualVecOrMat, B::StridedMatrix{<:Real}) = transpose(transpose(B) \ transpose(A))
Base.:/(A::StridedVecOrMat{<:Real}, B::DualMatrix) = transpose(transpose(B) \ transpose(A))

function LinearAlgebra.logabsdet(A::DualMatrix)
    G = tag(A)
    a, da = parts(G, A)
    value, sign = logabsdet(a)
    return dual(G, value, tr(a \ da)), sign
end
LinearAlgebra.logdet(A::DualMatrix) = first(positive(logabsdet(A)))
positive(d) = last(d) > 0 ?
    d :
    throw(DomainError(last(d), "logdet of a matrix whose determinant is not positive"))

# ---- the exponential: exp([A E; 0 A]) has the derivative of exp at A along E in its corner ----

function Base.exp(A::DualMatrix)
    G = tag(A)
    a, da = parts(G, A)
    return dual(G, expalong(a, da)...)
end
function expalong(A::AbstractMatrix, E::AbstractMatrix)
    n = size(A, 1)
    first_half, second_half = 1:n, (n + 1):2n
    block = allocate(promote_type(eltype(A), eltype(E)), (2n, 2n))
    block[first_half, first_half] = A
    block[first_half, second_half] = E
    block[second_half, first_half] .= false
    block[second_half, second_half] = A
    corner = exp(block)
    return corner[first_half, first_half], corner[first_half, second_half]
end
function ChainRulesCore.rrule(::typeof(exp), A::DualMatrix)
    exp_pullback(Δ) = (NoTangent(), last(expalong(A', unthunk(Δ))))
    return exp(A), exp_pullback
end

# ---- factorizations ----

const OurMatrix = Union{
    DualMatrix{<:LevelDual},
    Symmetric{<:LevelDual, <:DualMatrix},
    Hermitian{<:LevelDual, <:DualMatrix},
}

# The rule for Cholesky's factors works on any real numbers in an `Array`.
function ChainRulesCore.rrule(
    cfg::RuleConfig{>:HasReverseMode},
    ::typeof(cholesky),
    A::OurMatrix,
    pivot...;
    kw...,
)
    C, back = rrule_via_ad(cfg, cholesky, strided(A), pivot...; kw...)
    return C, back
end
strided(A::DualMatrix) = interleaved(A)
strided(A::Symmetric) = Symmetric(interleaved(parent(A)), Symbol(A.uplo))
strided(A::Hermitian) = Hermitian(interleaved(parent(A)), Symbol(A.uplo))

# An AD would look into these, and stop in the middle with an error about arrays that are written to.
for f in (:eigen, :eigvals, :svd, :svdvals, :schur)
    @eval function ChainRulesCore.rrule(
        ::RuleConfig{>:HasReverseMode},
        ::typeof(LinearAlgebra.$f),
        A::OurMatrix;
        kw...,
    )
        throw(ArgumentError(
            $(
                "a second derivative through `$f` is not supported: it would need the derivative of its derivative. Put what you need of it by products, `\\`, `inv`, `pinv`, `det`, `logdet`, `exp` or `cholesky`"
            ),
        ))
    end
end
