# ReverseDiff as the outer AD: a form is one instruction of its tape.

using ADTypes: AutoReverseDiff, AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI, Constant
using NestedGradients: AutoNested, batched_jacobian, mixed_vjp, nested_gradient
using ReverseDiff: ReverseDiff
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())
const x, p = [0.3, -0.4, 0.7], [1.5, 0.5, -1.0]
f(x, p) = sum(p .* x.^3) * prod(x)

# name, function of x and p
const SCENARIOS = [
    "gradient" => (x, p) -> sum(abs2, DI.gradient(f, nested, x, Constant(p))),
    "value and gradient" =>
        (x, p) -> (
            (y, g) = DI.value_and_gradient(f, nested, x, Constant(p));
            y * sum(abs2, g)
        ),
    "a capture" => (x, p) -> sum(abs2, DI.gradient(x -> f(x, p), nested, x)),
    "captures of numbers" =>
        (x, p) -> (k = p[1]; sum(abs2, nested_gradient(x -> k * f(x, x), nested, x))),
    "an array of numbers" =>
        (x, p) -> sum(abs2, nested_gradient(f, nested, [x[1], x[2], p[1]], p)),
    "derivative" =>
        (x, p) -> DI.derivative((t, p) -> sum(p .* t.^2), nested, x[1], Constant(p)),
    "hvp" => (x, p) -> sum(abs2, only(DI.hvp(f, nested, x, (p,), Constant(p)))),
    "pullback" =>
        (x, p) -> sum(
            abs2,
            only(DI.pullback((x, p) -> p .* x.^2, nested, x, (p,), Constant(p))),
        ),
    "jacobian" =>
        (x, p) -> sum(abs2, DI.jacobian((x, p) -> p .* x.^2, nested, x, Constant(p))),
    "hessian" => (x, p) -> sum(abs2, DI.hessian(f, nested, x, Constant(p))),
    "products of all" => (x, p) -> sum(sum(abs2, c) for c in mixed_vjp(f, nested, x, p, p)),
    "parameters by name" =>
        (x, p) -> sum(
            abs2,
            nested_gradient(
                (x, ps) -> sum(ps.a .* x.^3) * ps.b,
                nested,
                x,
                (a = p, b = p[1], n = 2),
            ),
        ),
    "batched" =>
        (x, p) -> sum(
            abs2,
            batched_jacobian((x, p) -> p .* x.^2, nested, reshape(x, 3, 1), p),
        ),
    "constant there" =>
        (x, p) -> sum(p) * sum(DI.gradient(x -> sum(sin, x), nested, [0.1, 0.2])),
]

@testset "$name" for (name, outer) in SCENARIOS
    reference = differences(z -> outer(z...), (x, p))
    @test agree(ReverseDiff.gradient(outer, (x, p)), reference; rtol = 1.0e-6)
    @test agree(
        DI.gradient(x -> outer(x, p), AutoReverseDiff(), x),
        first(reference);
        rtol = 1.0e-6,
    )
end

@testset "a compiled tape runs with other values" begin
    outer(x, p) = sum(abs2, DI.gradient(f, nested, x, Constant(p)))
    tape = ReverseDiff.compile(ReverseDiff.GradientTape(outer, (x, p)))
    z = (x .+ 0.2, 2 .* p)
    @test agree(
        ReverseDiff.gradient!(map(zero, z), tape, z),
        differences(z -> outer(z...), z);
        rtol = 1.0e-6,
    )
end
