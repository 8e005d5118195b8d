# gradient and value_and_gradient, over backends and modifiers, and the gradient of what a function
# captured, which DifferentiationInterfaceTest does not check.

using ADTypes: AutoForwardDiff, AutoZygote
using ComponentArrays: ComponentArray, getdata
using DifferentiationInterface: DifferentiationInterface as DI, Constant
using ForwardDiff: ForwardDiff
using LinearAlgebra: dot, norm
using StaticArrays: SMatrix, SVector
using NestedGradients: AutoNested, mixed_vjp, nested_gradient, value_and_nested_gradient
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())

# name, f(x, p), x, p
const SCENARIOS = [
    (
        "the worked example",
        (x, p) -> sum(p)^2 / norm(x) + p[1] * x[2],
        [0.3, -1.2, 0.7],
        [0.5, 1.1, -0.3],
    ),
    ("a number", (x, p) -> p * x^3 + sin(x), 2.0, 5.0),
    ("a matrix", (x, p) -> sum(tanh.(p * x).^2), [0.3 -0.4; 1.0 0.2], [0.5 -1.0; 0.3 0.8]),
    (
        "a layer",
        (x, ps) -> sum(abs2, tanh.(ps.W * x .+ ps.b)),
        [0.3 -0.4; 1.0 0.2],
        (W = [0.5 -1.0; 0.3 0.8; 1.0 0.1], b = [0.1, 0.2, -0.3]),
    ),
    (
        "a nest as the point",
        (x, p) -> sum(x.a .* p) * x.b[1]^2,
        (a = [0.3, -0.4], b = (0.7,)),
        [1.0, 2.0],
    ),
]

# How a scenario may be put otherwise: f, x and p made from those above.
const MODIFIERS = [
    "as it is" => (f, x, p) -> (f, x, p),
    "ComponentArray parameters" =>
        (f, x, p) -> (f, x, p isa NamedTuple ? ComponentArray(p) : p),
    "batched" => (f, x, p) -> x isa Matrix ? (f, [x 2x -x], p) : (f, x, p),
    "a struct" => (f, x, p) -> (Base.splat(f) ∘ tuple, x, p),
]

weights(x::Number) = 0.7
weights(x::AbstractArray) = reshape(cos.(1.0:length(x)), size(x))
weights(x::Union{Tuple, NamedTuple}) = map(weights, x)
weigh(g::Number) = 0.7 * g + g^2
weigh(g::AbstractArray) = dot(weights(g), g) + sum(abs2, g)
weigh(g::Union{Tuple, NamedTuple}) = sum(map(weigh, values(g)))
values_of(p::ComponentArray) = getdata(p)
values_of(p) = p

plainly(p) = p
plainly(p::ComponentArray) = Vector(getdata(p))
like(q, p) = q
like(q, p::ComponentArray) = ComponentArray(q, getfield(p, :axes))

