# The public reports of nested differentiation that went wrong, as their authors wrote them: with Zygote,
# ForwardDiff and Lux alone. Prints what each gives today beside the right value (differences).
# The same cases with NestedGradients are test/reports.jl of the package.
#
#     julia --compile=min --project=ENV benchmarks/julia/reports.jl

using ForwardDiff: ForwardDiff
using LinearAlgebra: dot
using Lux: Lux, BatchNorm, Chain, Dense, StatefulLuxLayer, gelu
using Random: Xoshiro
using Zygote: Zygote

include("../../julia/test/differences.jl")

float64(x) = Lux.fmap(a -> a isa AbstractArray{<:AbstractFloat} ? Float64.(a) : a, x)
function model_of(layer)
    ps, st = Lux.setup(Xoshiro(1), layer)
    return float64(ps), float64(Lux.testmode(st))
end
gradient(f, x) = only(Zygote.gradient(f, x))
stateful(layer, ps, st) = StatefulLuxLayer{true}(layer, ps, st)

const H, beta = 3, 0.7
const linear, gelus = Dense(3 => 3), Dense(5 => 5, gelu)
const two = Chain(Dense(2 => 4, tanh), Dense(4 => 2))
const normed = Chain(Dense(2 => 3), BatchNorm(3), Dense(3 => 2, tanh))
const small, critic = Dense(2 => 2, tanh), Chain(Dense(2 => 4, tanh), Dense(4 => 1))
const pinn = Chain(Dense(1 => 4, tanh), Dense(4 => 1))
const x3, x5, y5 = [0.1, 0.2, 0.3], [0.1, -0.2, 0.3, 0.4, -0.5], [0.5, 0.1, -0.7, 0.2, 0.3]
const batch = [0.1 -0.3 0.7; 0.2 0.4 -0.6]

const LINEAR = model_of(linear)
parameters(layer) = first(model_of(layer))
state(layer) = Zygote.ignore(() -> last(model_of(layer)))
model(layer) = (x, ps) -> first(layer(x, ps, state(layer)))
penalty(g) = sum((sqrt.(sum(abs2, g; dims = 1)) .- 1).^2)
u(ps) = t -> only(model(pinn)([t], ps))
slope(f) = t -> ForwardDiff.derivative(f, t)
shaped(p) = (weight = reshape(p[1:4], 2, 2), bias = p[5:6])

# report, how, the loss as reported, what it is differentiated in
const REPORTS = [
    (
        "Zygote#1218",
        "ForwardDiff inside",
        y -> ForwardDiff.derivative(x -> x * sum(y), 0.1),
        [1.0, 2.0, 3.0],
    ),
    (
        "Zygote#1268",
        "ForwardDiff inside",
        b -> sum(ForwardDiff.jacobian(x -> x.^3, x3) * x3 .+ b),
        [1.0, 2.0, 3.0],
    ),
    (
        "Zygote#1268",
        "Zygote inside",
        b -> sum(only(Zygote.jacobian(x -> x.^3, x3)) * x3 .+ b),
        [1.0, 2.0, 3.0],
    ),
    (
        "Zygote#1264",
        "Zygote.hessian",
        ps -> sum(Zygote.hessian(x -> sum(x.^3), x3) * x3 .+ ps.bias),
        (bias = [1.0, 2.0, 3.0],),
    ),
    ("Zygote#1013", "Zygote inside", x -> gradient(x -> x^2 * H, x), 1.0),
    (
        "Zygote#1271",
        "Zygote inside",
        x -> sum(gradient(x -> sum(x.^2 .* beta), x)),
        [1.0, 2.0],
    ),
    (
        "Lux#630",
        "Lux's rule",
        v -> sum(abs2, gradient((z -> dot(v, z)) ∘ stateful(linear, LINEAR...), x3)),
        [1.0, -1.0, 2.0],
    ),
    (
        "Lux#743",
        "Lux's rule",
        function (ps)
            s = stateful(two, ps, state(two))
            return sum(abs2, gradient(sum ∘ s, batch)) + sum(abs2, s(batch))
        end,
        parameters(two),
    ),
    (
        "Lux#614",
        "Lux's rule",
        function (ps)
            s = stateful(gelus, ps, state(gelus))
            return sum(ForwardDiff.jacobian(s, x5) * ForwardDiff.jacobian(s, y5))
        end,
        parameters(gelus),
    ),
    (
        "Lux#604",
        "Lux.batched_jacobian",
        ps -> sum(
            abs2,
            Lux.batched_jacobian(
                stateful(normed, ps, state(normed)),
                Lux.AutoForwardDiff(),
                batch,
            ),
        ),
        parameters(normed),
    ),
    (
        "Lux#610",
        "ForwardDiff inside",
        p -> sum(abs2, ForwardDiff.jacobian(p -> model(small)([0.1, -0.3], shaped(p)), p)),
        [0.3, -0.2, 0.5, 0.1, 0.1, 0.2],
    ),
    (
        "Lux#610",
        "Zygote inside",
        p -> sum(abs2, only(Zygote.jacobian(p -> model(small)([0.1, -0.3], shaped(p)), p))),
        [0.3, -0.2, 0.5, 0.1, 0.1, 0.2],
    ),
    (
        "Zygote#1262",
        "Zygote inside",
        ps -> penalty(gradient(x -> sum(model(critic)(x, ps)), batch)),
        parameters(critic),
    ),
    (
        "Zygote#1262",
        "Lux's rule",
        ps -> penalty(gradient(sum ∘ stateful(critic, ps, state(critic)), batch)),
        parameters(critic),
    ),
    (
        "Flux#1966",
        "ForwardDiff inside",
        ps -> sum(
            t -> abs2(slope(slope(u(ps)))(t) + slope(u(ps))(t) + u(ps)(t)),
            [0.1, 0.4, 0.8],
        ),
        parameters(pinn),
    ),
    (
        "NeuralPDE#725, SciMLSensitivity#772",
        "ForwardDiff inside",
        p -> sum(
            abs2,
            ForwardDiff.jacobian(Base.Fix2((u, p) -> p[1] .* u.^2 .+ p[2], p), [0.3, 0.5]),
        ),
        [1.5, 0.2],
    ),
    (
        "NeuralPDE#725, SciMLSensitivity#772",
        "Zygote inside",
        p -> sum(
            abs2,
            only(Zygote.jacobian(Base.Fix2((u, p) -> p[1] .* u.^2 .+ p[2], p), [0.3, 0.5])),
        ),
        [1.5, 0.2],
    ),
]

function outcome(loss, z)
    right = nothing
    got = try
        right = differences(loss, z)
        gradient(loss, z)
    catch error
        return "an error: $(first(replace(sprint(showerror, error), r"\s+" => " "), 60))"
    end
    agree(got, right; rtol = 1.0e-5, atol = 1.0e-7) && return "right"
    got === nothing && return "`nothing`"
    a, b = flatten(got), flatten(right)
    return length(a) == length(b) ?
        "wrong by a factor up to $(round(maximum(abs.(a ./ b)); digits = 2)), down to $(round(minimum(abs.(a ./ b)); digits = 2))" :
        "parts are missing"
end

function main()
    println("| report | how | with Zygote, ForwardDiff and Lux alone |\n|---|---|---|")
    for (name, how, loss, z) in REPORTS
        println("| $name | $how | $(outcome(loss, z)) |")
    end
    x = Ref(Ref(1.0 + im))
    got = only(Zygote.gradient(x -> abs2(x[].x) + 7real(x[].x), x))
    println("| Zygote#1111 | Zygote | $(got) (right: 9 + 2im) |")
end

main()
