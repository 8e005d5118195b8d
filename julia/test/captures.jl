# The gradient of what a function captured, wherever it hid it: right, or an error with the field's path.

using ADTypes: AutoZygote
using ComponentArrays: ComponentArray
using DifferentiationInterface: DifferentiationInterface as DI
using LinearAlgebra: Diagonal, Symmetric
using Lux: Dense, StatefulLuxLayer
using NestedGradients: AutoNested
using Test
using Zygote: Zygote

const nested = AutoNested(AutoZygote())
const x, w = [0.3, -0.5], [1.0, 2.0]

struct Scaled{T}
    w::T
    n::Int
end
(s::Scaled)(x) = sum(s.w .* x.^3)
struct Untyped
    w
end
(s::Untyped)(x) = sum(s.w .* x.^3)
struct Fixed
    w::Vector{Float64}
end
(s::Fixed)(x) = sum(s.w .* x.^3)
mutable struct Holder{T}
    w::T
end
(s::Holder)(x) = sum(s.w .* x.^3)

# name, a function of x that captured what it made of w
const CAPTURES = [
    "a struct in a tuple in a NamedTuple" =>
        w -> (nest = (a = (Scaled(w, 2),), b = 3); x -> nest.a[1](x)),
    "structs in a vector" =>
        w -> (v = [Scaled(w, 2), Scaled(2w, 3)]; x -> v[1](x) + v[2](x)^2),
    "a vector of any functions" =>
        w -> (v = Any[x -> sum(w .* x.^3), sum]; x -> v[1](x) + v[2](x)),
    "a vector of functions" =>
        w -> (v = Function[sum, x -> sum(w.^2 .* x.^2)]; x -> v[1](x) + v[2](x)),
    "a Ref" => w -> (r = Ref(w); x -> sum(r[] .* x.^3)),
    "a Ref of any type" => w -> (r = Ref{Any}(w); x -> sum(r[] .* x.^3)),
    "a Box" => w -> (b = w; f = x -> sum(b .* x.^3); b = 2 .* b; f),
    "a mutable struct" => w -> (m = Holder(w); x -> sum(m.w .* x.^3)),
    "a mutable struct in a NamedTuple" =>
        w -> (m = (a = (Holder(w),),); x -> sum(m.a[1].w .* x.^3)),
    "a mutable callable" => Holder,
    "a field of no type" => Untyped,
    "a field of fixed type" => Fixed,
    "a ComponentArray" =>
        w -> (
            c = ComponentArray(a = w, b = (c = 2w,));
            x -> sum(c.a .* x.^3) + sum(c.b.c .* x.^2)
        ),
    "a view" => w -> (v = view(w, 1:2); x -> sum(v .* x.^3)),
    "an adjoint" => w -> (v = w'; x -> v * x.^3),
    "a diagonal matrix" => w -> (v = Diagonal(w); x -> sum(v * x.^3)),
    "a symmetric matrix" => w -> (v = Symmetric(w * w'); x -> sum(v * x.^3)),
    "a complex number" => w -> (k = Complex(w[1], w[2]); x -> real(k * k) * sum(x.^3)),
    "a composition" => w -> sum ∘ (x -> w .* x.^3),
    "Fix2" => w -> Base.Fix2((x, w) -> sum(w .* x.^3), w),
    "a Some and a Pair" =>
        w -> (s = Some(w); p = :a => 2w; x -> sum(something(s) .* last(p) .* x.^3)),
    "a generator" => w -> (g = (a^2 for a in w); x -> sum(collect(g) .* x.^3)),
    "a loop over it" =>
        w -> x -> (
            s = 0.0;
            for i in eachindex(x)
                s += w[i] * x[i]^3
            end;
            s
        ),
    "a StatefulLuxLayer" =>
        w -> (
            s = StatefulLuxLayer{true}(
                Dense(2 => 1, tanh; use_bias = false),
                (weight = reshape(w, 1, 2),),
                (;),
            );
            x -> only(s(x))
        ),
    "a StatefulLuxLayer in a vector" =>
        w -> (
            s = [StatefulLuxLayer{true}(
                Dense(2 => 1, tanh; use_bias = false),
                (weight = reshape(w, 1, 2),),
                (;),
            )];
            x -> only(s[1](x))
        ),
]

@testset "$name" for (name, capturing) in CAPTURES
    loss(w) = sum(abs2, DI.gradient(capturing(w), nested, x))
    reference = differences(loss, w)
    @test !iszero(reference)
    @test agree(only(Zygote.gradient(loss, w)), reference; rtol = 1.0e-6)
    @test agree(DI.gradient(loss, nested, w), reference; rtol = 1.0e-6)
end

# name, what captured, the path that the error names
const REFUSED = [
    ("a Dict", w -> (d = Dict(:w => w); x -> sum(d[:w] .* x.^3)), "`d`"),
    ("an IdDict", w -> (d = IdDict{Any, Any}(1 => w); x -> sum(d[1] .* x.^3)), "`d`"),
    (
        "a Dict far inside",
        w -> (nest = (a = (Dict(:w => w),),); x -> sum(nest.a[1][:w] .* x.^3)),
        "`nest.a.1`",
    ),
    (
        "a mutable struct in an array (Zygote counts it twice)",
        w -> (m = [Holder(w)]; x -> sum(m[1].w .* x.^3)),
        "in an array",
    ),
]

@testset "refused: $name" for (name, capturing, path) in REFUSED
    loss(w) = sum(abs2, DI.gradient(capturing(w), nested, x))
    @test_throws path Zygote.gradient(loss, w)
    @test_throws path DI.gradient(loss, nested, w)
end
