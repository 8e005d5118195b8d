using ForwardDiff: ForwardDiff, Dual, ≺
using NestedGradients: Level, context
using Test

const Plain = Dual{Level{1, Nothing}, Float64, 1}

@testset "the context is what the arguments hold" begin
    d = Plain(1.0)
    @test context((1.0, [2.0], (a = "x", b = 3))) === Nothing
    @test context(([d, d], 1.0)) === Tuple{Plain}
    @test context((a = (d, 2.0im),)) === Tuple{Plain}
    @test context(Any[1, d]) === Tuple{Plain}
    @test context(x -> x * d) === Tuple{Plain}
    @test context(Ref{Any}(d)) === Tuple{Plain}
    @test @inferred(context(([d], 1.0))) === Tuple{Plain}
    boxed = let y = d
        f() = y
        y = 2 * y
        f
    end
    @test context(boxed) === Tuple{Plain}
end

@testset "which tag lies outside" begin
    C = Tuple{Plain}
    @test Level{1, Nothing} ≺ Level{2, Nothing}
    @test !(Level{2, Nothing} ≺ Level{1, Nothing})
    @test Level{1, Nothing} ≺ Level{1, C} # a form inside a form
    @test !(Level{1, C} ≺ Level{1, Nothing})
    F = ForwardDiff.Tag{typeof(sin), Float64}
    @test Level{1, Nothing} ≺ F # ForwardDiff inside
    @test !(F ≺ Level{1, Nothing})
    @test F ≺ Level{1, Tuple{Dual{F, Float64, 1}}} # ForwardDiff outside
    @test_throws ForwardDiff.DualMismatchError Level{1, C} ≺
        Level{1, Tuple{Dual{F, Float64, 1}}}
end
