# Loops with a bound, whose gradient costs what their steps cost.
#
# The pullback runs the steps from the last to the first. Of the trajectory it needs every state once,
# in that order: they are kept while they fit, and otherwise computed again from a few of them, on the
# schedule that computes no step more often than it must.

# The most that `checkpoints = :auto` keeps of states.
const BUDGET_BYTES = 2^24

"""
    bounded_while_loop(cond, body, init; max_steps, checkpoints = :auto, on_limit = :return,
                       return_steps = false)

Repeat `body` while `cond` holds, at most `max_steps` times. The value is that of

    val, steps = init, 0
    while steps < max_steps && cond(val)
        val, steps = body(val), steps + 1
    end

It has a `ChainRulesCore.rrule`, so Zygote and what stands on it differentiate it with respect to
`init` and to all that `body` captures, and a `frule`. `ForwardDiff` runs through it as through any
Julia code, so forward over reverse works too. Neither `cond` nor `body` may change its argument.

- `max_steps`: a non-negative integer, or `nothing` for no bound, and then there is no reverse mode.
- `checkpoints`: how many states the pullback may hold at once; `:auto` holds what fits into 16 MiB.
  Beyond that, time grows by a factor of the logarithm of the steps taken.
- `on_limit`: what to do if the loop ends at `max_steps` while `cond` still holds: `:return` the value,
  fill its floating-point numbers with `:nan`, or `:raise` an `ErrorException`.
- `return_steps`: return `(val, steps)`.

Throws an `ArgumentError` for other options, and for reverse mode of a loop without a bound.

# Example

```jldoctest
julia> using NestedGradients, ForwardDiff

julia> root(a) = bounded_while_loop(x -> abs(x^2 - a) > 1e-12, x -> (x + a / x) / 2, a; max_steps = 50);

julia> round(root(9.0); digits = 6), round(ForwardDiff.derivative(root, 9.0); digits = 6)
(3.0, 0.166667)
```

The schedule: A. Griewank and A. Walther, Algorithm 799: revolve, ACM Transactions on Mathematical
Software 26 (2000).
"""
function bounded_while_loop(
    cond,
    body,
    init;
    max_steps,
    checkpoints = :auto,
    on_limit = :return,
    return_steps = false,
)
    check_options(max_steps, checkpoints, on_limit)
    val, steps = run_bounded(cond, body, init, max_steps, checkpoints)
    if on_limit !== :return && steps == max_steps && cond(val)
        on_limit === :raise && throw_at_limit(max_steps)
        val = spoil(val)
    end
    return return_steps ? (val, steps) : val
end

function check_options(max_steps, checkpoints, on_limit)
    bound = max_steps === nothing || (max_steps isa Integer && !(max_steps isa Bool))
    bound && (max_steps === nothing || max_steps >= 0) ||
        throw(ArgumentError(
            "max_steps is $(repr(max_steps)): it must be a non-negative integer, or nothing",
        ))
    kept = checkpoints isa Integer && !(checkpoints isa Bool) && checkpoints >= 1
    kept ||
        checkpoints === :auto ||
        throw(ArgumentError(
            "checkpoints is $(repr(checkpoints)): it must be :auto or a positive integer",
        ))
    on_limit in (:return, :nan, :raise) ||
        throw(ArgumentError(
            "on_limit is $(repr(on_limit)): it must be :return, :nan or :raise",
        ))
    return nothing
end

function throw_at_limit(max_steps)
    return error(
        "a bounded loop took max_steps = $max_steps steps and cond still holds: raise max_steps, or " *
            "use on_limit = :return or :nan",
    )
end

@non_differentiable check_options(::Any, ::Any, ::Any)
@non_differentiable throw_at_limit(::Any)

# A factor, so that the gradient is NaN too and not a silent zero.
spoil(x::Union{AbstractFloat, Complex{<:AbstractFloat}, Dual}) = x * NaN
spoil(x::AbstractArray{<:Union{AbstractFloat, Complex{<:AbstractFloat}, Dual}}) = x .*
    eltype(x)(NaN)
