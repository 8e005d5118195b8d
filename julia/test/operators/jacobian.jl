# jacobian, in both directions, and batched_jacobian.

using ADTypes: AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI, Constant
using ForwardDiff: ForwardDiff
using NestedGradients: AutoNested, batched_jacobian
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())

# name, f(x, p), x, p
const SCENARIOS = [
    ("more outputs", (x, p) -> tanh.(p * x), [0.3, -0.4], [0.5 -1.0; 0.3 0.8; 1.0 0.1]),
    ("more inputs", (x, p) -> tanh.(p * x), [0.3, -0.4, 0.9], [0.5 -1.0 0.2; 0.3 0.8 0.4]),
    ("a matrix", (x, p) -> (x * p).^2, [0.3 -0.4; 1.0 0.5], [0.5 -1.0; 0.3 0.8]),
]

rowwise(f, x) = permutedims(reduce(
    hcat,
    [vec(differences(x -> f(x)[i], x)) for i in eachindex(f(x))],
))

@testset "$name" for (name, f, x, p) in SCENARIOS
    expected = rowwise(x -> f(x, p), x)
    @test agree(DI.jacobian(f, nested, x, Constant(p)), expected)
    @test agree(DI.value_and_jacobian(f, nested, x, Constant(p)), (f(x, p), expected))
    prep = DI.prepare_jacobian(f, nested, x, Constant(p))
    @test agree(DI.jacobian(f, prep, nested, x, Constant(p)), expected)
    out = zero(expected)
    @test DI.jacobian!(f, out, nested, x, Constant(p)) === out && agree(out, expected)

    outer(x, p) = sum(abs2, DI.jacobian(f, nested, x, Constant(p)))
    reference = differences(z -> outer(z...), (x, p))
    @test agree(Zygote.gradient(outer, x, p), reference; rtol = 1.0e-6)
    captured(p) = sum(abs2, DI.jacobian(x -> f(x, p), nested, x))
    @test agree(only(Zygote.gradient(captured, p)), last(reference); rtol = 1.0e-6)
    @test agree(ForwardDiff.gradient(captured, p), last(reference); rtol = 1.0e-6)
    @test agree(DI.gradient(captured, nested, p), last(reference); rtol = 1.0e-6)
end

@testset "one sample by itself: $name" for (name, f, x, p) in SCENARIOS[1:2]
    X = [x 2x .- 0.1 -x]
    J = batched_jacobian(f, nested, X, p)
    @test size(J) == (size(p, 1), length(x), 3)
    @test all(b -> agree(J[:, :, b], rowwise(x -> f(x, p), X[:, b])), 1:3)
    outer(X, p) = sum(abs2, batched_jacobian(f, AutoZygote(), X, p))
    @test agree(
        Zygote.gradient(outer, X, p),
        differences(z -> outer(z...), (X, p));
        rtol = 1.0e-6,
    )
end

@testset "no inputs" begin
    @test DI.jacobian(x -> x.^2, nested, Float32[]) == zeros(Float32, 0, 0)
    @test DI.jacobian(x -> [sum(x), 1.0], nested, Float64[]) == zeros(2, 0)
    @test DI.hessian(x -> sum(x.^2), nested, Float64[]) == zeros(0, 0)
end

@testset "a batch that changes its size is an error" begin
    @test_throws "as many samples out as in" batched_jacobian(
        x -> x[:, 1:2],
        nested,
        ones(2, 3),
    )
end
