# `reduce_window` under ForwardDiff, Zygote and both, against plain loops and each other.

using ChainRulesCore: NoTangent, frule
using ForwardDiff: ForwardDiff
using NestedGradients: NestedGradients, reduce_window
using Test
using Zygote: Zygote

user(a, b) = sin(a) * b + a / 2
const LOGADDEXP = NestedGradients.logaddexp
const X = [1.0, 3.0, 2.0, -1.0, 4.0]
const V = [0.3, -0.2, 0.5, 0.7, -0.4]

# The reduction of a vector, as a loop over positions.
function plain(
    op,
    init,
    x;
    window,
    stride = 1,
    padding = ((0, 0),),
    base_dilation = 1,
    window_dilation = 1,
)
    low, high = only(padding)
    spread = (length(x) - 1) * base_dilation + 1
    span = (window - 1) * window_dilation + 1
    return map(0:((spread + low + high - span) ÷ stride)) do o
        acc = init
        for k in 0:(window - 1)
            p = o * stride + k * window_dilation - low
            0 <= p < spread &&
                p % base_dilation == 0 &&
                (acc = op(acc, x[p ÷ base_dilation + 1]))
        end
        return acc
    end
end

central(f, x, h = 1.0e-6) = (f(x + h) - f(x - h)) / 2h

# All of one type: what is compiled for one serves the others.
geometry(
    window,
    stride,
    padding,
    base_dilation,
    window_dilation,
) = (; window, stride, padding = (padding,), base_dilation, window_dilation)
const GEOMETRIES = [
    geometry(2, 1, (0, 0), 1, 1),
    geometry(3, 2, (1, 2), 1, 1),
    geometry(2, 1, (2, 3), 2, 3),
    geometry(2, 1, (-1, 4), 1, 1),
]

@testset "value, gradient and second derivative: $op, $kw" for op in (
        +,
        *,
        max,
        min,
        LOGADDEXP,
        user,
    ), kw in GEOMETRIES

    f(x, init) = sum(abs2, reduce_window(op, init, x; kw...))
    loop(x, init) = sum(abs2, plain(op, init, x; kw...))
    @test reduce_window(op, 0.3, X; kw...) ≈ plain(op, 0.3, X; kw...) rtol = 1.0e-14
    dx, dinit = Zygote.gradient(f, X, 0.3)
    @test sum(dx .* V) ≈ central(t -> loop(X + t * V, 0.3), 0.0) rtol = 1.0e-7
    @test dinit ≈ central(t -> loop(X, t), 0.3) rtol = 1.0e-7 atol = 1.0e-9
    @test ForwardDiff.gradient(x -> f(x, 0.3), X) ≈ dx rtol = 1.0e-12
    @test ForwardDiff.derivative(t -> f(X, t), 0.3) ≈ dinit rtol = 1.0e-12
    over = ForwardDiff.derivative(t -> Zygote.gradient(f, X + t * V, 0.3)[1], 0.0)
    bend = central(t -> ForwardDiff.gradient(x -> f(x, 0.3), X + t * V), 0.0)
    @test over ≈ bend rtol = 1.0e-6 atol = 1.0e-8
    mixed = ForwardDiff.derivative(t -> Zygote.gradient(f, X + t * V, 0.3)[2], 0.0)
    @test mixed ≈
        central(
            t -> ForwardDiff.derivative(i -> f(X + t * V, i), 0.3),
            0.0,
        ) rtol = 1.0e-6 atol = 1.0e-8
end

@testset "reverse over reverse: $op" for op in (+, max, *, user)
    f(x, init) = sum(
        abs2,
        reduce_window(op, init, x; window = 3, stride = 2, padding = ((1, 2),)),
    )
    over = ForwardDiff.derivative(t -> Zygote.gradient(f, X + t * V, 0.3)[1], 0.0)
    twice = Zygote.gradient(x -> sum(V .* Zygote.gradient(f, x, 0.3)[1]), X)[1]
    @test twice ≈ over rtol = 1.0e-10
end

