# What a second-order pass costs, as a ratio to the gradient of the same model in the same run.
#
#     julia --project=ENV benchmarks/julia/second_order.jl [repetitions]
#
# Times are processor times of the one thread that works (BLAS is set to one thread), so that other load
# on the machine counts little; each figure is a median, the contenders take turns.
#
# The pass is T_1: dual numbers on x, one reverse pass, cotangents of x and of the parameters. Beside it
# in the same interleaved run: ForwardDiff's own duals (an `Array` of them), nested AD as Lux does it and
# as `nested_gradient` does it (the gradient of a sum of squares of an inner gradient).
# The bar: at most 3 gradients on the dense chains and the convolutional one.
#
# Then, on the same models with one sample: the product (H_xx v, H_px v) by `mixed_vjp`, by Lux's nested AD,
# and H_xx v alone by the whole `Zygote.hessian`, which has no H_px and grows with the square of the batch.

using ADTypes: AutoZygote
using ForwardDiff: Dual
using LinearAlgebra: BLAS, dot
using Lux: Lux, Chain, Conv, Dense, FlattenLayer, StatefulLuxLayer
using NestedGradients: Unit, form, mixed_vjp, nested_gradient
using Random: Xoshiro
using Statistics: median
using Zygote: Zygote

const SAMPLES = !isempty(ARGS) ? parse(Int, ARGS[1]) : 25

chain(sizes) = Chain((
    Dense(sizes[i] => sizes[i + 1], i < length(sizes) - 1 ? tanh : identity)
    for i in 1:(length(sizes) - 1)
)...)

# the tag of ordinary dual numbers, which have no methods of ours
struct PlainTag end

const MODELS = [
    ("dense 2-64-64-1, batch 1024", chain((2, 64, 64, 1)), (2, 1024)),
    ("dense 64-256-256-1, batch 512", chain((64, 256, 256, 1)), (64, 512)),
    ("dense 16-512-512-512-1, batch 256", chain((16, 512, 512, 512, 1)), (16, 256)),
    (
        "conv 16x16x3, 3x3 to 16 and 32, batch 32",
        Chain(
            Conv((3, 3), 3 => 16, tanh),
            Conv((3, 3), 16 => 32, tanh),
            FlattenLayer(),
            Dense(12 * 12 * 32 => 1),
        ),
        (16, 16, 3, 32),
    ),
]

include("cputime.jl")

function medians(contenders; samples = SAMPLES, tidy = false)
    times = [Float64[] for _ in contenders]
    foreach(f -> (f(); f()), contenders)
    for _ in 1:samples, (f, t) in zip(contenders, times)
        tidy && GC.gc(false) # nobody pays for the garbage of a whole Hessian
        start = cputime()
        f()
        push!(t, cputime() - start)
    end
    return map(median, times)
end

function measure(name, model, dims)
    rng = Xoshiro(0)
    ps, state = Lux.setup(rng, model)
    st = Lux.testmode(state)
    x, v = randn(rng, Float32, dims...), randn(rng, Float32, dims...)
    loss(x, ps) = sum(first(model(x, ps, st)))
    plain = map((a, b) -> Dual{PlainTag}(a, b), x, v)
    inner(s) = sum(abs2, only(Zygote.gradient(sum ∘ s, x)))
    lux(ps) = inner(StatefulLuxLayer{true}(model, ps, st))
    ours(ps) = sum(abs2, nested_gradient(loss, AutoZygote(), x, ps))
    contenders = [
        () -> Zygote.gradient(loss, x, ps),
        () -> form(AutoZygote(), loss, (x, ps), (Unit(), (v, nothing), nothing), Val(2)),
        () -> Zygote.gradient(loss, plain, ps),
        () -> Zygote.gradient(ours, ps),
        () -> Zygote.gradient(lux, ps),
    ]
    gradient, pass, duals, nested, luxs = medians(contenders)
    row = [pass, duals, nested, luxs] ./ gradient
    printrow(name, gradient, row)
    return first(row)
end

function printrow(name, gradient, ratios)
    println(
        rpad(name, 44),
        lpad(round(1.0e3 * gradient; digits = 2), 10),
        join(lpad(round(r; digits = 2), 12) for r in ratios)
    )
end
function printhead(names...)
    println(rpad("model", 44), lpad("grad (ms)", 10), join(lpad(n, 12) for n in names))
end

function measure_products(name, model, dims)
    rng = Xoshiro(0)
    ps, state = Lux.setup(rng, model)
    st = Lux.testmode(state)
    one_sample = (Base.front(dims)..., 1)
    x, v = randn(rng, Float32, one_sample...), randn(rng, Float32, one_sample...)
    loss(x, ps) = sum(first(model(x, ps, st)))
    along(x, ps) = dot(
        v,
        only(Zygote.gradient(sum ∘ StatefulLuxLayer{true}(model, ps, st), x)),
    )
    contenders = [
        () -> Zygote.gradient(loss, x, ps),
        () -> mixed_vjp(loss, AutoZygote(), x, v, ps),
        () -> Zygote.gradient(along, x, ps),
        () -> reshape(Zygote.hessian(x -> loss(x, ps), x) * vec(v), one_sample),
    ]
    gradient, products... = medians(contenders; samples = max(5, SAMPLES ÷ 3), tidy = true)
    printrow(first(split(name, ",")) * ", one sample", gradient, products ./ gradient)
end

function main()
    BLAS.set_num_threads(1)
    println(
        "medians of $SAMPLES interleaved runs, ",
        BLAS.get_num_threads(),
        " BLAS threads; all but the first column in gradients",
    )
    printhead("T_1 ours", "T_1 plain", "nested ours", "nested Lux")
    ratios = [measure(model...) for model in MODELS]
    over = count(>(3), ratios)
    println(
        over == 0 ?
            "every second-order pass costs at most 3 gradients" :
            "$over of $(length(ratios)) passes cost more than 3 gradients",
    )
    println()
    printhead("mixed_vjp", "Lux", "hessian * v")
    foreach(model -> measure_products(model...), MODELS)
end

main()
