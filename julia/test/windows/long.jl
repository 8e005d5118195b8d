# Long windows: associative reducers by doubling, against plain loops and the written order.

using ForwardDiff: ForwardDiff
using NestedGradients: NestedGradients, reduce_window
using Test
using Zygote: Zygote

Base.include(@__MODULE__, joinpath(@__DIR__, "reference.jl"))

@testset "long windows of $op, $kw" for op in (
        +,
        *,
        max,
        min,
        NestedGradients.logaddexp,
    ), kw in (
        (window = 37, stride = 1, padding = ((0, 0),)),
        (window = 40, stride = 3, padding = ((70, 45),)),
        (
            window = 34,
            stride = 2,
            padding = ((5, 9),),
            base_dilation = 2,
            window_dilation = 3,
        ),
    )

    x = op === (*) ? 1 .+ LONG ./ 5 : LONG
    places = seen(
        60,
        kw.window,
        kw.stride,
        kw.padding[1],
        get(kw, :base_dilation, 1),
        get(kw, :window_dilation, 1),
    )
    plain(x, init) = [foldl(op, x[at]; init) for at in places]
    f(x, init) = sum(abs2, reduce_window(op, init, x; kw...))
    loop(x, init) = sum(abs2, plain(x, init))
    @test reduce_window(op, 0.3, x; kw...) ≈ plain(x, 0.3) rtol = 1.0e-13
    dx, dinit = Zygote.gradient(f, x, 0.3)
    @test sum(dx .* ALONG) ≈ central(t -> loop(x + t * ALONG, 0.3)) rtol = 1.0e-6
    @test dinit ≈ central(t -> loop(x, t), 0.3) rtol = 1.0e-6 atol = 1.0e-8
    written = Zygote.gradient(
        (x, i) -> sum(abs2, reduce_window(op, i, x; associative = false, kw...)),
        x,
        0.3,
    )
    @test written[1] ≈ dx rtol = 1.0e-11
    @test written[2] ≈ dinit rtol = 1.0e-11
    op in (*, max) || continue
    over = ForwardDiff.derivative(t -> Zygote.gradient(f, x + t * ALONG, 0.3)[1], 0.0)
    bend = ForwardDiff.derivative(
        t -> Zygote.gradient(
            x -> sum(abs2, reduce_window(op, 0.3, x; associative = false, kw...)),
            x + t * ALONG,
        )[1],
        0.0,
    )
    @test over ≈ bend rtol = 1.0e-10
end

@testset "windows that are long in one axis or in all" for window in (
        (2, 33),
        (6, 7),
        (40, 1),
    )
    x = reshape([sin(1.3i) for i in 1:(42 * 35)], 42, 35)
    for op in (+, max)
        f(flag) = x -> sum(
            sin,
            reduce_window(
                op,
                0.1,
                x;
                window,
                stride = (2, 1),
                padding = 1,
                associative = flag,
            ),
        )
        @test f(true)(x) ≈ f(false)(x) rtol = 1.0e-12
        @test Zygote.gradient(f(true), x)[1] ≈
            Zygote.gradient(f(false), x)[1] rtol = 1.0e-11
    end
end

@testset "ties of long windows, $ties" for (ties, share) in (
        (:first, [1, 0, 0, 0]),
        (:split, [1, 0, 1, 1] / 3),
    )
    f(x) = only(reduce_window(max, -Inf, x; window = 40, padding = ((36, 0),), ties))
    x = [2.0, 1.0, 2.0, 2.0]
    @test f(x) == 2
    @test Zygote.gradient(f, x)[1] ≈ share
    @test ForwardDiff.gradient(f, x) ≈ share
    @test Zygote.gradient(f, fill(-Inf, 4))[1] ≈
        (ties === :first ? [1, 0, 0, 0] : fill(1 / 4, 4))
end

@testset "the work grows with the logarithm of the window" begin
    function combinations(window)
        count = Ref(0)
        op(a, b) = (count[] += 1; a + b)
        reduce_window(op, 0.0, ones(2000); window, associative = true)
        return count[] / (2001 - window)
    end
    @test combinations(1024) < 3 * combinations(64)
    @test combinations(64) < 20
end

@testset "captures over long windows" begin
    f(c) = sum(
        sin,
        reduce_window(
            (a, b) -> a + b + c * a * b,
            0.1,
            LONG ./ 50;
            window = 40,
            associative = true,
        ),
    )
    @test Zygote.gradient(f, 0.2)[1] ≈ central(f, 0.2) rtol = 1.0e-6
end