@testset "third derivatives: $op" for op in (*, NestedGradients.logaddexp, max)
    x, v = [2.0, 3.0, 5.0], [0.3, -0.2, 0.5]
    f(x) = sum(y -> y^3, reduce_window(op, 0.7, x; window = 2))
    gradient(x) = sum(v .* Zygote.gradient(f, x)[1])
    second(t) = ForwardDiff.derivative(s -> gradient(x + s * v), t)
    by_zygote = ForwardDiff.derivative(second, 0.0)
    forward(t) = ForwardDiff.derivative(
        s -> ForwardDiff.derivative(r -> f(x + r * v), s),
        t,
    )
    @test by_zygote ≈ ForwardDiff.derivative(forward, 0.0) rtol = 1.0e-10
    @test by_zygote ≈ central(forward, 0.0, 1.0e-5) rtol = 1.0e-6
end

@testset "captures" begin
    f(c) = sum(abs2, reduce_window((a, b) -> a + c * b * b, 0.1, X; window = 3))
    @test Zygote.gradient(f, 2.0)[1] ≈ central(f, 2.0) rtol = 1.0e-7
    @test ForwardDiff.derivative(c -> Zygote.gradient(f, c)[1], 2.0) ≈
        central(c -> ForwardDiff.derivative(f, c), 2.0) rtol = 1.0e-7
end

@testset "the order is the written one" begin
    digits(a, b) = 10a + b
    @test reduce_window(digits, 9, [1 2 3; 4 5 6]; window = (2, 2)) == [91245 92356]
end

@testset "ties $ties, init $init, $op" for op in (max, min), (init, ties, share, own) in (
        (2.0, :first, [0, 0, 0, 0], 1),
        (2.0, :split, [1, 0, 1, 1] / 4, 1 / 4),
        (1.0, :first, [1, 0, 0, 0], 0),
        (-Inf, :split, [1, 0, 1, 1] / 3, 0),
    )

    s = op === max ? 1 : -1
    x = s * [2.0, 1.0, 2.0, 2.0]
    f(x, i) = only(reduce_window(op, i, x; window = 4, ties))
    @test f(x, s * init) == 2s
    for g in (
            Zygote.gradient(f, x, s * init),
            (
                ForwardDiff.gradient(x -> f(x, s * init), x),
                ForwardDiff.derivative(i -> f(x, i), s * init),
            ),
        )
        @test g[1] ≈ share
        @test g[2] ≈ own
    end
end

@testset "NaN and infinities" begin
    x = [1.0, NaN, 3.0, 2.0]
    @test isequal(reduce_window(max, -Inf, x; window = 2), [NaN, NaN, 3.0])
    @test Zygote.gradient(x -> sum(reduce_window(max, -Inf, x; window = 2)), x)[1] ==
        [0, 2, 1, 0]
    low = fill(-Inf, 2)
    f(x) = sum(reduce_window(max, -Inf, x; window = 2, padding = 1))
    @test Zygote.gradient(f, low)[1] == [2, 1]
    @test ForwardDiff.gradient(f, low) == [2, 1]
    y = [-Inf, -Inf, 1.0, 2.0]
    g(x) = only(reduce_window(LOGADDEXP, -Inf, x; window = 4))
    want = [0, 0, exp(1.0), exp(2.0)] ./ (exp(1) + exp(2))
    @test Zygote.gradient(g, y)[1] ≈ want
    @test ForwardDiff.gradient(g, y) ≈ want
end

@testset "numbers of other kinds" begin
    @test reduce_window(*, big"1.0", big.(X); window = 2) isa Vector{BigFloat}
    @test reduce_window(+, Float16(0), ones(Float16, 1000); window = 1000) == Float16[1000]
    g = Zygote.gradient(
        x -> sum(reduce_window(+, Float16(0), x; window = 10)),
        ones(Float16, 10),
    )[1]
    @test g isa Vector{Float16}
    z = X .+ im .* reverse(X)
    f(z) = abs2(sum(reduce_window(*, 1.0 + 0im, z; window = 2)))
    part(d) = central(t -> f(z + t * d .* (V .+ 0im)), 0.0)
    got = Zygote.gradient(f, z)[1]
    @test sum(real(got) .* V) ≈ part(1) rtol = 1.0e-7
    @test sum(imag(got) .* V) ≈ part(im) rtol = 1.0e-7
    @test reduce_window(|, 0, [1, 2, 4]; window = 2) == [3, 6]
end

@testset "frule" begin
    y, ẏ = frule(
        (NoTangent(), NoTangent(), 1.0, V),
        reduce_window,
        user,
        0.2,
        X;
        window = 2,
    )
    @test y == reduce_window(user, 0.2, X; window = 2)
    @test ẏ ≈
        central(t -> reduce_window(user, 0.2 + t, X + t * V; window = 2), 0.0) rtol = 1.0e-7
