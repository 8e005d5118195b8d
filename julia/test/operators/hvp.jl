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

@testset "$name" for (name, f, x, tx, p) in SCENARIOS
    gradient(x) = DI.gradient(f, nested, x, Constant(p))
    @test agree(gradient(x), differences(x -> f(x, p), x))
    along(t) = reshape(
        map(i -> differences(s -> gradient(x .+ s .* t)[i], 0.0), eachindex(x)),
        size(x),
    )
    expected = map(along, tx)
    @test agree(DI.hvp(f, nested, x, tx, Constant(p)), expected)
    @test agree(DI.gradient_and_hvp(f, nested, x, tx, Constant(p)), (gradient(x), expected))
    prep = DI.prepare_hvp(f, nested, x, tx, Constant(p))
    @test agree(DI.hvp(f, prep, nested, x, tx, Constant(p)), expected)
    out = map(zero, tx)
    @test DI.hvp!(f, out, nested, x, tx, Constant(p)) === out && agree(out, expected)

    hessian = DI.hessian(f, nested, x, Constant(p))
    @test hessian ≈ hessian'
    @test agree(hessian * vec(first(tx)), vec(first(expected)))
    y, g, h = DI.value_gradient_and_hessian(f, nested, x, Constant(p))
    @test agree((y, g, h), (f(x, p), gradient(x), hessian))

    # in the point, the direction, the context and a capture
    outer(x, t, p) = sum(abs2, only(DI.hvp(f, nested, x, (t,), Constant(p))))
    z = (x, first(tx), p)
    reference = differences(z -> outer(z...), z)
    @test agree(Zygote.gradient(outer, z...), reference; rtol = 1.0e-6)
    captured(p) = sum(abs2, only(DI.hvp(x -> f(x, p), nested, x, (first(tx),))))
    @test agree(only(Zygote.gradient(captured, p)), last(reference); rtol = 1.0e-6)
    @test agree(DI.gradient(captured, nested, p), last(reference); rtol = 1.0e-6)

    # DI's own second order over ours
    mixed = SecondOrder(AutoForwardDiff(), nested)
    @test agree(DI.hvp(f, mixed, x, tx, Constant(p)), expected)
end
