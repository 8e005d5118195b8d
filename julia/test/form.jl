# The form against differences of the form one order lower, its symmetry, its rules and its costs.

using ADTypes: AutoForwardDiff, AutoReverseDiff, AutoZygote
using ChainRulesCore: ChainRulesCore
using ForwardDiff: ForwardDiff
using LinearAlgebra: dot, norm
using NestedGradients: NestedGradients, Unit, form
using ReverseDiff: ReverseDiff
using Test
using Zygote: Zygote

const backend = AutoZygote()

# name, h, arguments, directions in them, covector of the result
const FUNCTIONS = [
    (
        "the worked example",
        (x, p) -> sum(p)^2 / norm(x) + p[1] * x[2],
        ([0.3, -1.2, 0.7], [0.5, 1.1]),
        (([1.0, 0.2, -0.3], [0.4, -0.6]), ([0.1, -0.5, 0.9], nothing)),
        1.0,
    ),
    ("numbers", (x, p) -> p * x^3 + sin(x), (2.0, 5.0), ((1.0, 0.5), (nothing, 2.0)), 1.0),
    (
        "a layer",
        (x, ps) -> sum(abs2, tanh.(ps.W * x .+ ps.b)),
        ([0.3 -0.4; 1.0 0.2], (W = [0.5 -1.0; 0.3 0.8; 1.0 0.1], b = [0.1, 0.2, -0.3])),
        (
            ([1.0 0.0; 0.5 -0.5], nothing),
            (nothing, (W = [0.1 0.2; 0.3 0.4; 0.5 0.6], b = nothing)),
        ),
        1.0,
    ),
    (
        "an array",
        (x, p) -> p .* exp.(x) .+ x.^2,
        ([0.3, -0.4], [1.5, 0.5]),
        (([1.0, 0.5], nothing), ([0.2, 0.3], [1.0, -1.0])),
        [0.7, -0.2],
    ),
    (
        "a nest",
        (x, n) -> (a = n * x[1] * x[2], b = (x.^3, "constant")),
        ([0.3, -0.4], 3),
        (([1.0, 0.5], nothing), ([0.2, 0.3], nothing)),
        (a = 0.5, b = ([1.0, 2.0], nothing)),
    ),
    (
        "scalar code",
        function (x, p)
            s = zero(eltype(x))
            for i in eachindex(x)
                s = i == 2 ? s * p[1] : s + x[i] / (1 + p[2] * x[i]^2)
            end
            return s
        end,
        ([0.3, -0.4, 0.9], [1.5, 0.5]),
        (([1.0, 0.5, 0.1], [0.3, 0.4]), ([0.2, 0.3, -1.0], [1.0, -1.0])),
        1.0,
    ),
]

# the pairing of two nests, a missing part being zero
filled(a, b) = a === nothing || b === nothing ? 0.0 : paired(a, b)
paired(a::Union{Number, AbstractArray}, b) = dot(a, b)
paired(a, b) = a isa AbstractString ? 0.0 : sum(map(filled, values(a), values(b)))
moved(z, s, t) = map((a, b) -> step(a, b, t), z, s)
step(a, b, t) = b === nothing ? a : stepped(a, b, t)
stepped(a::Union{Number, AbstractArray}, b, t) = a .+ t .* b
stepped(a, b, t) = map((x, y) -> step(x, y, t), a, b)

