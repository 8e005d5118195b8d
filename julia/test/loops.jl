# Bounded loops: values against a plain `while`, derivatives against central differences, and the
# number and order of the steps.

using ChainRulesCore
using DifferentiationInterface: DifferentiationInterface as DI
using ForwardDiff: ForwardDiff
using LinearAlgebra
using NestedGradients
using NestedGradients: leg, steps_backward
using Test
using Zygote: Zygote

const W = [0.3 -0.8 0.2; 0.5 0.4 -0.1; 0.1 0.9 -0.4]
const X = [0.7, -0.2, 0.5]

# Steps whose Jacobians do not commute, and whose gradients do not vanish.
rotate(w, x) = tanh.(w * x) .+ 0.1 .* x.^2

function bounded(w, x, n; max_steps = 30, options...)
    state = bounded_while_loop(
        s -> s[2] < n,
        s -> (rotate(w, s[1]), s[2] + 1),
        (x, 0);
        max_steps,
        options...,
    )
    return sum(sin, state[1])
end

function plain(w, x, n)
    for _ in 1:n
        x = rotate(w, x)
    end
    return sum(sin, x)
end

function central(f, x; h = 1.0e-5)
    unit(i) = (e = zero(x); e[i] = h; e)
    return [(f(x + unit(i)) - f(x - unit(i))) / 2h for i in CartesianIndices(x)]
end

close(a, b; tol = 1.0e-12) = isapprox(a, b; rtol = tol, atol = tol)

@testset "values and gradients" begin
    for checkpoints in (:auto, 1, 2, 3), n in (0, 1, 2, 7, 30, 40)
        steps = min(n, 30)
        f(w, x) = bounded(w, x, n; checkpoints)
        @test f(W, X) == plain(W, X, steps)
        dw, dx = Zygote.gradient(f, W, X)
        @test close(dx, central(x -> plain(W, x, steps), X); tol = 1.0e-8)
        if n > 0
            @test close(dw, central(w -> plain(w, X, steps), W); tol = 1.0e-8)
            @test close(dw, Zygote.gradient((w, x) -> plain(w, x, steps), W, X)[1])
        end
    end
end

@testset "forward mode, and forward over reverse" begin
    f(x) = bounded(W, x, 4)
    g(x) = plain(W, x, 4)
    @test close(ForwardDiff.gradient(f, X), ForwardDiff.gradient(g, X))
    @test close(ForwardDiff.hessian(f, X), ForwardDiff.hessian(g, X))
    for checkpoints in (:auto, 2)
        h(x) = bounded(W, x, 9; checkpoints)
        over = ForwardDiff.jacobian(x -> Zygote.gradient(h, x)[1], X)
        @test close(over, ForwardDiff.hessian(x -> plain(W, x, 9), X))
        wider = ForwardDiff.derivative(
            t -> Zygote.gradient(w -> bounded(w, X, 9; checkpoints), W .+ t)[1],
            0.0,
        )
        @test close(
            wider,
            ForwardDiff.derivative(
                t -> ForwardDiff.gradient(w -> plain(w, X, 9), W .+ t),
                0.0,
            ),
        )
    end
end

@testset "DifferentiationInterface" begin
    f(x) = bounded(W, x, 5)
    want = central(f, X)
    for backend in (DI.AutoZygote(), DI.AutoForwardDiff())
        @test close(DI.gradient(f, backend, X), want; tol = 1.0e-8)
    end
    second = DI.SecondOrder(DI.AutoForwardDiff(), DI.AutoZygote())
    @test close(DI.hessian(f, second, X), ForwardDiff.hessian(x -> plain(W, x, 5), X))
    @test close(DI.gradient(f, AutoNested(DI.AutoZygote()), X), want; tol = 1.0e-8)
    @test close(
        DI.hessian(f, AutoNested(DI.AutoZygote()), X),
        ForwardDiff.hessian(x -> plain(W, x, 5), X),
    )
end

# Forward mode by ChainRules, on ForwardDiff.
struct ByDuals <: RuleConfig{Union{HasForwardsMode, NoReverseMode}} end

struct Scaled{T}
    a::T
end
(s::Scaled)(x) = sin(s.a * x)

function ChainRulesCore.frule_via_ad(::ByDuals, (ds, dx), s::Scaled, x)
    return s(x), ForwardDiff.derivative(t -> Scaled(s.a + t * ds.a)(x + t * dx), 0.0)
end

