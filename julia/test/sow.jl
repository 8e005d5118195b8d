using ADTypes: AutoZygote
using ForwardDiff: ForwardDiff
using NestedGradients: collect_sown, nested_gradient, sow
using Test
using Zygote: Zygote

f(x) = sum(abs2, sow(tanh.(x), :hidden))

@testset "named and collected" begin
    y, sown = collect_sown(() -> f([0.3, -0.4]))
    @test y == f([0.3, -0.4])
    @test sown == Dict(:hidden => tanh.([0.3, -0.4]))
    @test sow(1.0, :alone) === 1.0 # no collector
end

@testset "the identity for every AD" begin
    x = [0.3, -0.4]
    reference = differences(f, x)
    @test agree(only(Zygote.gradient(f, x)), reference)
    @test agree(ForwardDiff.gradient(f, x), reference)
    @test agree(nested_gradient(f, AutoZygote(), x), reference)
    g, sown = collect_sown(() -> only(Zygote.gradient(f, x)))
    @test agree(g, reference) && sown[:hidden] == tanh.(x)
    d, sown = collect_sown(() -> ForwardDiff.derivative(t -> sow(t^3, :cube), 2.0))
    @test d == 12.0 && ForwardDiff.partials(sown[:cube], 1) == 12.0
end

@testset "a collector inside another" begin
    _, outer = collect_sown(() -> collect_sown(() -> sow(1.0, :a)))
    @test isempty(outer)
    _, after = collect_sown(() -> (collect_sown(() -> sow(1.0, :a)); sow(2.0, :a)))
    @test after == Dict(:a => 2.0)
end

@testset "a name twice is an error" begin
    @test_throws "sown twice" collect_sown(() -> sow(1.0, :a) + sow(2.0, :a))
end
