using ComponentArrays: ComponentArray
using LinearAlgebra: cholesky, lu, qr
using NestedGradients: NestedGradients, rebuild, unwrap
using Random: Xoshiro
using Test

struct Affine{M, V}
    W::M
    b::V
    name::Symbol
end
(a::Affine)(x) = a.W * x .+ a.b

struct Rigid
    w::Vector{Float64}
end
(r::Rigid)(x) = r.w .* x

struct Elements{T}
    w::Vector{T}
    n::Int
end
(e::Elements)(x) = e.n .* e.w .* x

mutable struct Holder{T}
    w::T
end
(h::Holder)(x) = h.w .* x

function boxed(w)
    f(x) = w .* x
    w = 2 .* w
    return f
end

const W, b = [1.0 2.0; 3.0 4.0], [0.5, -0.5]
const x = [1.0, 2.0]

# name, function, its parameters
const CAPTURES = [
    "nothing" => (sin ∘ sum, (;)),
    "an array and a number" => (
        let W = W, c = 2.0
            x -> c .* (W * x)
        end,
        (c = 2.0, W = W),
    ),
    "what does not vary" => (
        let W = W, n = 2, s = :a, flag = true, T = Float64, r = 1:2
            x -> flag && s === :a && T === Float64 && first(r) == 1 ? n .* (W * x) : x
        end,
        (W = W,),
    ),
    "nested closures" => (
        let g = let b = b
            y -> y .+ b
        end,
            W = W
            x -> g(W * x)
        end,
        (g = (b = b,), W = W),
    ),
    "a callable struct" => (Affine(W, b, :layer), (W = W, b = b)),
    "a composition" => (sum ∘ Affine(W, b, :layer), (inner = (W = W, b = b),)),
    "Fix1" => (Base.Fix1(*, W), (x = W,)),
    "Fix2" => (Base.Fix2(.-, b), (x = b,)),
    "named tuples and tuples" => (
        let ps = (W = W, rest = (b, 3, "x"))
            x -> ps.W * x .+ ps.rest[1]
        end,
        (ps = (W = W, rest = (b, nothing, nothing)),),
    ),
    "a vector of arrays" => (
        let ws = [W, 2W]
            x -> ws[1] * (ws[2] * x)
        end,
        (ws = [W, 2W],),
    ),
    "a Ref" => (
        let r = Ref(2.0)
            x -> r[] .* x
        end,
        (r = (x = 2.0,),),
    ),
    "a Box" => (boxed(b), (w = (contents = 2b,),)),
    "a mutable struct" => (Holder(b), (w = b,)),
    "a ComponentArray" => (
        let ps = ComponentArray(; W, b)
            x -> ps.W * x .+ ps.b
        end,
        (ps = ComponentArray(; W, b),),
    ),
    "elements of a typed array" => (Elements(b, 3), (w = b,)),
    "a random state" => (
        let rng = Xoshiro(1), b = b
            x -> (rand(copy(rng)) > 2 ? x : b .* x)
        end,
        (b = b,),
    ),
    "the same array twice" => (
        let u = b, v = b
            x -> u .* v .* x
        end,
        (u = b, v = b),
    ),
]

# Closures order their fields as the compiler likes, which also renames captures of one name in one scope.
plain(name) = Symbol(replace(string(name), r"^#\d+#" => ""))
named(a::NamedTuple) = Dict(plain(k) => named(v) for (k, v) in pairs(a))
named(a) = a

@testset "unwrap: $name" for (name, (f, expected)) in CAPTURES
    skeleton, params = unwrap(f)
    @test named(params) == named(expected)
    @test skeleton(x, params) == f(x)
    doubled = NestedGradients.unravel(
        params,
        2 .* float(NestedGradients.ravel(params)),
        0,
    )[1]
    isempty(params) || @test skeleton(x, doubled) != f(x)
end

@testset "types are known" begin
    for (name, (f, expected)) in CAPTURES
        name in ("a vector of arrays", "a Box") && continue
        @test @inferred(unwrap(f)) isa Tuple
    end
end

const kept = [1.0]
function filled(w)
    channel = Channel{Any}(1)
    put!(channel, w)
    return channel
end
done(w) = (task = Task(() -> w); schedule(task); wait(task); task)

@testset "what holds arrays and cannot be given others: $(typeof(t))" for t in (
        Set([[1.0]]),
        Set([1.0]),
        Base.IdSet{Any}([[1.0]]),
        Dict([1.0] => 1),
        Dict(1.0 => [1.0]),
        filled([1.0]),
        Core.svec([1.0]),
        WeakRef(kept),
        done([1.0]),
    )
    @test_throws "`inner.t`" unwrap(
        let inner = (t = t,)
            x -> (inner.t; x)
        end,
    )
end

@testset "what cannot be taken apart is an error that names it" begin
    d = Dict(:w => [1.0])
    f = let inner = (table = d,)
        x -> inner.table[:w] .* x
    end
    @test_throws "inner.table" unwrap(f)
    constant = let d = Dict(:n => 3)
        x -> d[:n] .* x
    end
    @test last(unwrap(constant)) == (;)
    for looked_up in (
            Set([1, 2]),
            Set(["a"]),
            Dict(0.5 => :half),
            Channel{Int}(1),
            Set([:a]),
        )
        @test last(unwrap(
            let t = looked_up
                x -> length(t) .* x
            end,
        )) ==
            (;)
    end
    nested = let t = Set([Dict(:w => [1.0])])
        x -> first(t)[:w] .* x
    end
    @test_throws "t` is a Set" unwrap(nested)
end

@testset "a factorization has the element type of its factors" begin
    A = [2.0 1.0; 1.0 2.0]
    for F in (cholesky(A), lu(A), qr(A))
        skeleton, params = unwrap(b -> F \ b)
        narrow = (F = map(a -> a isa AbstractArray{Float64} ? Float32.(a) : a, params.F),)
        y = skeleton(Float32[1, 2], narrow)
        @test y isa Vector{Float32}
        @test y ≈ A \ [1.0, 2.0] rtol = 1.0e-5
    end
end

@testset "a field of fixed type" begin
    dualed = NestedGradients.dual(NestedGradients.Level{1, Nothing}, [1.0, 2.0], [1.0, 0.0])
    @test_throws "Rigid is declared as Vector{Float64}" rebuild(
        Rigid([1.0, 2.0]),
        (w = dualed,),
    )
    elements = rebuild(Elements([1.0, 2.0], 3), (w = dualed,))
    @test elements isa Elements{eltype(dualed)} && elements.w == dualed
end