@testset "$name, $modifier" for (name, f0, x0, p0) in SCENARIOS, (
        modifier,
        modify,
    ) in MODIFIERS
    f, x, p = modify(f0, x0, p0)
    reference = differences(x -> f(x, p), x)
    # the gradient, and all its spellings
    @test agree(nested_gradient(f, nested, x, p), reference)
    @test agree(nested_gradient(f, AutoZygote(), x, p), reference)
    y, g = value_and_nested_gradient(f, nested, x, Constant(p))
    @test y == f(x, p) && agree(g, reference)
    @test agree(DI.gradient(f, nested, x, Constant(p)), reference)
    prep = DI.prepare_gradient(f, nested, x, Constant(p))
    @test agree(DI.gradient(f, prep, nested, x, Constant(p)), reference)
    @test agree(
        DI.value_and_gradient(f, prep, nested, x, Constant(p)),
        (f(x, p), reference),
    )

    # differentiated again: in x, in the context, and in what was captured
    outer(x, p) = weigh(DI.gradient(f, nested, x, Constant(p)))
    prepared(x, p) = weigh(DI.gradient(f, prep, nested, x, Constant(p)))
    valued(x, p) = sum(abs2, first(DI.value_and_gradient(f, nested, x, Constant(p)))) +
        weigh(last(DI.value_and_gradient(f, nested, x, Constant(p))))
    captured(x, p) = weigh(DI.gradient(x -> f(x, p), nested, x))
    for same in ((outer, prepared, captured), (valued,))
        expected = (
            differences(x -> first(same)(x, p), x),
            differences(q -> first(same)(x, like(q, p)), plainly(p)),
        )
        for second in same
            dx, dp = Zygote.gradient(second, x, p)
            @test agree(dx, expected[1]; rtol = 1.0e-6)
            @test agree(values_of(dp), values_of(expected[2]); rtol = 1.0e-6)
        end
    end

    # the product alone, in one pass
    v = weights(x)
    pulled(x, p) = sum(flatten(v) .* flatten(nested_gradient(f, nested, x, p)))
    hv, hp = mixed_vjp(f, nested, x, v, p)
    @test agree(hv, differences(x -> pulled(x, p), x); rtol = 1.0e-6)
    @test agree(
        values_of(hp),
        values_of(differences(q -> pulled(x, like(q, p)), plainly(p)));
        rtol = 1.0e-6,
    )
end
@testset "float32" begin
    f(x, ps) = sum(abs2, tanh.(ps.W * x .+ ps.b))
    x, ps = Float32[0.3 -0.4; 1.0 0.2],
        (W = Float32[0.5 -1.0; 0.3 0.8; 1.0 0.1], b = Float32[0.1, 0.2, -0.3])
    @test DI.gradient(f, nested, x, Constant(ps)) isa Matrix{Float32}
    dx, dps = Zygote.gradient(
        (x, ps) -> sum(abs2, DI.gradient(f, nested, x, Constant(ps))),
        x,
        ps,
    )
    @test dx isa Matrix{Float32} && dps.W isa Matrix{Float32} && dps.b isa Vector{Float32}
end

