# Our arrays against `Array`s of the same dual numbers: every operation must agree with Base's own.

using ForwardDiff: Dual
using LinearAlgebra:
    Diagonal,
    LowerTriangular,
    Symmetric,
    det,
    diag,
    dot,
    inv,
    kron,
    logdet,
    mul!,
    norm,
    tr
using NestedGradients: DualArray, Level, dual
using Test

const G = Level{1, Nothing}
const H = Level{2, Nothing}

array(dims...) = reshape(sin.(1.0:prod(dims)), dims)
other(dims...) = reshape(cos.(1.0:prod(dims)), dims)
first_order(dims...) = dual(G, array(dims...), other(dims...))
second_order(dims...) = dual(
    H,
    first_order(dims...),
    dual(G, other(dims...), array(dims...).^2),
)
sparse_order(dims...) = dual(
    H,
    first_order(dims...),
    other(dims...),
) # no second partial is stored
interleaved(A) = [A[i] for i in CartesianIndices(A)]

same(a::Number, b::Number) = typeof(a) == typeof(b) && allparts(a) ≈ allparts(b)
same(a::AbstractArray, b::AbstractArray) = size(a) == size(b) &&
    all(map((x, y) -> allparts(x) ≈ allparts(y), a, b))
same(a::Tuple, b::Tuple) = all(map(same, a, b))
allparts(x::Real) = [x]
allparts(x::Dual) = [allparts(x.value); allparts(x.partials[1])]

@testset "an array like any other" begin
    for A in (first_order(3, 2), second_order(3, 2), sparse_order(3, 2))
        B = interleaved(A)
        @test A isa DualArray && eltype(A) == eltype(B) && size(A) == (3, 2)
        @test A == B && A[2, 1] === B[2, 1] && A[5] === B[5]
        @test copy(A) == A && similar(A) isa typeof(similar(second_order(1))) ||
            similar(A) isa DualArray
        C = similar(A)
        C .= A
        C[1, 1] = 2 * A[1, 1]
        @test C[1, 1] == 2 * A[1, 1] && C[2:end] == B[2:end]
    end
    @test_throws DimensionMismatch dual(G, array(3), array(2))
end

@testset "moving elements: $name" for (name, f) in [
        "reshape" => a -> reshape(a, 2, 3),
        "reshape with a colon" => a -> reshape(a, :, 2),
        "vec" => vec,
        "adjoint" => adjoint,
        "transpose" => transpose,
        "permutedims" => a -> permutedims(a, (2, 1)),
        "view" => a -> view(a, 1:2, :),
        "range" => a -> a[2:3, 1],
        "mask" => a -> a[[true, false, true], :],
        "scalar view" => a -> a[:, end],
        "selectdim" => a -> selectdim(a, 1, 2),
        "reverse" => a -> reverse(a; dims = 1),
        "circshift" => a -> circshift(a, (1, 0)),
        "repeat" => a -> repeat(a, 2, 3),
        "diag" => diag,
        "dropdims" => a -> dropdims(reshape(a, 3, 1, 2); dims = 2),
        "vcat" => a -> vcat(a, 2a),
        "vcat with plain" => a -> vcat(ones(1, 2), a, zeros(2, 2)),
        "hcat" => a -> hcat(a, ones(3), a),
        "hcat of vectors" => a -> hcat(a[:, 1], a[:, 2]),
        "cat" => a -> cat(a, a; dims = 3),
        "reduce hcat" => a -> reduce(hcat, [a[:, 1], a[:, 2]]),
        "stack" => a -> stack([a[:, 1], a[:, 2]]),
        "map" => a -> map(x -> x^2, a),
        "collect" => collect,
        "comprehension" => a -> [x + 1 for x in a],
        "zip" => a -> [x * y for (x, y) in zip(a, 1:6)],
    ]
    for A in (first_order(3, 2), second_order(3, 2), sparse_order(3, 2))
        @test same(f(A), f(interleaved(A)))
    end
end

@testset "reductions: $name" for (name, f) in [
        "sum" => sum,
        "sum over rows" => a -> sum(a; dims = 1),
        "sum of a function" => a -> sum(abs2, a),
        "sum of a function over columns" => a -> sum(abs2, a; dims = 2),
        "prod" => prod,
        "maximum" => maximum,
        "maximum over rows" => a -> maximum(a; dims = 1),
        "extrema" => extrema,
        "norm" => norm,
        "cumsum" => a -> cumsum(a; dims = 2),
        "foldl" => a -> foldl((x, y) -> x * y + 1, a),
        "mapreduce" => a -> mapreduce(exp, +, a; dims = 1),
    ]
    for A in (first_order(3, 2), second_order(3, 2), sparse_order(3, 2))
        @test same(f(A), f(interleaved(A)))
    end
