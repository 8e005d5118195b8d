# Named values as arguments and results of the function that sows them, for pybridge's reap.

"""
    Harvested(f)

The functional form of `f`: `(args..., eps) -> (f(args...), values)`. `values` is a `NamedTuple` of what
`f` sows, in order. `eps`, a `NamedTuple` or `nothing`, is added to the values where they are sown. It is
zero, and what counts is the derivative: that of the result in `eps` is the cotangent of a named value;
a tangent of `eps` enters the value's, and a covector of `values` the value's cotangent, in place.

```jldoctest
julia> using NestedGradients, Zygote

julia> h = NestedGradients.Harvested(x -> sin(sow(x^3, :cube)));

julia> h(2.0, nothing)[2]
(cube = 8.0,)

julia> Zygote.gradient((x, eps) -> first(h(x, eps)), 0.0, (cube = 0.0,))
(0.0, (cube = 1.0,))
```
"""
struct Harvested{F}
    f::F
end

const HARVEST = :NestedGradients_harvest

# One call of a harvested function; `pokes` and `cotangents` belong to a reverse pass over it.
mutable struct Harvest
    eps::Any
    values::Vector{Pair{Symbol, Any}}
    pokes::Any
    cotangents::Dict{Symbol, Any}
end
Harvest(eps) = Harvest(eps, Pair{Symbol, Any}[], nothing, Dict{Symbol, Any}())

harvest() = get(task_local_storage(), HARVEST, nothing)::Union{Nothing, Harvest}
entry(nest, name) = nest === nothing ? nothing : get(nest, name, nothing)

"`x` with the perturbation of `name` added, recorded by the call of a harvested function around it."
function harvested(x, name)
    h = harvest()
    h === nothing && return x
    any(p -> first(p) === name, h.values) && twice(name)
    y = perturbed(x, entry(h.eps, name))
    push!(h.values, name => y)
    return y
end

perturbed(x, ::Nothing) = x
perturbed(x, e) = still(e) ? x : plus(x, e)
still(e::Union{Number, AbstractArray}) = eltype(e) <:
    Union{AbstractFloat, Complex{<:AbstractFloat}}
still(e::Union{Tuple, NamedTuple}) = all(still, e)
still(::Nothing) = true
plus(x, e) = e === nothing ? x : shifted(x, e)
shifted(x::Number, e) = x + e
shifted(x::AbstractArray, e) = x .+ e
shifted(x::Union{Tuple, NamedTuple}, e) = map(plus, x, e)

# ---- the call, and its reverse pass ----

function (H::Harvested)(args...)
    h = Harvest(last(args))
    y = task_local_storage(() -> H.f(Base.front(args)...), HARVEST, h)
    return y, NamedTuple(h.values)
end

function ChainRulesCore.rrule(cfg::RuleConfig{>:HasReverseMode}, H::Harvested, args...)
    h = Harvest(last(args))
    y, back = task_local_storage(HARVEST, h) do
        ChainRulesCore.rrule_via_ad(cfg, H.f, Base.front(args)...)
    end
    values = NamedTuple(h.values)
    function harvested_pullback(Δ)
        dy, h.pokes = nests(plain(Δ), (nothing, nothing))
        empty!(h.cotangents)
        df, dargs... = back(dy === nothing ? zeroof(y) : dy)
        for name in keys(values)
            iszerodirection(entry(h.pokes, name)) && continue
            haskey(h.cotangents, name) && continue
            throw(ArgumentError(
                "the reverse pass did not reach the value sown as :$name, since its result is not used. Go on with the value that sow returns, or differentiate it in forward mode",
            ))
        end
        deps = h.eps === nothing ?
            NoTangent() :
            tangent(
                cfg,
                h.eps,
                NamedTuple(k => get(h.cotangents, k, nothing) for k in keys(h.eps))
            )
        return Tangent{typeof(H)}(; f = df), dargs..., deps
    end
    return (y, values), harvested_pullback
end

function ChainRulesCore.rrule(::typeof(sow), x, name::Symbol)
    y = sow(x, name)
    h = harvest()
    function sow_pullback(Δ)
        h === nothing && return NoTangent(), Δ, NoTangent()
        c = added(plain(Δ), entry(h.pokes, name))
        c === nothing && return NoTangent(), ZeroTangent(), NoTangent()
        h.cotangents[name] = c
        return NoTangent(), c, NoTangent()
    end
    return y, sow_pullback
end

zeroof(y::Union{Number, AbstractArray{<:Number}}) = zero(y)
zeroof(y::Union{Tuple, NamedTuple}) = map(zeroof, y)
zeroof(y::AbstractArray) = map(zeroof, y)
zeroof(y) = nothing

"""
    influential(H::Harvested, args, eps) -> Vector{Bool}

For each name of `eps`: does the result depend on the value sown there? By structure, from one call on
dual numbers a name.
"""
function influential(H::Harvested, args, eps)
    return map(collect(keys(eps))) do name
        direction = NamedTuple{(name,)}((eps[name],))
        slots = (nothing, (map(_ -> nothing, args)..., direction))
        y = form(nothing, (z...) -> first(H(z...)), (args..., eps), slots, Val(0))
        return !iszerodirection(y)
    end
end
