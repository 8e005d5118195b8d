# Reductions over several operands, against plain loops.

using ForwardDiff: ForwardDiff
using NestedGradients: reduce_window
using Test
using Zygote: Zygote

Base.include(@__MODULE__, joinpath(@__DIR__, "reference.jl"))

affine(f, g) = (g[1] * f[1], g[1] * f[2] + g[2])

@testset "sum and product, window $window" for window in (3, 34)
    op(a, b) = (a[1] + b[1], a[2] * b[2])
    x, y = LONG, 1 .+ ALONG ./ 9
    function f(x, y, i, j)
        total, product = reduce_window(op, (i, j), (x, y); window, stride = 2, padding = 1)
        return sum(total .* sin.(product))
    end
    places = seen(60, window, 2, (1, 1))
    plain(x, y, i, j) = sum((i + sum(x[at])) * sin(j * prod(y[at])) for at in places)
    @test f(x, y, 0.5, 1.5) ≈ plain(x, y, 0.5, 1.5) rtol = 1.0e-12
    gradient = Zygote.gradient(f, x, y, 0.5, 1.5)
    along(g, t) = g(x + t * ALONG, y + t * LONG, 0.5 + 0.3t, 1.5 - 0.7t)
    slope = central(t -> along(plain, t))
    directed(g) = sum(g[1] .* ALONG) + sum(g[2] .* LONG) + 0.3 * g[3] - 0.7 * g[4]
    @test directed(gradient) ≈ slope rtol = 1.0e-7
    @test ForwardDiff.derivative(t -> along(f, t), 0.0) ≈ slope rtol = 1.0e-7
    pair(x...) = Zygote.gradient(f, x...)
    over = ForwardDiff.derivative(t -> directed(along(pair, t)), 0.0)
    bend = central(t -> ForwardDiff.derivative(s -> along(f, s), t))
    @test over ≈ bend rtol = 1.0e-6
    promised(x) = reduce_window(op, (0.5, 1.5), (x, y); window, associative = true)
    kept(x) = reduce_window(op, (0.5, 1.5), (x, y); window)
    for g in (r -> sum(sin, r[1]), r -> sum(sin, r[2]))
        @test Zygote.gradient(x -> g(promised(x)), x)[1] ≈
            Zygote.gradient(x -> g(kept(x)), x)[1] rtol = 1.0e-11
    end
end

@testset "argmax with an integer operand" begin
    larger(a, b) = b[1] > a[1] ? b : a
    x = [1.0, 3.0, 2.0, -1.0, 4.0, 0.5]
    f(x) = reduce_window(larger, (-Inf, 0), (x, 1:6); window = 3)
    @test f(x) == ([3.0, 3.0, 4.0, 4.0], [2, 2, 5, 5])
    @test Zygote.gradient(x -> sum(f(x)[1]), x)[1] == [0, 2, 0, 0, 2, 0]
    @test ForwardDiff.gradient(x -> sum(f(x)[1]), x) == [0, 2, 0, 0, 2, 0]
end

@testset "affine maps do not commute" begin
    a, b = 1 .+ LONG ./ 10, ALONG
    f(flag) = b -> reduce_window(
        affine,
        (1.0, 0.0),
        (a, b);
        window = 40,
        stride = 3,
        padding = ((7, 12),),
        associative = flag,
    )[2]
    plain(b) = map(seen(60, 40, 3, (7, 12))) do at
        return foldl((f, i) -> affine(f, (a[i], b[i])), at; init = (1.0, 0.0))[2]
    end
    for flag in (true, false, nothing)
        @test f(flag)(b) ≈ plain(b) rtol = 1.0e-12
        slope = central(t -> sum(sin, plain(b + t * LONG)))
        got = Zygote.gradient(b -> sum(sin, f(flag)(b)), b)[1]
        @test sum(got .* LONG) ≈ slope rtol = 1.0e-7
    end
end