end

@testset "broadcasts: $name" for (name, f) in [
        "fused" => a -> tanh.(a .* 2 .+ 1),
        "a row and a column" => a -> a[:, 1] .* a[1, :]',
        "a bias" => a -> a .+ [1.0, 2.0, 3.0],
        "a scalar dual" => a -> a .* a[1],
        "a Ref" => a -> a .* Ref(a[2]),
        "powers" => a -> a.^2 .+ 2 .^ a,
        "comparisons" => a -> ifelse.(a .> 0, a, 0.1 .* a),
        "integers" => a -> a .* (1:3),
        "to plain numbers" => a -> a .> 0.5,
        "in place" => a -> (b = copy(a) .+ 0; b .+= 2 .* b; b),
        "short columns" => a -> exp.(a') .- a',
    ]
    for A in (first_order(3, 2), second_order(3, 2), sparse_order(3, 2))
        @test same(f(A), f(interleaved(A)))
    end
end

const Square = [4.0 1.0 0.5; 1.0 5.0 0.2; 0.3 0.1 6.0]

@testset "products: $name" for (name, f) in [
        "plain * ours" => (A, x) -> Square * A,
        "ours * plain" => (A, x) -> A' * Square,
        "ours * ours" => (A, x) -> A' * A,
        "transposes" => (A, x) -> transpose(A) * Square',
        "matrix * vector" => (A, x) -> A' * x,
        "plain matrix * vector" => (A, x) -> Square * x,
        "row * vector" => (A, x) -> x' * x,
        "row * matrix" => (A, x) -> x' * A,
        "row * plain" => (A, x) -> x' * Square,
        "plain row * ours" => (A, x) -> [1.0, 2.0, 3.0]' * A,
        "outer" => (A, x) -> x * x',
        "outer with plain" => (A, x) -> x * [1.0, 2.0]',
        "dot" => (A, x) -> dot(x, x),
        "dot with plain" => (A, x) -> dot([1.0, 2.0, 3.0], x),
        "diagonal" => (A, x) -> Diagonal([1.0, 2.0, 3.0]) * A,
        "triangular" => (A, x) -> LowerTriangular(Square) * A,
        "symmetric" => (A, x) -> Symmetric(Square) * A,
        "three factors" => (A, x) -> A' * Square * A,
        "scaled" => (A, x) -> 2A / 3,
        "sums" => (A, x) -> A + A - ones(3, 2),
        "kron" => (A, x) -> kron(A, Square),
        "muladd" => (A, x) -> muladd(Square, A, x),
        "mul! to ours" => (A, x) -> mul!(similar(A), Square, A),
        "solve" => (A, x) -> Square \ A,
        "solve ours" => (A, x) -> (Square + x * x') \ A,
        "divide" => (A, x) -> A' / Square,
        "inv" => (A, x) -> inv(Square + x * x'),
        "det" => (A, x) -> det(Square + x * x'),
        "logdet" => (A, x) -> logdet(Square + x * x'),
        "trace" => (A, x) -> tr(Square + x * x'),
    ]
    for (A, x) in (
            (first_order(3, 2), first_order(3)),
            (second_order(3, 2), second_order(3)),
            (sparse_order(3, 2), first_order(3)),
            (first_order(3, 2), sparse_order(3)),
        )
        @test same(f(A, x), f(interleaved(A), interleaved(x)))
    end
end

@testset "interleaved products go through BLAS" begin
    A, B = interleaved(first_order(4, 5)), interleaved(second_order(5, 3))
    expected = [sum(A[i, k] * B[k, j] for k in 1:5) for i in 1:4, j in 1:3]
    @test same(A * B, expected)
    C = mul!(copy(expected), A, B, 2, 3)
    @test same(C, 5 .* expected)
end

@testset "float types stay" begin
    A = dual(G, Float32[1 2; 3 4], Float32[1 0; 0 1])
    for B in (
            A * A,
            tanh.(A),
            A .+ 1,
            2A,
            sum(A; dims = 1),
            vcat(A, A),
            A',
            A \ A,
            Float32[1 2; 3 4] * A,
        )
        @test eltype(B) == Dual{G, Float32, 1}
    end
end