end

@testset "shapes" begin
    for op in (max, user)
        f(x, init) = reduce_window(op, init, x; window = ())[]
        @test f(fill(3.0), 0.1) == op(0.1, 3.0)
        dx, dinit = Zygote.gradient(f, fill(3.0), 0.1)
        @test dx[] ≈ central(t -> op(0.1, t), 3.0) rtol = 1.0e-7
        @test dinit ≈ central(t -> op(t, 3.0), 0.1) rtol = 1.0e-7 atol = 1.0e-9
    end
    @test size(reduce_window(max, 0.0, zeros(2); window = 3)) == (0,)
    @test reduce_window(max, 1.0, zeros(0); window = 2, padding = 2) == ones(3)
    @test size(reduce_window(
        +,
        0.0,
        zeros(5, 6);
        window = (2, 3),
        stride = 2,
        padding = :same,
    )) ==
        (3, 3)
end

const UNTYPED = Any[0.5]

@testset "a reducer whose type is not inferred, windows $n" for n in (0, 3)
    affine(a, b) = a + UNTYPED[1] * b
    f(x) = sum(reduce_window(affine, 1.0, x; window = 2))
    y = reduce_window(affine, 1.0, zeros(n); window = 2)
    @test y isa Vector{Float64} && length(y) == max(0, n - 1)
    @test only(Zygote.gradient(f, zeros(n))) == (n == 0 ? zeros(0) : [0.5, 1.0, 0.5])
    pair(a, b) = (affine(a[1], b[1]), a[2])
    z = reduce_window(pair, (1.0, 0), (zeros(n), zeros(Int, n)); window = 2)
    @test z isa Tuple{Vector{Float64}, Vector{Int}}
end

@testset "bad input names the argument" begin
    says(text) = e -> e isa ArgumentError && occursin(text, e.msg)
    for (text, call) in (
            ("window", () -> reduce_window(max, 0.0, X; window = 0)),
            ("window", () -> reduce_window(max, 0.0, X; window = (1, 1))),
            ("stride", () -> reduce_window(max, 0.0, X; window = 1, stride = -1)),
            (
                "window_dilation",
                () -> reduce_window(max, 0.0, X; window = 1, window_dilation = 0),
            ),
            (
                "base_dilation",
                () -> reduce_window(max, 0.0, X; window = 1, base_dilation = 0),
            ),
            (
                "padding",
                () -> reduce_window(max, 0.0, X; window = 1, padding = ((1, 1), (1, 1))),
            ),
            ("padding", () -> reduce_window(max, 0.0, X; window = 1, padding = :full)),
            ("ties", () -> reduce_window(max, 0.0, X; window = 1, ties = :last)),
            ("ties", () -> reduce_window(+, 0.0, X; window = 1, ties = :split)),
            ("associative", () -> reduce_window(+, 0.0, X; window = 1, associative = 1)),
            ("init", () -> reduce_window((a, b) -> a, 0.0, (X, X); window = 1)),
            (
                "x must be",
                () -> reduce_window((a, b) -> a, (0.0, 0.0), (X, [1]); window = 1),
            ),
            ("x must be", () -> reduce_window(+, 0.0, 1.0; window = 1)),
            (
                "op must return a number, as init is, and returns a Vector",
                () -> reduce_window((a, b) -> [a, b], 0.0, X; window = 2),
            ),
            ("a String", () -> reduce_window((a, b) -> "s", 0.0, X; window = 2)),
            ("a String", () -> reduce_window((a, b) -> "s", 0.0, zeros(0); window = 2)),
            (
                "the String \"s\"",
                () -> reduce_window(
                    (a, b) -> UNTYPED[1] > 0 ? "s" : a,
                    0.0,
                    zeros(40);
                    window = 40,
                    associative = true,
                ),
            ),
            (
                "the String \"s\"",
                () -> reduce_window((a, b) -> UNTYPED[1] > 0 ? "s" : a, 0.0, X; window = 2),
            ),
            (
                "a tuple of 2 numbers",
                () -> reduce_window((a, b) -> a[1], (0.0, 0.0), (X, X); window = 1),
            ),
            (
                "a tuple of 2 numbers",
                () -> reduce_window((a, b) -> (a[1],), (0.0, 0.0), (X, X); window = 1),
            ),
        )
        error = try
            call()
            nothing
        catch e
            e
        end
        @test says(text)(error)
    end
end
