# Naming intermediate values.

const COLLECTOR = :NestedGradients_sown

"""
    sow(x, name::Symbol)

`x` itself. Inside [`collect_sown`](@ref) its value is also recorded under `name`. Differentiates as the
identity: under forward mode the recorded value is the dual number, whose partials are the named
value's derivative.
"""
function sow(x, name::Symbol)
    y = harvested(x, name)
    record!(y, name)
    return y
end

function record!(x, name)
    sown = get(task_local_storage(), COLLECTOR, nothing)
    sown === nothing && return nothing
    haskey(sown, name) && twice(name)
    sown[name] = x
    return nothing
end
twice(name) = throw(ArgumentError(
    "the name :$name was sown twice in one run; give each sown value a name of its own",
))
ChainRulesCore.@non_differentiable record!(::Any, ::Any)

"""
    collect_sown(f) -> (result, Dict{Symbol,Any})

Call `f()` and return its result with the values that were sown on the way, by name. Values sown in
other tasks are not collected, and an inner `collect_sown` keeps its own. Throws an `ArgumentError` if a
name is sown twice.

```jldoctest
julia> using NestedGradients

julia> result, sown = collect_sown(() -> 2 * sow(3.0, :inner));

julia> result, sown[:inner]
(6.0, 3.0)
```
"""
function collect_sown(f)
    sown = Dict{Symbol, Any}()
    return task_local_storage(f, COLLECTOR, sown), sown
end
