# pullback.

using ADTypes: AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI, Constant
using LinearAlgebra: dot
using NestedGradients: AutoNested
using Test
using Zygote: Zygote

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

@testset "$name" for (name, f, x, ty, p) in SCENARIOS
    y = f(x, p)
    expected = map(c -> differences(x -> dot(c, f(x, p)), x), ty)
    @test agree(DI.pullback(f, nested, x, ty, Constant(p)), expected)
    @test agree(DI.value_and_pullback(f, nested, x, ty, Constant(p)), (y, expected))
    prep = DI.prepare_pullback(f, nested, x, ty, Constant(p))
    @test agree(DI.pullback(f, prep, nested, x, ty, Constant(p)), expected)

    # in the point, the covector (which Lux's own rule drops), the context and a capture
    outer(x, c, p) = sum(abs2, only(DI.pullback(f, nested, x, (c,), Constant(p))))
    z = (x, first(ty), p)
    reference = differences(z -> outer(z...), z)
    @test agree(Zygote.gradient(outer, z...), reference; rtol = 1.0e-6)
    captured(p) = sum(abs2, only(DI.pullback(x -> f(x, p), nested, x, (first(ty),))))
    @test agree(only(Zygote.gradient(captured, p)), last(reference); rtol = 1.0e-6)
    @test agree(DI.gradient(captured, nested, p), last(reference); rtol = 1.0e-6)
end