@testset "frule" begin
    cond(x) = abs(x) > 0.3
    body = Scaled(0.8)
    dbody = Tangent{typeof(body)}(; a = 0.5)
    for (max_steps, n) in ((50, 5), (2, 2), (nothing, 5), (0, 0))
        (y, steps), dy = ChainRulesCore.frule(
            ByDuals(),
            (NoTangent(), NoTangent(), dbody, 2.0, NoTangent(), NoTangent()),
            NestedGradients.run_bounded,
            cond,
            body,
            1.5,
            max_steps,
            :auto,
        )
        along(t) = foldl((x, _) -> Scaled(0.8 + 0.5t)(x), 1:steps; init = 1.5 + 2t)
        @test y == along(0.0)
        @test close(dy[1], ForwardDiff.derivative(along, 0.0))
        @test dy[2] isa NoTangent
        n == 5 || @test steps == n
    end
end

@testset "a stop that depends on what is differentiated: Newton's method" begin
    function root(a)
        return bounded_while_loop(
            x -> abs(x^2 - a) > 1.0e-13 * a,
            x -> (x + a / x) / 2,
            a;
            max_steps = 60,
        )
    end
    for a in (2.0, 9.0, 0.3)
        @test close(root(a), sqrt(a))
        @test close(Zygote.gradient(root, a)[1], 0.5 / sqrt(a); tol = 1.0e-10)
        @test close(ForwardDiff.derivative(root, a), 0.5 / sqrt(a); tol = 1.0e-10)
        second = ForwardDiff.derivative(a -> Zygote.gradient(root, a)[1], a)
        @test close(second, -0.25 * a^-1.5; tol = 1.0e-9)
    end
end

@testset "order and number of steps" begin
    for (slots, n) in Iterators.product((1, 2, 3, 6), (0, 1, 2, 5, 17, 40))
        count, order = zeros(Int, n + 1), Int[]
        advance(i) = (count[i + 1] += 1; i + 1)
        steps_backward(i -> push!(order, i), advance, Any[0][1:min(n, 1)], n, slots)
        @test order == (n - 1):-1:0
        r = first(r for r in 0:n if binomial(slots + r, slots) >= n)
        @test all(<=(r), count)
    end
    @test all(1 <= leg(m, c) < m for m in 2:50 for c in 2:6)

    # Where all states are kept, the pullback evaluates no step for its value alone.
    calls = Ref(0)
    tick(x) = (calls[] += 1; x)
    ChainRulesCore.rrule(::typeof(tick), x) = (tick(x), d -> (NoTangent(), d))
    run(x) = bounded_while_loop(
        s -> s[2] < 20,
        s -> (sin(tick(s[1])), s[2] + 1),
        (x, 0);
        max_steps = 99,
    )[1]
    Zygote.gradient(run, 1.0)
    @test calls[] <= 2 * 20
end

@testset "limits and options" begin
    double(x; options...) = bounded_while_loop(<(10), x -> 2x, x; options...)
    @test double(1.0; max_steps = 9, return_steps = true) == (16.0, 4)
    @test double(1.0; max_steps = 3, return_steps = true) == (8.0, 3)
    @test double(1.0; max_steps = 0, return_steps = true) == (1.0, 0)
    @test double(1.0; max_steps = nothing) == 16.0
    @test double(1.0; max_steps = 4, on_limit = :nan) == 16.0
    @test isnan(double(1.0; max_steps = 3, on_limit = :nan))
    @test isnan(Zygote.gradient(x -> double(x; max_steps = 3, on_limit = :nan), 1.0)[1])
    @test Zygote.gradient(x -> double(x; max_steps = 4, on_limit = :raise), 1.0)[1] == 16.0
    @test_throws "max_steps = 3" double(1.0; max_steps = 3, on_limit = :raise)
    @test_throws "max_steps = 3" Zygote.gradient(
        x -> double(x; max_steps = 3, on_limit = :raise),
        1.0,
    )
    @test_throws ArgumentError double(1.0; max_steps = -1)
    @test_throws ArgumentError double(1.0; max_steps = 1.5)
    @test_throws ArgumentError double(1.0; max_steps = true)
    @test_throws ArgumentError double(1.0; max_steps = 3, on_limit = :stop)
    @test_throws ArgumentError double(1.0; max_steps = 3, checkpoints = 0)
    @test_throws ArgumentError Zygote.gradient(x -> double(x; max_steps = nothing), 1.0)
    @test ForwardDiff.derivative(x -> double(x; max_steps = nothing), 1.0) == 16.0
end

