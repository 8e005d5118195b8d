# Lux's layers under dual numbers: the second-order pass in the point and the parameters, against
# differences of the first-order pass, which is itself against differences of the layer.

using ADTypes: AutoZygote
using LinearAlgebra: dot
using Lux: Lux
using Lux:
    BatchNorm,
    Bilinear,
    Chain,
    Conv,
    ConvTranspose,
    Dense,
    FlattenLayer,
    GlobalMaxPool,
    GlobalMeanPool,
    GroupNorm,
    GRUCell,
    InstanceNorm,
    LayerNorm,
    LSTMCell,
    MaxPool,
    MeanPool,
    MultiHeadAttention,
    Recurrence,
    RNNCell,
    SkipConnection,
    StatefulLuxLayer,
    gelu,
    relu,
    sigmoid
using NestedGradients: AutoNested, Level, dual, form
using NNlib: NNlib
using Random: Xoshiro
using Test
using Zygote: Zygote

const backend = AutoZygote()

float64(x) = Lux.fmap(a -> a isa AbstractArray{<:AbstractFloat} ? Float64.(a) : a, x)
wave(dims...; phase = 0.0) = reshape(sin.(1.7 .* (1:prod(dims)) .+ phase), dims)

# name, layer, size of the input
const LAYERS = [
    [
        ("Dense, $σ", Dense(2 => 3, σ), (2, 4))
        for σ in (identity, tanh, relu, gelu, sigmoid, x -> x^2)
    ]
    ("Dense without bias", Dense(2 => 3, tanh; use_bias = false), (2, 4))
    ("Dense of one sample", Dense(2 => 3, tanh), (2,))
    ("a chain", Chain(Dense(2 => 3, tanh), Dense(3 => 2, relu), Dense(2 => 1)), (2, 4))
    ("SkipConnection", SkipConnection(Dense(2 => 2, tanh), +), (2, 3))
    ("Bilinear", Bilinear((2, 2) => 2, tanh), (2, 3))
    ("Conv", Conv((2, 2), 1 => 2, tanh), (4, 3, 1, 2))
    (
        "Conv with stride and padding",
        Conv((3, 2), 2 => 2, relu; stride = 2, pad = 1),
        (4, 3, 2, 1),
    )
    ("Conv in groups", Conv((2, 2), 2 => 4; groups = 2), (3, 3, 2, 1))
    ("Conv of one dimension", Conv((3,), 1 => 2, gelu), (5, 1, 2))
    (
        "cross-correlation",
        Conv((2, 2), 1 => 1, tanh; cross_correlation = true),
        (3, 3, 1, 2),
    )
    ("ConvTranspose", ConvTranspose((2, 2), 2 => 1, tanh), (3, 2, 2, 1))
    ("BatchNorm in test mode", BatchNorm(2, tanh), (2, 4))
    ("BatchNorm of images", BatchNorm(2), (2, 2, 2, 2))
    ("LayerNorm", LayerNorm((2,), tanh), (2, 4))
    ("GroupNorm", GroupNorm(4, 2), (2, 4, 2))
    ("InstanceNorm", InstanceNorm(2; affine = true), (3, 2, 2))
    ("MaxPool", Chain(Conv((2, 2), 1 => 1, tanh), MaxPool((2, 2))), (5, 5, 1, 1))
    ("MeanPool", Chain(Conv((2, 2), 1 => 1, tanh), MeanPool((2, 2))), (5, 5, 1, 1))
    (
        "GlobalMeanPool",
        Chain(Conv((2, 2), 1 => 2, tanh), GlobalMeanPool(), FlattenLayer()),
        (3, 3, 1, 2),
    )
    (
        "GlobalMaxPool",
        Chain(Conv((2, 2), 1 => 2, tanh), GlobalMaxPool(), FlattenLayer()),
        (3, 3, 1, 2),
    )
    ("RNN", Recurrence(RNNCell(2 => 2)), (2, 3, 2))
    ("GRU", Recurrence(GRUCell(2 => 2)), (2, 3, 2))
    ("LSTM", Recurrence(LSTMCell(2 => 2)), (2, 3, 2))
    ("attention", Chain(MultiHeadAttention(2; nheads = 2), first), (2, 3, 1))
]

# Along two directions in which every input and parameter moves: a wrong cotangent of any shows in all.
function checked(loss, z, u)
    first_order(z) = form(backend, loss, z, (1.0, nothing), Val(1))
    second = form(backend, loss, z, (1.0, u, nothing), Val(2))
    alone = form(backend, loss, z, (1.0, (u[1], nothing), nothing), Val(2)) # the usual pass
    flat = flatten(z)
    along(g, w) = dot(flatten(without_nothing(g, z)), w)
    for k in 1:2
        w = cos.(1.3 .* k .* eachindex(flat) .+ k)
        slope(f) = differences(t -> f(refill(z, flat .+ t .* w)), 0.0)
        @test agree(along(first_order(z), w), slope(z -> loss(z...)); rtol = 1.0e-6)
        pulled(z) = along(first_order(z), flatten(u))
        @test agree(along(second, w), slope(pulled); rtol = 1.0e-5, atol = 1.0e-7)
        pulled_alone(z) = dot(first_order(z)[1], u[1])
        @test agree(along(alone, w), slope(pulled_alone); rtol = 1.0e-5, atol = 1.0e-7)
    end