spoil(x::Union{Tuple, NamedTuple}) = map(spoil, x)
spoil(x) = x

# The final value and the number of steps; the function that the rules are about.
function run_bounded(cond, body, init, max_steps, checkpoints)
    val, steps = init, 0
    while (max_steps === nothing || steps < max_steps) && cond(val)
        val, steps = body(val), steps + 1
    end
    return val, steps
end

function ChainRulesCore.frule(
    config::RuleConfig{>:HasForwardsMode},
    dots::Tuple,
    ::typeof(run_bounded),
    cond,
    body,
    init,
    max_steps,
    checkpoints,
)
    _, _, dbody, dval = dots
    # ChainRulesCore has no method of this of its own: each forward mode brings one for its config.
    push = Base.inferencebarrier(ChainRulesCore.frule_via_ad)
    val, steps = init, 0
    while (max_steps === nothing || steps < max_steps) && cond(val)
        val, dval = push(config, (dbody, dval), body, val)
        steps += 1
    end
    out = (val, steps)
    return out, Tangent{typeof(out)}(dval, NoTangent())
end

function ChainRulesCore.rrule(
    config::RuleConfig{>:HasReverseMode},
    ::typeof(run_bounded),
    cond,
    body,
    init,
    max_steps,
    checkpoints,
)
    max_steps === nothing &&
        throw(ArgumentError(
            "reverse mode of a loop with max_steps = nothing: the pullback needs a bound on what it " *
                "keeps. Give max_steps an integer, or use forward mode.",
        ))
    slots = checkpoints === :auto ?
        max(2, BUDGET_BYTES ÷ max(1, Base.summarysize(init))) :
        checkpoints
    val, steps, states = init, 0, Any[init]
    while steps < max_steps && cond(val)
        val, steps = body(val), steps + 1
        # One more than there are slots: then the trajectory is computed again from its start.
        length(states) == steps && steps <= slots && push!(states, val)
    end
    if length(states) == steps + 1
        pop!(states) # the final value is no step's argument
    else
        resize!(states, 1)
    end

    function run_bounded_pullback(cotangent)
        dval = unthunk(cotangent)[1]
        dbody = ZeroTangent()
        steps_backward(body, states, steps, slots) do state
            _, pullback = ChainRulesCore.rrule_via_ad(config, body, state)
            d, dval = pullback(dval)
            dbody = ChainRulesCore.add!!(dbody, unthunk(d))
            dval = unthunk(dval)
        end
        return (NoTangent(), NoTangent(), dbody, dval, NoTangent(), NoTangent())
    end
    return (val, steps), run_bounded_pullback
end

# Call `visit` on the states before steps n, n - 1, ..., 1. `states` holds either all of them or the
# first alone, and then at most `slots` are held at once.
function steps_backward(visit, advance, states, n, slots)
    # A stack of (steps taken, state). A state may change its type, say where only body holds duals.
    kept = Tuple{Int, Any}[(i, x) for (i, x) in zip(0:(n - 1), states)]
    for i in (n - 1):-1:0
        p, x = kept[end]
        while p < i
            free = slots - length(kept)
            target = free > 0 ? p + leg(i - p + 1, free + 1) : i
            while p < target
                x, p = advance(x), p + 1
            end
            p < i && push!(kept, (p, x))
        end
        kept[end][1] == i && pop!(kept)
        visit(x)
    end
    return nothing
end

# Of m steps to run backward with c slots, the first of which holds the state before them: how many to
# advance before the next state is kept. With at most r advances of any step, c slots reach
# binomial(c + r, c) steps.
function leg(m, c)
    reach(c, r) = r < 0 ? 0 : binomial(big(c + r), big(min(c, r)))
    r = 1
    while reach(c, r) < m
        r += 1
    end
    return Int(min(reach(c, r - 1), m - reach(c - 1, r - 1)))
end