@testset "carries of many kinds" begin
    init(x) = (x = x, n = 0, flag = true, name = :loop)
    step(s) = (
        x = s.flag ? rotate(W, s.x) : 0.5 .* s.x,
        n = s.n + 1,
        flag = !s.flag,
        name = s.name,
    )
    f(x) = sum(sin, bounded_while_loop(s -> s.n < 5, step, init(x); max_steps = 8).x)
    @test close(Zygote.gradient(f, X)[1], central(f, X); tol = 1.0e-8)
    @test close(ForwardDiff.gradient(f, X), central(f, X); tol = 1.0e-8)
    g(x) = sum(bounded_while_loop(
        s -> sum(s) < 4.0,
        s -> 1.5 .* s .+ 0.1,
        x;
        max_steps = 30,
    ))
    @test close(Zygote.gradient(g, abs.(X))[1], central(g, abs.(X)); tol = 1.0e-8)
    # a part of the carry that nothing depends on, and one that is handed on
    h(x, y) = bounded_while_loop(
        s -> s[3] < 3,
        s -> (s[1] * s[2], s[2], s[3] + 1),
        (x, y, 0);
        max_steps = 5,
    )[1]
    @test all(close.(Zygote.gradient(h, 1.2, 0.7), (0.7^3, 3 * 1.2 * 0.7^2)))
    # a loop in a loop
    outer(x) = bounded_while_loop(
        s -> s[2] < 3,
        s -> (power(s[1], 1), s[2] + 1),
        (x, 0);
        max_steps = 4,
    )[1]
    power(x, n) = bounded_while_loop(
        s -> s[2] < n,
        s -> (s[1]^2, s[2] + 1),
        (x, 0);
        max_steps = 4,
    )[1]
    @test close(Zygote.gradient(outer, 1.1)[1], 8 * 1.1^7)
end

# ---- counted loops, and loops that stack rows ----

@testset "fori" begin
    f(w, x, lower, upper; options...) = sum(
        sin,
        bounded_fori_loop(lower, upper, (i, x) -> rotate(i .* w, x), x; options...),
    )
    by_hand(w, x, lower, upper) = sum(
        sin,
        foldl((x, i) -> rotate(i .* w, x), lower:(upper - 1); init = x),
    )
    for (lower, upper) in ((0, 4), (-2, 3), (3, 3), (5, 2)), checkpoints in (:auto, 2)
        @test f(W, X, lower, upper; checkpoints) == by_hand(W, X, lower, upper)
        for g in (
                x -> f(W, x, lower, upper; checkpoints),
                x -> f(W, x, lower, upper; checkpoints, max_steps = 8),
            )
            @test close(
                Zygote.gradient(g, X)[1],
                central(x -> by_hand(W, x, lower, upper), X);
                tol = 1.0e-8,
            )
            @test close(
                ForwardDiff.gradient(g, X),
                ForwardDiff.gradient(x -> by_hand(W, x, lower, upper), X),
            )
        end
    end
    dw = Zygote.gradient(w -> f(w, X, 1, 5), W)[1]
    @test close(dw, central(w -> by_hand(w, X, 1, 5), W); tol = 1.0e-8)
    over = ForwardDiff.jacobian(x -> Zygote.gradient(x -> f(W, x, 0, 4), x)[1], X)
    @test close(over, ForwardDiff.hessian(x -> by_hand(W, x, 0, 4), X))
    add(; options...) = bounded_fori_loop(0, 20, (i, x) -> x + i, 0.0; options...)
    @test add(; max_steps = 8, return_steps = true) == (28.0, 8)
    @test add(; return_steps = true) == (190.0, 20)
    @test isnan(add(; max_steps = 8, on_limit = :nan))
    @test add(; max_steps = 20, on_limit = :raise) == 190.0
    @test_throws "max_steps = 8" add(; max_steps = 8, on_limit = :raise)
    @test_throws "upper is 2.5" bounded_fori_loop(0, 2.5, (i, x) -> x, 1.0)
    @test_throws "lower is true" bounded_fori_loop(true, 3, (i, x) -> x, 1.0)
end

