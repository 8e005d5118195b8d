# Every public report of nested differentiation that went wrong elsewhere, with its right value, named by
# where it was reported. facts: "theirs" is what the report saw.

using ADTypes: AutoZygote
using DifferentiationInterface: DifferentiationInterface as DI
using ForwardDiff: ForwardDiff
using LinearAlgebra: dot
using Lux: Lux, BatchNorm, Chain, Dense, StatefulLuxLayer, gelu
using NestedGradients: AutoNested, batched_jacobian, nested_gradient, unwrap
using Random: Xoshiro
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())

float64(x) = Lux.fmap(a -> a isa AbstractArray{<:AbstractFloat} ? Float64.(a) : a, x)
function model_of(layer)
    ps, st = Lux.setup(Xoshiro(1), layer)
    return float64(ps), float64(Lux.testmode(st))
end

@testset "Zygote#1218: a closure under an inner derivative" begin
    y = [1.0, 2.0, 3.0]
    @test only(Zygote.gradient(y -> DI.derivative(x -> x * sum(y), nested, 0.1), y)) ==
        ones(3)
end

@testset "Zygote#1268: a bias added after a Jacobian product" begin
    x, bias = [0.1, 0.2, 0.3], [1.0, 2.0, 3.0]
    f(bias) = sum(DI.jacobian(x -> x.^3, nested, x) * x .+ bias)
    @test only(Zygote.gradient(f, bias)) == ones(3)
end

@testset "Zygote#1264: a bias in a NamedTuple added after a Hessian product" begin
    x, ps = [0.1, 0.2, 0.3], (bias = [1.0, 2.0, 3.0],)
    f(ps) = sum(DI.hessian(x -> sum(x.^3), nested, x) * x .+ ps.bias)
    @test only(Zygote.gradient(f, ps)).bias == ones(3)
end

const H = 3
const beta = 0.7

@testset "Zygote#1013: a second derivative with a global factor" begin
    @test only(Zygote.gradient(x -> DI.derivative(x -> x^2 * H, nested, x), 1.0)) == 6
    @test only(Zygote.gradient(x -> nested_gradient(x -> x^2 * H, nested, x), 1.0)) == 6
end

@testset "Zygote#1271: a second-order gradient with a global factor" begin
    @test only(Zygote.gradient(
        x -> sum(nested_gradient(x -> sum(x.^2 .* beta), nested, x)),
        [1.0, 2.0],
    )) ≈
        [2beta, 2beta]
end

@testset "Zygote#1111: a number in a Ref in a Ref" begin
    x = Ref(Ref(1.0 + im))
    skeleton, params = unwrap(() -> abs2(x[].x) + 7real(x[].x))
    gradient = only(Zygote.gradient(skeleton, params))
    @test gradient.x.x.x == 9 + 2im
end

@testset "Lux#630: a linear layer" begin
    layer = Dense(3 => 3)
    ps, st = model_of(layer)
    x, v = [0.1, 0.2, 0.3], [1.0, -1.0, 2.0]
    inner(x, v) = DI.gradient(z -> dot(v, first(layer(z, ps, st))), nested, x)
    outer(x, v) = sum(abs2, inner(x, v))
    dx, dv = Zygote.gradient(outer, x, v)
    @test agree(dx, zeros(3))
    @test agree(dv, differences(v -> outer(x, v), v)) && !iszero(dv)
    # the form that Lux itself knows, composed
    smodel = StatefulLuxLayer{true}(layer, ps, st)
    composed(v) = sum(abs2, DI.gradient((z -> dot(v, z)) ∘ smodel, nested, x))
    @test agree(only(Zygote.gradient(composed, v)), dv)
end

@testset "Lux#743: an inner gradient beside a direct evaluation" begin
    layer = Chain(Dense(2 => 4, tanh), Dense(4 => 2))
    ps, st = model_of(layer)
    x = [0.1 0.2; -0.3 0.4]
    function loss(ps)
        smodel = StatefulLuxLayer{true}(layer, ps, st)
        return sum(abs2, DI.gradient(sum ∘ smodel, nested, x)) + sum(abs2, smodel(x))
    end
    @test agree(only(Zygote.gradient(loss, ps)), differences(loss, ps); rtol = 1.0e-6)