# name, x, f
@testset "kinds of points: $name" for (name, x, f) in [
        ("integers", [1, 2], (x, p) -> sum(p .* x.^3)),
        ("an integer", 2, (x, p) -> sum(p) * x^3),
        ("rationals", [1 // 2, 1 // 3], (x, p) -> sum(p .* x.^3)),
        ("a view", view([0.1, 0.3, -0.5], 2:3), (x, p) -> sum(p .* x.^3)),
        ("a row", [0.3, -0.5]', (x, p) -> sum(x * p)^3),
        ("a transposed matrix", transpose([0.3 0.1; -0.5 0.2]), (x, p) -> sum(abs2, x * p)),
        ("a reshaped array", reshape(0.1:0.1:0.4, 2, 2), (x, p) -> sum((x * p).^3)),
        ("a static vector", SVector(0.3, -0.5), (x, p) -> sum(p .* x.^3)),
        ("a static matrix", SMatrix{2, 2}(0.3, 0.1, -0.5, 0.2), (x, p) -> sum(abs2, x * p)),
        ("a tuple", (0.3, -0.5), (x, p) -> p[1] * x[1]^2 * x[2] + p[2]),
        ("nothing in it", Float64[], (x, p) -> sum(p) + sum(x)),
    ]
    p = [1.5, 0.5]
    plain(x::AbstractArray) = Array(float(x))
    plain(x) = float.(x)
    expected = differences(x -> f(x, p), plain(x))
    shown(g::AbstractArray) = Array(g)
    shown(g) = g
    @test agree(shown(DI.gradient(f, nested, x, Constant(p))), expected)
    total(g) = sum(abs2, g)
    outer(p) = total(DI.gradient(f, nested, x, Constant(p)))
    @test agree(only(Zygote.gradient(outer, p)), differences(outer, p); rtol = 1.0e-6)
end

@testset "every AD outside" begin
    f(x, p) = sum(p .* x.^3)
    x, p = [0.3, -0.4], [1.5, 0.5]
    outer(p) = sum(abs2, DI.gradient(f, nested, x, Constant(p)))
    reference = differences(outer, p)
    @test agree(only(Zygote.gradient(outer, p)), reference)
    @test agree(ForwardDiff.gradient(outer, p), reference)
    @test agree(DI.gradient(outer, AutoForwardDiff(), p), reference)
    @test agree(DI.gradient(outer, AutoZygote(), p), reference)
    @test agree(DI.gradient(outer, nested, p), reference)
end

@testset "third order" begin
    f(x, p) = sum(p .* sin.(x) .* x)
    first_order(x, p) = sum(abs2, DI.gradient(f, nested, x, Constant(p)))
    second_order(x, p) = sum(abs2, DI.gradient(first_order, nested, x, Constant(p)))
    x, p = [0.3, -0.4], [1.5, 0.5]
    @test agree(
        DI.gradient(second_order, nested, x, Constant(p)),
        differences(x -> second_order(x, p), x);
        rtol = 1.0e-6,
    )
    for outer in (
            Zygote.gradient,
            (f, z...) -> map(
                i -> ForwardDiff.gradient(a -> f(Base.setindex(z, a, i)...), z[i]),
                (1, 2),
            ),
        )
        @test agree(
            outer(second_order, x, p),
            differences(z -> second_order(z...), (x, p));
            rtol = 1.0e-6,
        )
    end
end

@testset "prepared for one signature" begin
    f(x) = sum(abs2, x)
    prep = DI.prepare_gradient(f, nested, [1.0])
    @test_throws DI.PreparationMismatchError DI.gradient(f, prep, nested, Float32[1.0])
    loose = DI.prepare_gradient(f, nested, [1.0]; strict = Val(false))
    @test DI.gradient(f, loose, nested, Float32[1.0]) == Float32[2.0]
end

# A preparation holds nothing but the signature: one serves all threads. Run with two or more.
@testset "one preparation on $(Threads.nthreads()) threads" begin
    f(x, p) = sum(p .* tanh.(x).^2)
    p = [1.5, 0.5, -1.0]
    points = [sin.(i .* [1.0, 2.0, 3.0]) for i in 1:64]
    prep = DI.prepare_gradient(f, nested, first(points), Constant(p))
    hvp_prep = DI.prepare_hvp(f, nested, first(points), (p,), Constant(p))
    each(x) = (
        DI.gradient(f, prep, nested, x, Constant(p)),
        only(DI.hvp(f, hvp_prep, nested, x, (p,), Constant(p))),
        only(Zygote.gradient(
            x -> sum(abs2, DI.gradient(f, prep, nested, x, Constant(p))),
            x,
        )),
    )
    alone = map(each, points)
    together = fetch.([Threads.@spawn each(x) for x in points])
    @test together == alone
    @test agree(first(first(alone)), differences(x -> f(x, p), first(points)))
end

@testset "in place" begin
    f(x) = sum(abs2, x)
    g = zeros(2)
    @test DI.gradient!(f, g, nested, [1.0, 2.0]) === g && g == [2.0, 4.0]
    y, h = DI.value_and_gradient!(f, g, nested, [1.0, 3.0])
    @test y == 10.0 && h === g == [2.0, 6.0]
    @test_throws "cannot be differentiated in reverse mode" Zygote.gradient(
        x -> sum(DI.gradient!(f, zero(x), nested, x)),
        [1.0, 2.0],
    )
end

@testset "bad input" begin
    @test_throws "real scalar" DI.gradient(x -> 2x, nested, [1.0, 2.0])
    @test_throws "Cache" DI.gradient(
        (x, c) -> sum(copyto!(c, x)),
        nested,
        [1.0],
        DI.Cache([0.0]),
    )
    @test_throws "returns its result" DI.jacobian((y, x) -> (y .= x), [0.0], nested, [1.0])
end

@testset "nothing depends on x" begin
    @test DI.gradient(x -> 3.0, nested, [1.0, 2.0]) == [0.0, 0.0]
    @test nested_gradient((x, p) -> p, nested, 1.0, 2.0) === 0.0
end
