using ADTypes: AutoZygote
using NestedGradients: NestedGradients, Harvested, form, sow
using Test
using Zygote: Zygote

f(x, p) = sum(sin.(sow(p .* x.^3, :cube)) .* sow(x, :again)) + 0 * sum(sow(x.^2, :spare))
h = Harvested(f)
x, p = [0.3, -0.8], 1.5
eps0 = (cube = zeros(2), again = zeros(2), spare = zeros(2))

"`f` with perturbations written out."
g(x, p, e) = sum(sin.(p .* x.^3 .+ e.cube) .* (x .+ e.again))

@testset "values" begin
    y, values = h(x, p, nothing)
    @test y == f(x, p)
    @test values == (cube = p .* x.^3, again = x, spare = x.^2)
    @test h(x, p, eps0) == (y, values)
end

@testset "cotangents are derivatives in eps" begin
    _, _, deps = Zygote.gradient((x, p, e) -> first(h(x, p, e)), x, p, eps0)
    for name in (:cube, :again)
        along(e) = g(x, p, merge(eps0, NamedTuple{(name,)}((e,))))
        @test agree(deps[name], differences(along, zeros(2)))
    end
    @test deps.spare == zeros(2)
end

@testset "tangents, with those of eps" begin
    s = ([1.0, 2.0], 0.5, (cube = [0.1, 0.2], again = nothing, spare = nothing))
    y, values = form(nothing, h, (x, p, eps0), (nothing, s), Val(0))
    dcube = 0.5 .* x.^3 .+ 3 * p .* x.^2 .* s[1] .+ [0.1, 0.2]
    @test values.cube ≈ dcube
    @test values.again ≈ s[1]
    @test y ≈ sum(cos.(p .* x.^3) .* dcube .* x .+ sin.(p .* x.^3) .* s[1])
end

@testset "a covector of a value enters where it is sown" begin
    covector = (nothing, (cube = [1.0, 0.0], again = nothing, spare = nothing))
    dx, dp, deps = form(AutoZygote(), h, (x, p, eps0), (covector, nothing), Val(1))
    @test dx ≈ [3 * p * x[1]^2, 0]
    @test dp ≈ x[1]^3
    @test deps.cube == [1.0, 0.0]
end

@testset "mixed second derivatives" begin
    s = ([1.0, 0.0], nothing, nothing)
    _, _, deps = form(AutoZygote(), h, (x, p, eps0), ((1.0, nothing), s, nothing), Val(2))
    slope(t) = Zygote.gradient(e -> g(x + [t, 0], p, merge(eps0, (cube = e,))), zeros(2))[1]
    @test deps.cube ≈ (slope(1.0e-5) - slope(-1.0e-5)) / 2.0e-5 rtol = 1.0e-8
end

@testset "what is not used" begin
    ignored = Harvested(x -> (sow(x^2, :v); x))
    @test NestedGradients.influential(ignored, (2.0,), (v = 0.0,)) == [false]
    @test NestedGradients.influential(h, (x, p), eps0) == [true, true, true]
    covector = (nothing, (v = 1.0,))
    @test_throws "is not used" form(
        AutoZygote(),
        ignored,
        (2.0, (v = 0.0,)),
        (covector, nothing),
        Val(1),
    )
end

@testset "one name twice" begin
    @test_throws "sown twice" Harvested(x -> sow(x, :a) + sow(x, :a))(1.0, nothing)
end