# The derivative at 0 of a function of one number, as `differences` takes it.
slope(f; h = 1.0e-3) = (8 * (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h

@testset "$name" for (name, h, z, (u, v), c) in FUNCTIONS
    value(z) = filled(c, h(z...))
    # first order: in reverse and along a direction
    gradient = form(backend, h, z, (c, nothing), Val(1))
    @test agree(gradient, differences(value, z))
    @test filled(c, form(backend, h, z, (nothing, u), Val(0))) ≈
        slope(t -> value(moved(z, u, t))) rtol = 1.0e-8
    # every further order from the one before
    pulled(z) = filled(form(backend, h, z, (c, nothing), Val(1)), u)
    second = form(backend, h, z, (c, u, nothing), Val(2))
    @test agree(second, differences(pulled, z))
    pulled_twice(z) = filled(form(backend, h, z, (c, u, nothing), Val(2)), v)
    third = form(backend, h, z, (c, u, v, nothing), Val(3))
    @test agree(third, differences(pulled_twice, z); rtol = 1.0e-6)
    # symmetric, whichever slot is open
    @test agree(form(backend, h, z, (c, nothing, u), Val(1)), second; rtol = 1.0e-12)
    @test filled(second, v) ≈
        filled(form(backend, h, z, (c, v, nothing), Val(2)), u) rtol = 1.0e-12
    @test filled(c, form(backend, h, z, (nothing, u, v), Val(0))) ≈
        filled(second, v) rtol = 1.0e-10
    @test filled(c, form(backend, h, z, (nothing, v, u, u), Val(0))) ≈
        filled(third, u) rtol = 1.0e-10
    # the rules, through Zygote, with respect to everything
    along(z, c, u) = filled(form(backend, h, z, (c, u, nothing), Val(2)), v)
    @test agree(
        Zygote.gradient(along, z, c, u),
        differences(a -> along(a...), (z, c, u));
        rtol = 1.0e-6,
    )
    forward(z, u) = filled(c, form(backend, h, z, (nothing, u), Val(0)))
    @test agree(
        Zygote.gradient(forward, z, u),
        differences(a -> forward(a...), (z, u));
        rtol = 1.0e-6,
    )
end

refill32(x::AbstractFloat) = Float32(x)
refill32(x::AbstractArray{<:AbstractFloat}) = Float32.(x)
refill32(x::Union{Tuple, NamedTuple}) = map(refill32, x)
refill32(x) = x
eltypes(x::Number) = [typeof(x)]
eltypes(x::AbstractArray) = [eltype(x)]
eltypes(::Nothing) = []
eltypes(x::Union{Tuple, NamedTuple}) = reduce(vcat, map(eltypes, values(x)); init = [])

@testset "float32 stays float32" begin
    for (name, h, z, (u, v), c) in FUNCTIONS
        single(x) = refill32(x)
        cotangents = form(backend, h, single(z), (single(c), single(u), nothing), Val(2))
        @test agree(
            cotangents,
            form(backend, h, z, (c, u, nothing), Val(2));
            rtol = 1.0e-4,
            atol = 1.0e-5,
        )
        @test all(T -> T === Float32, eltypes(cotangents))
    end
    # a float64 direction or covector does not change the type either
    cotangents = form(
        backend,
        (x, p) -> sum(p .* x.^2),
        (Float32[1, 2], Float32[3, 4]),
        (1.0, ([1.0, 0.0], nothing), nothing),
        Val(2),
    )
    @test eltypes(cotangents) == [Float32, Float32]
end
@testset "zero stays nothing" begin
    h(x, p) = sum(x .* p.a)
    z = ([1.0, 2.0], (a = [3.0, 4.0], b = [5.0], n = 2, label = "x"))
    dx, dp = form(backend, h, z, (1.0, nothing), Val(1))
    @test dx == [3.0, 4.0] && dp.a == [1.0, 2.0] && dp.b === dp.n === dp.label === nothing
    # linear in x: no second derivative there
    dx, dp = form(backend, h, z, (1.0, ([1.0, 1.0], nothing), nothing), Val(2))
    @test dx === nothing || iszero(dx)
    @test dp.a == [1.0, 1.0]
    @test form(backend, h, z, (1.0, nothing, nothing), Val(2)) === (nothing, nothing)
    @test form(backend, h, z, (nothing, nothing), Val(1)) === (nothing, nothing)
    @test form(backend, h, z, (nothing, nothing), Val(0)) === nothing
    @test form(backend, h, z, (1.0, nothing), Val(1); wanted = (true, false))[2] === nothing
end

const evaluations, passes = Ref(0), Ref(0)
counted(x) = (evaluations[] += 1; x)
function ChainRulesCore.rrule(::typeof(counted), x)
    evaluations[] += 1
    return x, dx -> (passes[] += 1; (ChainRulesCore.NoTangent(), dx))
end

@testset "one evaluation, one reverse pass" begin
    h(x, p) = sum(abs2, counted(p .* x))
    z, u = ([1.0, 2.0], [3.0, 4.0]), ([1.0, 0.5], [0.2, 0.3])
    for n in 0:3
        evaluations[] = passes[] = 0
        form(backend, h, z, (1.0, ntuple(_ -> u, n)..., nothing), Val(n + 1))
        @test (evaluations[], passes[]) == (1, 1)
        evaluations[] = passes[] = 0
        form(backend, h, z, (nothing, ntuple(_ -> u, n)...), Val(0))
        @test (evaluations[], passes[]) == (1, 0)
    end
    # the pullback of an inner gradient is one pass more, the parameters included
    evaluations[] = passes[] = 0
    Zygote.gradient(
        (x, p) -> sum(abs2, NestedGradients.nested_gradient(h, backend, x, p)),
        z...,
    )
    @test (evaluations[], passes[]) == (2, 2)
    # with the value beside it too
    evaluations[] = passes[] = 0
    Zygote.gradient(z...) do x, p
        y, g = NestedGradients.value_and_nested_gradient(h, backend, x, p)
        return y * sum(abs2, g)
    end
    @test (evaluations[], passes[]) == (2, 2)
end

@testset "what the function captured" begin
    w = [0.5, 2.0]
    along(w) = sum(
        abs2,
        form(backend, x -> sum(w .* x.^3), ([1.0, 2.0],), (1.0, nothing), Val(1))[1],
    )
    @test agree(only(Zygote.gradient(along, w)), differences(along, w))
    twice(w) = sum(only(Zygote.gradient(along, w)).^2)
    @test agree(only(Zygote.gradient(twice, w)), differences(twice, w))
end

@testset "other backends run the reverse pass: $(nameof(typeof(other)))" for other in (
        AutoForwardDiff(),
        AutoReverseDiff(),
    )
    for (name, h, z, (u, v), c) in FUNCTIONS
        name == "a nest" && continue
        @test agree(
            form(other, h, z, (c, nothing), Val(1)),
            form(backend, h, z, (c, nothing), Val(1)),
        )
        other isa AutoReverseDiff && continue # tracked dual numbers: not supported there
        @test agree(
            form(other, h, z, (c, u, nothing), Val(2)),
            form(backend, h, z, (c, u, nothing), Val(2)),
        )
    end
end

@testset "forward mode outside" begin
    h(x, p) = sum(p .* x.^3)
    gradient(t) = sum(form(
        backend,
        h,
        ([1.0 + t, 2.0 * t], [t, t^2]),
        (1.0, nothing),
        Val(1),
    )[1])
    @test ForwardDiff.derivative(gradient, 0.7) ≈
        slope(t -> gradient(0.7 + t)) rtol = 1.0e-8
    second(t) = ForwardDiff.derivative(gradient, t)
    @test ForwardDiff.derivative(second, 0.7) ≈ slope(t -> second(0.7 + t)) rtol = 1.0e-8
end

@testset "bad slots are errors that say so" begin
    @test_throws "only slots 0 to 1" form(backend, sum, ([1.0],), (1.0, nothing), Val(2))
    @test_throws "slot 1 must be" form(
        backend,
        sum,
        ([1.0],),
        (1.0, [1.0], nothing),
        Val(2),
    )
    @test_throws "must agree" form(
        backend,
        sum,
        ([1.0, 2.0],),
        (1.0, ([1.0],), nothing),
        Val(2),
    )
    @test_throws "real scalar" form(
        backend,
        x -> x,
        ([1.0, 2.0],),
        (Unit(), nothing),
        Val(1),
    )
    @test_throws "does not fit" form(
        backend,
        sum,
        ([1.0],),
        (1.0, ((1.0,),), nothing),
        Val(2),
    )
end