end
without_nothing(c, z) = c
without_nothing(::Nothing, z) = z isa Union{Tuple, NamedTuple} ?
    map(a -> without_nothing(nothing, a), z) :
    z isa Union{AbstractFloat, AbstractArray{<:AbstractFloat}} ? zero(z) : z
without_nothing(c::Tuple, z::Tuple) = map(without_nothing, c, z)
without_nothing(c::NamedTuple, z::NamedTuple) = map(without_nothing, c, z)

@testset "$name" for (name, layer, dims) in LAYERS
    ps, st = Lux.setup(Xoshiro(1), layer)
    ps, st = float64(ps), float64(Lux.testmode(st))
    ps = refill(ps, flatten(ps) .+ 0.1 .* sin.(1:length(flatten(ps))))
    x = wave(dims...)
    function loss(x, ps)
        y = first(layer(x, ps, st))
        return sum(abs2, y) / 2 + sum(sin, y)
    end
    u = (wave(dims...; phase = 1.0), refill(ps, cos.(1:length(flatten(ps)))))
    checked(loss, (x, ps), u)
end

# ---- where other rules for dual numbers are not the derivative ----

const G = Level{1, Nothing}
values_of(a) = map(d -> d.value, collect(a))
partials_of(a) = map(d -> d.partials[1], collect(a))

@testset "logsoftmax (Lux's method for dual numbers returns the softmax as its value)" begin
    x, v = wave(3, 2), wave(3, 2; phase = 1.0)
    y = NNlib.logsoftmax(dual(G, x, v))
    reference(x) = x .- log.(sum(exp, x; dims = 1))
    @test values_of(y) ≈ reference(x)
    @test partials_of(y) ≈
        map(i -> differences(t -> reference(x .+ t .* v)[i], 0.0), CartesianIndices(x))
    @test partials_of(NNlib.softmax(dual(G, x, v))) ≈
        map(
            i -> differences(t -> exp.(reference(x .+ t .* v))[i], 0.0),
            CartesianIndices(x),
        )
end

@testset "the gradient of meanpool (Lux's method multiplies by the partials of x)" begin
    x, v = wave(4, 4, 1, 1), wave(4, 4, 1, 1; phase = 1.0)
    loss(x) = sum(abs2, NNlib.meanpool(x, (2, 2)))
    pulled(x) = dot(only(form(backend, loss, (x,), (1.0, nothing), Val(1))), v)
    @test agree(
        only(form(backend, loss, (x,), (1.0, (v,), nothing), Val(2))),
        differences(pulled, x),
    )
end

@testset "maxpool with padding, strides and equal cells" begin
    x = reshape([1.0, 3.0, 3.0, 2.0, 0.0, 3.0, 1.0, 1.0, 2.0], 3, 3, 1, 1)
    v = wave(3, 3, 1, 1)
    y = NNlib.maxpool(dual(G, x, v), (2, 2); stride = 1, pad = 1)
    @test values_of(y) == NNlib.maxpool(x, (2, 2); stride = 1, pad = 1)
    @test all(p -> p in v, partials_of(y)) # one cell each, also of equal ones
    gradient = only(form(
        backend,
        x -> sum(NNlib.maxpool(x, (2, 2))),
        (x,),
        (1.0, (v,), nothing),
        Val(2),
    ))
    @test gradient === nothing || iszero(gradient)
end

@testset "at the corner of relu" begin
    h(x) = sum(NNlib.relu.(x).^2 .* 3)
    @test only(form(
        backend,
        h,
        ([0.0, 1.0],),
        (1.0, ([-1.0, 1.0],), nothing),
        Val(2),
    ))[2] ==
        6.0
    @test only(form(backend, h, ([0.0, 1.0],), (1.0, nothing), Val(1))) == [0.0, 6.0]
end

@testset "Lux's operators with a nested backend, also in the covector" begin
    nested = AutoNested(backend)
    layer = Chain(Dense(2 => 3, tanh), Dense(3 => 2))
    ps, st = Lux.setup(Xoshiro(1), layer)
    ps, st = float64(ps), float64(Lux.testmode(st))
    x, u = wave(2, 3), wave(2, 3; phase = 1.0)
    model(ps) = StatefulLuxLayer{true}(layer, ps, st)
    for loss in (
            (ps, x, u) -> sum(abs2, Lux.batched_jacobian(model(ps), nested, x)) + sum(u),
            (ps, x, u) -> sum(abs2, Lux.vector_jacobian_product(model(ps), nested, x, u)),
            (ps, x, u) -> sum(abs2, Lux.jacobian_vector_product(model(ps), nested, x, u)),
        )
        z = (ps, x, u)
        @test agree(
            Zygote.gradient(loss, z...),
            differences(z -> loss(z...), z);
            rtol = 1.0e-6,
        )
    end
    theirs = Lux.batched_jacobian(model(ps), Lux.AutoForwardDiff(), x)
    @test Lux.batched_jacobian(model(ps), nested, x) ≈ theirs
end
