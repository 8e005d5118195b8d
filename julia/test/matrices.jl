# Functions of whole matrices inside a differentiated function: the second-order pass against differences.

using ADTypes: AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI, Constant
using LinearAlgebra
using NestedGradients: AutoNested
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())
const A = [4.0 1.0; 0.5 5.0]
const P = [0.5 -0.1; 0.3 0.8]

positive(x, p) = x * x' .+ p * p' + 3I

# name, f(x, p)
const SCENARIOS = [
    "inv" => (x, p) -> sum(abs2, inv(x) * p),
    "solve" => (x, p) -> sum(abs2, x \ p),
    "solve for a vector" => (x, p) -> sum(abs2, x \ p[:, 1]),
    "a constant matrix's solve" => (x, p) -> sum(abs2, (p + 3I) \ x),
    "least squares" => (x, p) -> sum(abs2, [x; p[1:1, :]] \ [p; x[2:2, :]]),
    "least norm" => (x, p) -> sum(abs2, [x p[:, 1]] \ p),
    "pseudoinverse" => (x, p) -> sum(abs2, pinv([x; p[1:1, :]]) * [p; x[2:2, :]]),
    "divide" => (x, p) -> sum(abs2, p / x),
    "solve with the adjoint" => (x, p) -> sum(abs2, x' \ p),
    "det" => (x, p) -> det(x + p),
    "logdet" => (x, p) -> logdet(positive(x, p)),
    "logabsdet" => (x, p) -> first(logabsdet(x + p)),
    "exp" => (x, p) -> sum(abs2, exp(0.1 .* x) * p),
    "powers" => (x, p) -> sum((x * p)^3) + sum(abs2, x^-1 * p),
    "triangular solve" => (x, p) -> sum(abs2, UpperTriangular(x) \ p),
    "symmetric solve" => (x, p) -> sum(abs2, Symmetric(positive(x, p)) \ p),
    "diagonal solve" => (x, p) -> sum(abs2, Diagonal(x[:, 1]) \ p),
    "Cholesky, log determinant" => (x, p) -> logdet(cholesky(Symmetric(positive(x, p)))),
    "Cholesky, solve" => (x, p) -> sum(abs2, cholesky(Symmetric(positive(x, p))) \ p),
    "Cholesky, factor" => (x, p) -> sum(sin, cholesky(positive(x, p)).L),
    "Cholesky of a Hermitian" => (x, p) -> sum(abs2, cholesky(Hermitian(positive(x, p))).U),
    "norms" => (x, p) -> norm(x * p, 3) + norm(x * p),
    "kron" => (x, p) -> sum(abs2, kron(x, p)),
    "dot of three" => (x, p) -> dot(x[:, 1], p, x[:, 2]),
]

@testset "$name" for (name, f) in SCENARIOS
    gradient(x, p) = DI.gradient(f, nested, x, Constant(p))
    @test agree(gradient(A, P), differences(x -> f(x, P), A))
    outer(x, p) = sum(abs2, gradient(x, p))
    @test agree(
        Zygote.gradient(outer, A, P),
        differences(z -> outer(z...), (A, P));
        rtol = 1.0e-6,
        atol = 1.0e-6,
    )
end

@testset "exp to third order" begin
    f(x) = sum(abs2, exp(x))
    first_order(x) = sum(abs2, DI.gradient(f, nested, x))
    second_order(x) = sum(abs2, DI.gradient(first_order, nested, x))
    x = 0.1 .* A
    @test agree(
        only(Zygote.gradient(second_order, x)),
        differences(second_order, x);
        rtol = 1.0e-6,
    )
end

@testset "what has no second derivative is an error that names it: $f" for f in (
        eigvals,
        svdvals,
    )
    loss(x) = sum(abs2, DI.gradient(x -> sum(abs2, f(Symmetric(x))), nested, x))
    @test_throws "`$f` is not supported" Zygote.gradient(loss, A + A')
end

@testset "complex numbers" begin
    # in what was captured, and on the way; the point is real
    W = [1.0 + 0.5im 0.3 - 1.0im; -0.2im 2.0 + 1.0im]
    x = [0.3, -0.7]
    f(x, W) = sum(abs2, W * exp.(im .* x)) + real(sum(W * x))^3
    outer(x, re, im_) = sum(abs2, DI.gradient(f, nested, x, Constant(complex.(re, im_))))
    z = (x, real(W), imag(W))
    @test agree(DI.gradient(f, nested, x, Constant(W)), differences(x -> f(x, W), x))
    @test agree(
        Zygote.gradient(outer, z...),
        differences(z -> outer(z...), z);
        rtol = 1.0e-6,
    )
    # a complex point: the gradient is that of the real and imaginary parts, as Zygote's
    g(z) = sum(abs2, z.^2 .+ z) + real(prod(z))
    parts(re, im_) = g(complex.(re, im_))
    at = [0.3 + 0.2im, -0.5 + 1.0im]
    dre, dim = differences(t -> parts(t...), (real(at), imag(at)))
    @test agree(DI.gradient(g, nested, at), complex.(dre, dim))
    total(re, im_) = sum(abs2, DI.gradient(g, nested, complex.(re, im_)))
    @test agree(
        Zygote.gradient(total, real(at), imag(at)),
        differences(t -> total(t...), (real(at), imag(at)));
        rtol = 1.0e-6,
    )
end
