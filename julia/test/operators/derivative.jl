# derivative and second_derivative.

using ADTypes: AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI, Constant
using ForwardDiff: ForwardDiff
using NestedGradients: AutoNested
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())

# name, f(t, p), t, p
const SCENARIOS = [
    ("a number", (t, p) -> p * sin(t)^2, 0.7, 1.5),
    ("an array", (t, p) -> p .* t.^[2, 3], 0.7, [1.5, -0.5]),
    (
        "a matrix of parameters",
        (t, p) -> p.W * [t, t^2] .+ p.b,
        0.7,
        (W = [1.0 2.0; 3.0 4.0], b = [0.5, 1.0]),
    ),
]

total(y) = sum(abs2, y)

@testset "$name" for (name, f, t, p) in SCENARIOS
    y = f(t, p)
    component(g, i) = differences(t -> g(t)[i], t)
    expected = map(i -> component(t -> f(t, p), i), eachindex(y))
    first_derivative(t, p) = DI.derivative(f, nested, t, Constant(p))
    @test agree(first_derivative(t, p), y isa Number ? only(expected) : expected)
    @test agree(
        DI.value_and_derivative(f, nested, t, Constant(p)),
        (y, first_derivative(t, p)),
    )
    prep = DI.prepare_derivative(f, nested, t, Constant(p))
    @test agree(DI.derivative(f, prep, nested, t, Constant(p)), first_derivative(t, p))

    second = DI.second_derivative(f, nested, t, Constant(p))
    @test agree(
        second,
        y isa Number ?
            differences(t -> first_derivative(t, p), t) :
            map(i -> component(t -> first_derivative(t, p), i), eachindex(y)),
    )
    y0, d1, d2 = DI.value_derivative_and_second_derivative(f, nested, t, Constant(p))
    @test agree((y0, d1, d2), (y, first_derivative(t, p), second))

    for outer in (
            (t, p) -> total(first_derivative(t, p)),
            (t, p) -> total(DI.second_derivative(f, nested, t, Constant(p))),
        )
        @test agree(
            Zygote.gradient(outer, t, p),
            differences(z -> outer(z...), (t, p));
            rtol = 1.0e-6,
        )
        @test agree(
            ForwardDiff.derivative(t -> outer(t, p), t),
            differences(t -> outer(t, p), t);
            rtol = 1.0e-6,
        )
        captured(p) = outer(t, p)
        @test agree(
            DI.gradient(captured, nested, p),
            differences(captured, p);
            rtol = 1.0e-6,
        )
    end
end

@testset "in place" begin
    d = zeros(2)
    @test DI.derivative!(t -> t .* [1.0, 2.0], d, nested, 3.0) === d == [1.0, 2.0]
end

@testset "nothing depends on t" begin
    @test DI.derivative(t -> [1.0, 2.0], nested, 3.0) == [0.0, 0.0]
    @test DI.second_derivative(t -> t, nested, 3.0) == 0.0
end

@testset "float32" begin
    @test DI.derivative(t -> t^2, nested, 3.0f0) === 6.0f0
    @test DI.derivative(t -> t^2, nested, 3) === 6.0
end
