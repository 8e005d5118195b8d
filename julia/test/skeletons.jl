using NestedGradients: NestedGradients, Slot
using Test

@testset "filled and flattened" begin
    skeleton = ((b = Slot{3}(), a = Slot{1}()), nothing, (Slot{2}(), "constant", 7))
    leaves = ([1.0, 2.0], 3.0f0, [4 5])
    structure = NestedGradients.fill(skeleton, leaves)
    @test structure == ((b = [4 5], a = [1.0, 2.0]), nothing, (3.0f0, "constant", 7))
    @test NestedGradients.flatten(skeleton, structure) === leaves
    @test @inferred(NestedGradients.fill(skeleton, leaves)) === structure
    @test @inferred(NestedGradients.flatten(skeleton, structure)) === leaves
end

@testset "a missing part is missing leaves" begin
    skeleton = ((b = Slot{3}(), a = Slot{1}()), Slot{2}())
    @test NestedGradients.flatten(skeleton, (nothing, 1.0)) === (nothing, 1.0, nothing)
    @test NestedGradients.flatten(skeleton, ((a = 2.0, b = nothing), nothing)) ===
        (2.0, nothing, nothing)
    @test NestedGradients.flatten(skeleton, nothing) === (nothing, nothing, nothing)
end

@testset "fields are found by name" begin
    @test NestedGradients.flatten((a = Slot{1}(), b = Slot{2}()), (b = 2, a = 1)) === (1, 2)
end

@testset "slots without gaps" begin
    @test_throws "no Slot{1}" NestedGradients.flatten((Slot{2}(),), (1.0,))
end
