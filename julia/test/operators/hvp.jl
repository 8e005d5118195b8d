# hvp and hessian.

using ADTypes: AutoForwardDiff, AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI, Constant, SecondOrder
using NestedGradients: AutoNested
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())

# name, f(x, p), x, directions, p
const SCENARIOS = [
    (
        "a vector",
        (x, p) -> sum(p .* sin.(x) .* x),
        [0.3, -0.4],
        ([1.0, 0.5], [0.2, -0.3]),
        [1.5, 0.5],
    ),
    (
        "a matrix",
        (x, p) -> sum(tanh.(p * x).^2),
        [0.3 -0.4; 1.0 0.2],
        ([1.0 0.0; 0.5 -0.5],),
        [0.5 -1.0; 0.3 0.8],
    ),
]

const OPERATORS = (DI.hvp, DI.gradient_and_hvp, DI.prepare_hvp)

@testset "$name" for (name, f, x, tx, p) in SCENARIOS
    gradient(x) = DI.gradient(f, nested, x, Constant(p))
    @test agree(gradient(x), differences(x -> f(x, p), x))
    along(t) = reshape(
        map(i -> differences(s -> gradient(x .+ s .* t)[i], 0.0), eachindex(x)),
        size(x),
    )
    expected = map(along, tx)
    checkproducts(OPERATORS, nested, f, x, tx, p, gradient(x), expected)
    out = map(zero, tx)
    @test DI.hvp!(f, out, nested, x, tx, Constant(p)) === out && agree(out, expected)

    hessian = DI.hessian(f, nested, x, Constant(p))
    @test hessian ≈ hessian'
    @test agree(hessian * vec(first(tx)), vec(first(expected)))
    y, g, h = DI.value_gradient_and_hessian(f, nested, x, Constant(p))
    @test agree((y, g, h), (f(x, p), gradient(x), hessian))

    # DI's own second order over ours
    mixed = SecondOrder(AutoForwardDiff(), nested)
    @test agree(DI.hvp(f, mixed, x, tx, Constant(p)), expected)
end

@testset "each operator inside another" begin
    f(x) = sum(sin.(x) .* x) * x[1]
    x, v = [0.3, -0.4], [1.0, 0.5]
    g(x) = DI.gradient(f, nested, x)
    H = DI.hessian(f, nested, x)
    @test agree(H, reduce(hcat, [differences(x -> g(x)[i], x) for i in 1:2]))
    @test DI.jacobian(g, nested, x) ≈ H
    @test only(DI.pushforward(g, nested, x, (v,))) ≈ H * v
    @test only(DI.pullback(g, nested, x, (v,))) ≈ H * v
    @test DI.derivative(t -> g(x .+ t .* v), nested, 0.0) ≈ H * v
    @test DI.second_derivative(t -> f(x .+ t .* v), nested, 0.0) ≈ v' * H * v
    # the third derivative, each way
    third(x) = v' * DI.hessian(f, nested, x) * v
    expected = differences(third, x)
    @test agree(DI.gradient(third, nested, x), expected)
    @test agree(
        DI.gradient(x -> v' * only(DI.hvp(f, nested, x, (v,))), nested, x),
        expected,
    )
    @test agree(vec(DI.jacobian(x -> [third(x)], nested, x)), expected)
    @test agree(DI.derivative(t -> third(x .+ t .* v), nested, 0.0), expected' * v)
    @test agree(
        only(DI.pushforward(x -> DI.jacobian(g, nested, x), nested, x, (v,))) * v,
        expected,
    )
end

const MASK = [true, false, true, false]
BRANCHES = [
    "a computed mask" => y -> sum(ifelse.(y .> 1, y.^3, y.^2)),
    "a constant mask" => y -> sum(ifelse.(MASK, y.^3, y.^2)),
    "a fused mask" => y -> sum(@. ifelse(y > 1, y^3, y^2)),
    "a leaky relu" => y -> sum(ifelse.(y .> 1, y, 0.1 .* y).^3),
    "a condition inside" => y -> sum(((c, a, b) -> c ? a^3 : b^2).(MASK, y, y)),
    "a constant branch" => y -> sum(@. ifelse(y > 1, y^3, 0.0)),
    "an integer branch" => y -> ones(4)' * (v -> v > 1 ? v^3 : 0).(y),
    "a captured element" => y -> ones(4)' * (v -> v^3 * y[1]).(y),
    "a captured sum" => y -> (q = sum(y); ones(4)' * (v -> v^3 * q).(y)),
    "a symbol" => y -> sum(((s, v) -> v^3).(:a, y)),
    "nothings" => y -> sum(((c, v) -> v^3).([nothing, nothing, nothing, nothing], y)),
    "max with a number" => y -> sum(max.(y .- 1, 0).^3),
]
@testset "broadcasts: $name" for (name, f) in BRANCHES
    y = [0.1, 0.4, 1.3, 2.5]
    g(y) = DI.gradient(f, nested, y)
    @test agree(g(y), differences(f, y))
    H = reduce(hcat, [differences(y -> g(y)[i], y) for i in 1:4])
    @test agree(DI.hessian(f, nested, y), H)
    @test agree(only(Zygote.gradient(y -> sum(abs2, g(y)), y)), 2 * H * g(y))
end

@testset "a Dict as a context" begin
    f(y, d) = sum(d["a"] .* y.^2)
    penalty(a) = sum(DI.gradient(f, nested, [1.0, 2.0], Constant(Dict("a" => a))))
    @test_throws "an argument is a Dict" Zygote.gradient(penalty, [1.0, 2.0])
    @test penalty([1.0, 2.0]) == 10
    times(p) = sum(p .* DI.gradient(f, nested, [1.0, 2.0], Constant(Dict("a" => 2))))
    @test only(Zygote.gradient(times, [1.0, 1.0])) == [4, 8]
end
