# pullback.

using ADTypes: AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI
using LinearAlgebra: dot
using NestedGradients: AutoNested
using Test
using Zygote: Zygote # the reverse pass

const nested = AutoNested(AutoZygote())

# name, f(x, p), x, covectors, p
const SCENARIOS = [
    (
        "a layer",
        (x, p) -> tanh.(p * x),
        [0.3, -0.4],
        ([1.0, 0.5, -0.2], [0.2, -0.3, 0.7]),
        [0.5 -1.0; 0.3 0.8; 1.0 0.1],
    ),
    ("a number", (x, p) -> p * sin(x), 0.4, (1.0, 2.0), 1.5),
    ("from a number", (x, p) -> p .* x.^[2, 3], 0.4, ([1.0, 2.0],), [1.5, 0.5]),
]

const OPERATORS = (DI.pullback, DI.value_and_pullback, DI.prepare_pullback)

# In the covector too, which Lux's own rule drops.
@testset "$name" for (name, f, x, ty, p) in SCENARIOS
    expected = map(c -> differences(x -> dot(c, f(x, p)), x), ty)
    checkproducts(OPERATORS, nested, f, x, ty, p, f(x, p), expected)
end
