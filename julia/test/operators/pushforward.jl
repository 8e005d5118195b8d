# pushforward.

using ADTypes: AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI
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

const OPERATORS = (DI.pushforward, DI.value_and_pushforward, DI.prepare_pushforward)

@testset "$name" for (name, f, x, tx, p) in SCENARIOS
    y = f(x, p)
    along(t, i) = differences(s -> f(x .+ s .* t, p)[i], 0.0)
    expected = map(
        t -> y isa Number ? along(t, 1) : map(i -> along(t, i), eachindex(y)),
        tx,
    )
    checkproducts(OPERATORS, nested, f, x, tx, p, y, expected)
end
