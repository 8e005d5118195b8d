# The gradient of a bounded loop beside Zygote through a plain `while` of the same steps.
#
#     julia --project=ENV benchmarks/julia/loops.jl [repetitions]
#
# Times are processor times of the one thread that works (BLAS is set to one thread); each figure is a
# median, the contenders take turns. The ratio is ours to Zygote's through the plain loop, which keeps
# every step's pullback on its tape; ours keeps states and evaluates each step once more.

using LinearAlgebra: BLAS
using NestedGradients: bounded_while_loop
using Random: Xoshiro
using Statistics: median
using Zygote: Zygote

const SAMPLES = !isempty(ARGS) ? parse(Int, ARGS[1]) : 25

include("cputime.jl")

net(w, x) = tanh.(w[3] * tanh.(w[2] * tanh.(w[1] * x)))

function bounded(w, x, n; options...)
    body(s) = (net(w, s[1]), s[2] + 1)
    return sum(bounded_while_loop(
        s -> s[2] < n,
        body,
        (x, 0);
        max_steps = 4096,
        options...,
    )[1])
end

function plain(w, x, n)
    i = 0
    while i < n
        x = net(w, x)
        i += 1
    end
    return sum(x)
end

function medians(contenders)
    times = [Float64[] for _ in contenders]
    foreach(f -> (f(); f()), contenders)
    for _ in 1:SAMPLES, (f, t) in zip(contenders, times)
        start = cputime()
        f()
        push!(t, cputime() - start)
    end
    return median.(times)
end

function main()
    BLAS.set_num_threads(1)
    rng = Xoshiro(0)
    for (width, batch) in ((4, 1), (64, 64), (512, 16)), n in (8, 256)
        w = ntuple(k -> randn(rng, Float32, width, width) ./ Float32(sqrt(width)), 3)
        x = randn(rng, Float32, width, batch)
        all(
            isapprox.(
                Zygote.gradient(w -> bounded(w, x, n), w)[1],
                Zygote.gradient(w -> plain(w, x, n), w)[1];
                rtol = 1.0e-3,
            ),
        ) ||
            error("the gradients differ")
        reference, ours, few = medians((
            () -> Zygote.gradient(w -> plain(w, x, n), w),
            () -> Zygote.gradient(w -> bounded(w, x, n), w),
            () -> Zygote.gradient(w -> bounded(w, x, n; checkpoints = 4), w),
        ))
        show(a) = rpad(round(a; sigdigits = 3), 8)
        println(
            "three layers of $width, batch $batch, $n steps: plain $(show(1.0e3 * reference)) ms; ",
            "bounded, ratio $(show(ours / reference)); 4 checkpoints, ratio $(show(few / reference))",
        )
    end
    return nothing
end

main()