# The states before each step, times a matrix, and a number; ten times as many cotangents as steps.
function scanned(w, x, n; options...)
    body(s) = ((rotate(w, s[1]), s[2] + 1), (m = w .* s[1]', k = s[2], v = (sum(s[1]),)))
    return bounded_scan_until(s -> s[2] < n, body, (x, 0); max_steps = 6, options...)
end

function scan_loss((val, ys))
    weigh(a) = sum(a .* sin.(1:length(a)))
    return sum(sin, val[1]) + weigh(vec(ys.m).^2) + weigh(ys.v[1].^2)
end

function scan_by_hand(w, x, n)
    m, v = zeros(eltype(w .* x'), 6, 3, 3), zeros(eltype(w .* x'), 6)
    for k in 1:n
        m[k, :, :] .= w .* x'
        v[k] = sum(x)
        x = rotate(w, x)
    end
    return (x, n), (; m, k = vcat(0:(n - 1), zeros(Int, 6 - n)), v = (v,))
end

@testset "scan until" begin
    for n in (0, 1, 4, 6), checkpoints in (:auto, 1, 2)
        (val, ys), steps = scanned(W, X, n; checkpoints, return_steps = true)
        want, rows = scan_by_hand(W, X, n)
        @test steps == n
        @test val == want
        @test ys == rows
        f(w, x) = scan_loss(scanned(w, x, n; checkpoints))
        by_hand(w, x) = scan_loss(scan_by_hand(w, x, n))
        dw, dx = Zygote.gradient(f, W, X)
        @test close(dx, central(x -> by_hand(W, x), X); tol = 1.0e-8)
        @test close(something(dw, zero(W)), central(w -> by_hand(w, X), W); tol = 1.0e-8)
        @test close(
            ForwardDiff.gradient(x -> f(W, x), X),
            ForwardDiff.gradient(x -> by_hand(W, x), X),
        )
    end
    f(x) = scan_loss(scanned(W, x, 5; checkpoints = 2))
    second = ForwardDiff.hessian(x -> scan_loss(scan_by_hand(W, x, 5)), X)
    @test close(ForwardDiff.jacobian(x -> Zygote.gradient(f, x)[1], X), second)
    @test close(DI.hessian(f, AutoNested(DI.AutoZygote()), X), second)
    # only the rows, and only the final value, are wanted
    @test close(
        Zygote.gradient(x -> sum(abs2, scanned(W, x, 3)[2].m), X)[1],
        central(x -> sum(abs2, scan_by_hand(W, x, 3)[2].m), X);
        tol = 1.0e-8,
    )
    @test close(
        Zygote.gradient(x -> sum(sin, scanned(W, x, 3)[1][1]), X)[1],
        Zygote.gradient(x -> plain(W, x, 3), X)[1],
    )
end

@testset "frule of a scan" begin
    struct_body = Scaled(0.8)
    paired = x -> (struct_body(x), 3x)
    ChainRulesCore.frule_via_ad(::ByDuals, (_, dx), ::typeof(paired), x) = (
        paired(x),
        (ForwardDiff.derivative(struct_body, x) * dx, 3dx),
    )
    (y, steps, rows), dy = ChainRulesCore.frule(
        ByDuals(),
        (NoTangent(), NoTangent(), NoTangent(), 2.0, NoTangent(), NoTangent()),
        NestedGradients.run_scan,
        x -> abs(x) > 0.3,
        paired,
        1.5,
        4,
        :auto,
    )
    along(t, k) = foldl((x, _) -> struct_body(x), 1:k; init = 1.5 + 2t)
    @test steps == 4
    @test y == along(0.0, 4)
    @test close(dy[1], ForwardDiff.derivative(t -> along(t, 4), 0.0))
    stacked, dots = ChainRulesCore.frule(
        (NoTangent(), dy[3]),
        NestedGradients.stack_rows,
        rows,
        nothing,
        5,
    )
    @test stacked == [3 .* along.(0.0, 0:3); 0.0]
    @test close(
        dots,
        [[3 * ForwardDiff.derivative(t -> along(t, k), 0.0) for k in 0:3]; 0.0],
    )
end

@testset "scan: limits, errors and rows past the stop" begin
    halve(x; options...) = bounded_scan_until(>(1), x -> (x / 2, log(x - 1)), x; options...)
    @test halve(6.0; max_steps = 6)[2] == [log(5.0), log(2.0), log(0.5), 0, 0, 0]
    d = Zygote.gradient(x -> sum(halve(x; max_steps = 6)[2]), 6.0)[1]
    @test close(d, 1 / 5 + 0.5 / 2 + 0.25 / 0.5)
    (x, ys), n = halve(6.0; max_steps = 2, on_limit = :nan, return_steps = true)
    @test isnan(x) && all(isnan, ys) && n == 2
    @test_throws "max_steps = 2" halve(6.0; max_steps = 2, on_limit = :raise)
    @test halve(6.0; max_steps = 0)[1] == 6.0
    @test size(halve(6.0; max_steps = 0)[2]) == (0,)
    @test_throws "max_steps is nothing" halve(6.0; max_steps = nothing)
    @test_throws "pair" bounded_scan_until(>(1), x -> x / 2, 6.0; max_steps = 3)
    @test_throws "made of numbers" bounded_scan_until(
        >(1),
        x -> (x / 2, "x"),
        6.0;
        max_steps = 3,
    )
    grows(x) = (x / 2, zeros(round(Int, x)))
    @test_throws DimensionMismatch bounded_scan_until(>(1), grows, 6.0; max_steps = 3)
end
