# Pooling layers against loops that spell out the rule.

using ForwardDiff: ForwardDiff
using NestedGradients
using Test
using Zygote: Zygote

const X = reshape([sin(3i) for i in 1:(6 * 7 * 2)], 6, 7, 2)

# Torch's rule along one axis: each window's real positions, and their number with padding.
function windows(n, kernel, stride, pad, dilation, ceil)
    room = n + 2pad - dilation * (kernel - 1) - 1
    out = (ceil ? cld(room, stride) : fld(room, stride)) + 1
    ceil && (out - 1) * stride >= n + pad && (out -= 1)
    return map(0:(out - 1)) do o
        positions = [o * stride - pad + k * dilation for k in 0:(kernel - 1)]
        return [p + 1 for p in positions if 0 <= p < n], count(<(n + pad), positions)
    end
end

function pooled(reduce, x, geometry...)
    rows, columns = windows(size(x, 1), geometry...), windows(size(x, 2), geometry...)
    return [
        reduce(x[r, c, k], m * n)
        for (r, m) in rows, (c, n) in columns, k in axes(x, 3)
    ]
end

const LAYERS = (
    (max_pool, (;), (c, n) -> maximum(c)),
    (min_pool, (;), (c, n) -> minimum(c)),
    (sum_pool, (;), (c, n) -> sum(c)),
    (avg_pool, (;), (c, n) -> sum(c) / n),
    (avg_pool, (count_include_pad = false,), (c, n) -> sum(c) / length(c)),
    (avg_pool, (divisor_override = 7,), (c, n) -> sum(c) / 7),
    ((x, k; kw...) -> lp_pool(x, 2, k; kw...), (;), (c, n) -> sqrt(sum(abs2, c))),
    (logsumexp_pool, (;), (c, n) -> log(sum(exp, c))),
)

@testset "$layer $options, ceil_mode = $ceil" for (
        layer,
        options,
        reduce,
    ) in LAYERS, ceil in (false, true)

    for (k, s, p, d) in (
            (2, 2, 0, 1),
            (3, 2, 1, 1),
            (3, 1, 1, 2),
            (2, 3, 0, 1),
            (4, 3, 2, 1),
        )
        run(x) = layer(
            x,
            (k, k);
            stride = (s, s),
            padding = p,
            dilation = d,
            ceil_mode = ceil,
            options...,
        )
        @test run(X) ≈ pooled(reduce, X, k, s, p, d, ceil) rtol = 1.0e-13
        last = layer(
            permutedims(X, (3, 1, 2)),
            (k, k);
            dims = (2, 3),
            stride = (s, s),
            padding = p,
            dilation = d,
            ceil_mode = ceil,
            options...,
        )
        @test permutedims(last, (2, 3, 1)) ≈ run(X)
    end
    f(x) = sum(sin, layer(x, (2, 3); stride = 2, ceil_mode = ceil, options...))
    @test Zygote.gradient(f, X)[1] ≈ ForwardDiff.gradient(f, X) rtol = 1.0e-12
end

@testset "adaptive" begin
    bounds(n, m) = [((i * n ÷ m) + 1):cld((i + 1) * n, m) for i in 0:(m - 1)]
    for m in ((2, 3), (4, 4), (6, 7), (9, 8))
        blocks = [X[r, c, k] for r in bounds(6, m[1]), c in bounds(7, m[2]), k in 1:2]
        @test adaptive_max_pool(X, m) == maximum.(blocks)
        @test adaptive_avg_pool(X, m) ≈ (b -> sum(b) / length(b)).(blocks)
        for layer in (adaptive_max_pool, adaptive_avg_pool)
            f(x) = sum(sin, layer(x, m))
            @test Zygote.gradient(f, X)[1] ≈ ForwardDiff.gradient(f, X) rtol = 1.0e-12
        end
    end
end

@testset "indices of $layer" for (layer, beats) in ((max_pool, >), (min_pool, <))
    x = reshape([Float64(mod(7i, 5)) for i in 1:(6 * 7 * 2)], 6, 7, 2) # with ties
    for (k, s, p, d) in ((2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2), (7, 1, 3, 1))
        options = (stride = (s, s), padding = p, dilation = d)
        values, places = layer(x, (k, k); return_indices = true, options...)
        @test values == layer(x, (k, k); options...)
        rows, columns = windows(6, k, s, p, d, false), windows(7, k, s, p, d, false)
        want = map(Iterators.product(rows, columns, 1:2)) do ((r, _), (c, _), channel)
            at = [CartesianIndex(i, j, channel) for i in r for j in c] # row-major
            return reduce((a, b) -> beats(x[b], x[a]) ? b : a, at)
        end
        @test places == want
    end
    nan = layer([1.0, NaN, 3.0, -Inf, Inf, NaN], (2,); return_indices = true)
    @test nan[2] == CartesianIndex.([2, layer === max_pool ? 3 : 4, 6])
    f(x) = sum(sin, layer(x, (2, 2); return_indices = true)[1])
    @test Zygote.gradient(f, X)[1] ≈ ForwardDiff.gradient(f, X) rtol = 1.0e-12
end

@testset "indices of adaptive_max_pool" begin
    values, places = adaptive_max_pool(X, (4, 5); return_indices = true)
    @test values == adaptive_max_pool(X, (4, 5)) == X[places]
    low = fill(-Inf, 5)
    @test adaptive_max_pool(low, (2,); return_indices = true)[2] == CartesianIndex.([1, 3])
end

@testset "reports" begin
    x = [5.0, 3.0, 1.0, 2.0, 5.0]
    @test Zygote.gradient(x -> sum(max_pool(x, (2,); stride = 1)), x)[1] == [1, 1, 0, 1, 1]
    @test avg_pool(x, (2,); ceil_mode = true) == [4.0, 1.5, 5.0]
    @test size(max_pool(ones(6, 7), (1, 1); stride = (2, 2), ceil_mode = true)) == (3, 4)
    for (k, s, p, n, want) in (
            (2, 3, 0, 4, [1, 3]),
            (1, 3, 0, 5, [0, 3]),
            (2, 2, 1, 3, [0, 2]),
        )
        @test max_pool(0.0:(n - 1), (k,); stride = s, padding = p, ceil_mode = true) == want
    end
    @test Zygote.gradient(x -> sum(lp_pool(x, 2, (2,))), zeros(4))[1] == zeros(4)
end

@testset "bad input" begin
    @test_throws "max_pool" max_pool(X, (9, 9))
    @test_throws "without any element" max_pool(X, (2, 2); padding = 2)
    @test_throws "kernel" max_pool(X, (0, 2))
    @test_throws "lp_pool" lp_pool(X, 0.5, (2, 2))
    @test_throws "dims" max_pool(X, (2, 2); dims = (1, 9))
end