end

@testset "Lux#614: a pullback over two Jacobians of a gelu layer" begin
    layer = Dense(5 => 5, gelu)
    ps, st = model_of(layer)
    x, y = [0.1, -0.2, 0.3, 0.4, -0.5], [0.5, 0.1, -0.7, 0.2, 0.3]
    f(ps) = z -> first(layer(z, ps, st))
    loss(ps, x, y) = sum(DI.jacobian(f(ps), nested, x) * DI.jacobian(f(ps), nested, y))
    @test agree(
        Zygote.gradient(loss, ps, x, y),
        differences(z -> loss(z...), (ps, x, y));
        rtol = 1.0e-6,
    )
end

@testset "Lux#604: a Jacobian through BatchNorm" begin
    layer = Chain(Dense(2 => 3), BatchNorm(3), Dense(3 => 2, tanh))
    ps, st = model_of(layer)
    x = [0.1 -0.3 0.7; 0.2 0.4 -0.6]
    loss(x, ps) = sum(
        abs2,
        batched_jacobian((x, ps) -> first(layer(x, ps, st)), nested, x, ps),
    )
    @test agree(
        Zygote.gradient(loss, x, ps),
        differences(z -> loss(z...), (x, ps));
        rtol = 1.0e-6,
    )
end

@testset "Lux#610: a Jacobian in the parameters" begin
    layer = Dense(2 => 2, tanh)
    ps, st = model_of(layer)
    x = [0.1, -0.3]
    flat(p) = first(layer(x, (weight = reshape(p[1:4], 2, 2), bias = p[5:6]), st))
    loss(p) = sum(abs2, DI.jacobian(flat, nested, p))
    p = [vec(ps.weight); ps.bias .+ 0.1]
    @test agree(only(Zygote.gradient(loss, p)), differences(loss, p); rtol = 1.0e-6)
end

@testset "Zygote#1262: the gradient penalty of a dense critic" begin
    layer = Chain(Dense(2 => 4, tanh), Dense(4 => 1))
    ps, st = model_of(layer)
    x = [0.1 -0.3 0.7; 0.2 0.4 -0.6]
    function penalty(ps)
        g = DI.gradient(x -> sum(first(layer(x, ps, st))), nested, x)
        return sum((sqrt.(sum(abs2, g; dims = 1)) .- 1).^2)
    end
    @test agree(only(Zygote.gradient(penalty, ps)), differences(penalty, ps); rtol = 1.0e-6)
end

@testset "Flux#1966: a physics-informed network" begin
    layer = Chain(Dense(1 => 4, tanh), Dense(4 => 1))
    ps, st = model_of(layer)
    times = [0.1, 0.4, 0.8]
    u(ps) = t -> only(first(layer([t], ps, st)))
    residual(ps) = sum(
        t -> abs2(
            DI.second_derivative(u(ps), nested, t) +
                DI.derivative(u(ps), nested, t) +
                u(ps)(t),
        ),
        times,
    )
    @test agree(
        only(Zygote.gradient(residual, ps)),
        differences(residual, ps);
        rtol = 1.0e-6,
    )
end

@testset "NeuralPDE#725, SciMLSensitivity#772: gradients with respect to f" begin
    struct_of(p) = Base.Fix2((u, p) -> p[1] .* u.^2 .+ p[2], p)
    loss(p) = sum(abs2, DI.jacobian(struct_of(p), nested, [0.3, 0.5]))
    p = [1.5, 0.2]
    @test agree(only(Zygote.gradient(loss, p)), differences(loss, p))
    # the tangent of the function itself
    outer(f) = sum(abs2, DI.gradient(sum ∘ f, nested, [0.3, 0.5]))
    df = only(Zygote.gradient(outer, struct_of(p)))
    @test agree(df.x, differences(p -> outer(struct_of(p)), p))
end

@testset "a variable that is assigned twice (a Box)" begin
    function outer(w)
        w = 2 .* w
        f(x) = sum(w .* x.^3)
        g = sum(abs2, DI.gradient(f, nested, [0.3, 0.5]))
        w = w .+ 0
        return g
    end
    w = [1.0, 2.0]
    @test agree(only(Zygote.gradient(outer, w)), differences(outer, w))
end
