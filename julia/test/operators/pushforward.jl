# pushforward.

using ADTypes: AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI, Constant
using NestedGradients: AutoNested
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())

# name, f(x, p), x, directions, p
const SCENARIOS = [
    (
        "a layer",
        (x, p) -> tanh.(p * x),
        [0.3, -0.4],
        ([1.0, 0.5], [0.2, -0.3]),
        [0.5 -1.0; 0.3 0.8; 1.0 0.1],
    ),
    ("a number", (x, p) -> p * sin(x), 0.4, (1.0, 2.0), 1.5),
    ("a scalar result", (x, p) -> sum(p .* x.^3), [0.3, -0.4], ([1.0, 0.5],), [1.5, 0.5]),
]

@testset "$name" for (name, f, x, tx, p) in SCENARIOS
    y = f(x, p)
    along(t, i) = differences(s -> f(x .+ s .* t, p)[i], 0.0)
    expected = map(
        t -> y isa Number ? along(t, 1) : map(i -> along(t, i), eachindex(y)),
        tx,
    )
    @test agree(DI.pushforward(f, nested, x, tx, Constant(p)), expected)
    @test agree(DI.value_and_pushforward(f, nested, x, tx, Constant(p)), (y, expected))
    prep = DI.prepare_pushforward(f, nested, x, tx, Constant(p))
    @test agree(DI.pushforward(f, prep, nested, x, tx, Constant(p)), expected)

    # in the point, the direction, the context and a capture
    outer(x, t, p) = sum(abs2, only(DI.pushforward(f, nested, x, (t,), Constant(p))))
    z = (x, first(tx), p)
    reference = differences(z -> outer(z...), z)
    @test agree(Zygote.gradient(outer, z...), reference; rtol = 1.0e-6)
    captured(p) = sum(abs2, only(DI.pushforward(x -> f(x, p), nested, x, (first(tx),))))
    @test agree(only(Zygote.gradient(captured, p)), last(reference); rtol = 1.0e-6)
    @test agree(DI.gradient(captured, nested, p), last(reference); rtol = 1.0e-6)
end
