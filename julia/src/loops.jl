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
    out = limited(val, cond, val, steps, max_steps, on_limit)
    return return_steps ? (out, steps) : out
end

"`out`, or what `on_limit` says where the loop that reached `val` was stopped by `max_steps`."
function limited(out, cond, val, steps, max_steps, on_limit)
    stopped = on_limit !== :return && steps == max_steps && cond(val)
    stopped || return out
    on_limit === :raise && throw_at_limit(max_steps)
    return spoil(out)
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
    check_reverse(max_steps)
    slots = slots_for(init, checkpoints)
    val, steps, states = run_keeping(cond, body, init, max_steps, slots)

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

function check_reverse(max_steps)
    return max_steps === nothing &&
        throw(ArgumentError(
            "reverse mode of a loop with max_steps = nothing: the pullback needs a bound on what it " *
                "keeps. Give max_steps an integer, or use forward mode.",
        ))
end

function slots_for(init, checkpoints)
    return checkpoints === :auto ?
        max(2, BUDGET_BYTES ÷ max(1, Base.summarysize(init))) :
        checkpoints
end

# The final value, the number of steps, and the states before the steps: all, or the first alone.
function run_keeping(cond, advance, init, max_steps, slots)
    val, steps, states = init, 0, Any[init]
    while steps < max_steps && cond(val)
        val, steps = advance(val), steps + 1
        # One more than there are slots: then the trajectory is computed again from its start.
        length(states) == steps && steps <= slots && push!(states, val)
    end
    if length(states) == steps + 1
        pop!(states) # the final value is no step's argument
    else
        resize!(states, 1)
    end
    return val, steps, states
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

# ---- counted loops ----

"""
    bounded_fori_loop(lower, upper, body, init; max_steps = nothing, checkpoints = :auto,
                      on_limit = :return, return_steps = false)

A bounded loop over an index. The value is that of

    val = init
    for i in lower:(min(upper, lower + max_steps) - 1)
        val = body(i, val)
    end

`upper` is one past the last index, as in Python. `max_steps = nothing` means `upper - lower`; the limit
is reached where `upper - lower` is more than `max_steps`. Everything else is as for
[`bounded_while_loop`](@ref).

Throws an `ArgumentError` if `lower` or `upper` is not an integer.

# Example

```jldoctest
julia> using NestedGradients, Zygote

julia> power(x, n) = bounded_fori_loop(0, n, (i, y) -> y * x, 1.0; max_steps = 10);

julia> Zygote.gradient(x -> power(x, 3), 2.0)
(12.0,)
```
"""
function bounded_fori_loop(
    lower,
    upper,
    body,
    init;
    max_steps = nothing,
    checkpoints = :auto,
    on_limit = :return,
    return_steps = false,
)
    check_index("lower", lower)
    check_index("upper", upper)
    limit = max_steps === nothing ? max(0, upper - lower) : max_steps
    state, steps = bounded_while_loop(
        state -> state[1] < upper,
        state -> (state[1] + 1, body(state[1], state[2])),
        (lower, init);
        max_steps = limit,
        checkpoints,
        on_limit,
        return_steps = true,
    )
    return return_steps ? (state[2], steps) : state[2]
end

function check_index(name, value)
    value isa Integer && !(value isa Bool) && return nothing
    throw(ArgumentError("$name is $(repr(value)): it must be an integer"))
end

@non_differentiable check_index(::Any, ::Any)

# ---- loops that stack an output of every step ----

"""
    bounded_scan_until(cond, body, init; max_steps, checkpoints = :auto, on_limit = :return,
                       return_steps = false)

A bounded loop that also stacks an output of every step, up to the stop. The value is that of

    val, ys, steps = init, zeros of max_steps rows, 0
    while steps < max_steps && cond(val)
        val, ys[steps + 1, ...] = body(val)
        steps = steps + 1
    end

`body` returns a pair: the next value, and the step's output, a number, an array, or tuples and named
tuples of those, whose shape is the same at every step. Returns `(val, ys)`, or `((val, ys), steps)`.
Every array of `ys` has a first dimension of length `max_steps`; its rows past `steps` are zero. If no
step is taken, `body` is evaluated once on `init`, for the shape of its output. Everything else is as
for [`bounded_while_loop`](@ref).

Throws an `ArgumentError` if `max_steps` is `nothing`, or if `body` does not return a pair.

# Example

```jldoctest
julia> using NestedGradients

julia> bounded_scan_until(>(1), x -> (x / 2, x), 6.0; max_steps = 5, return_steps = true)
((0.75, [6.0, 3.0, 1.5, 0.0, 0.0]), 3)
```
"""
function bounded_scan_until(
    cond,
    body,
    init;
    max_steps,
    checkpoints = :auto,
    on_limit = :return,
    return_steps = false,
)
    check_options(max_steps, checkpoints, on_limit)
    check_rows(max_steps)
    val, steps, rows = run_scan(cond, body, init, max_steps, checkpoints)
    out = (val, stack_rows(rows, steps == 0 ? one_row(body, init) : nothing, max_steps))
    out = limited(out, cond, val, steps, max_steps, on_limit)
    return return_steps ? (out, steps) : out
end

function check_rows(max_steps)
    return max_steps === nothing &&
        throw(ArgumentError(
            "max_steps is nothing: bounded_scan_until stacks that many rows, so it must be an integer",
        ))
end

function pair(out)
    out isa Tuple{Any, Any} && return out
    throw(ArgumentError(
        "body must return a pair (value, output); it returned $(repr(out))",
    ))
end

one_row(body, init) = pair(body(init))[2]

@non_differentiable check_rows(::Any)
@non_differentiable one_row(::Any, ::Any)

# The final value, the number of steps, and each step's output.
function run_scan(cond, body, init, max_steps, checkpoints)
    val, steps, rows = init, 0, Any[]
    while steps < max_steps && cond(val)
        val, row = pair(body(val))
        push!(rows, row)
        steps += 1
    end
    return val, steps, rows
end

function ChainRulesCore.frule(
    config::RuleConfig{>:HasForwardsMode},
    dots::Tuple,
    ::typeof(run_scan),
    cond,
    body,
    init,
    max_steps,
    checkpoints,
)
    _, _, dbody, dval = dots
    push = Base.inferencebarrier(ChainRulesCore.frule_via_ad)
    val, steps, rows, drows = init, 0, Any[], Any[]
    while steps < max_steps && cond(val)
        out, dout = push(config, (dbody, dval), body, val)
        (val, row), (dval, drow) = pair(out), (dout[1], dout[2])
        push!(rows, row)
        push!(drows, drow)
        steps += 1
    end
    out = (val, steps, rows)
    return out, Tangent{typeof(out)}(dval, NoTangent(), drows)
end

function ChainRulesCore.rrule(
    config::RuleConfig{>:HasReverseMode},
    ::typeof(run_scan),
    cond,
    body,
    init,
    max_steps,
    checkpoints,
)
    slots, rows = slots_for(init, checkpoints), Any[]
    function advance(val)
        val, row = pair(body(val))
        push!(rows, row)
        return val
    end
    val, steps, states = run_keeping(cond, advance, init, max_steps, slots)

    function run_scan_pullback(cotangent)
        dval, _, drows = unthunk(cotangent)
        drows, i, dbody = unthunk(drows), steps, ZeroTangent()
        steps_backward(x -> body(x)[1], states, steps, slots) do state
            out, pullback = ChainRulesCore.rrule_via_ad(config, body, state)
            drow = drows isa AbstractZero ? ZeroTangent() : drows[i]
            d, dval = pullback(Tangent{typeof(out)}(dval, drow))
            dbody = ChainRulesCore.add!!(dbody, unthunk(d))
            dval, i = unthunk(dval), i - 1
        end
        return (NoTangent(), NoTangent(), dbody, dval, NoTangent(), NoTangent())
    end
    return (val, steps, rows), run_scan_pullback
end

# Rows as arrays with `n` of them along the first dimension; `like` gives the shape if there are none.
stack_rows(rows, like, n) = stack_like(isempty(rows) ? like : rows[1], rows, n)

function stack_like(like::Union{Tuple, NamedTuple}, rows, n)
    fields = ntuple(k -> stack_like(like[k], Any[row[k] for row in rows], n), length(like))
    return like isa Tuple ? fields : NamedTuple{keys(like)}(fields)
end

function stack_like(like::Union{Number, AbstractArray{<:Number}}, rows, n)
    out = zeros(
        mapreduce(eltype, promote_type, rows; init = eltype(like)),
        n,
        size(like)...,
    )
    for (k, row) in enumerate(rows)
        size(row) == size(like) ||
            throw(DimensionMismatch(
                "body's output has size $(size(like)) in the first step and $(size(row)) in step $k",
            ))
        selectdim(out, 1, k) .= row
    end
    return out
end

stack_like(::Nothing, rows, n) = nothing

function stack_like(like, rows, n)
    throw(ArgumentError(
        "body's output holds $(repr(like)), a $(typeof(like)): it must be made of numbers and arrays",
    ))
end

function ChainRulesCore.frule(dots::Tuple, ::typeof(stack_rows), rows, like, n)
    _, drows = dots
    isempty(rows) && return stack_rows(rows, like, n), ZeroTangent()
    return stack_rows(rows, like, n), stack_dots(rows[1], rows, drows, n)
end

function stack_dots(like::Union{Tuple, NamedTuple}, rows, dots, n)
    field(k) = stack_dots(
        like[k],
        Any[row[k] for row in rows],
        Any[dot[k] for dot in dots],
        n,
    )
    fields = ntuple(field, length(like))
    named = like isa Tuple ? fields : NamedTuple{keys(like)}(fields)
    return Tangent{typeof(named), typeof(named)}(named)
end

function stack_dots(like, rows, dots, n)
    all(dot -> dot isa AbstractZero, dots) && return ZeroTangent()
    still(row, dot) = dot isa AbstractZero ? zero(row) : unthunk(dot)
    return stack_like(like, Any[still(row, dot) for (row, dot) in zip(rows, dots)], n)
end

function ChainRulesCore.rrule(::typeof(stack_rows), rows, like, n)
    function stack_rows_pullback(cotangent)
        dys = unthunk(cotangent)
        drows = Any[row_of(dys, row, k) for (k, row) in enumerate(rows)]
        return (NoTangent(), drows, NoTangent(), NoTangent())
    end
    return stack_rows(rows, like, n), stack_rows_pullback
end

# Row k of the cotangent of what was stacked.
row_of(dys, row, k) = dys isa AbstractZero ? ZeroTangent() : row_at(dys, row, k)
row_at(dys, ::Number, k) = dys[k]
row_at(dys, ::AbstractArray, k) = copy(selectdim(dys, 1, k))
function row_at(dys, row::Union{Tuple, NamedTuple}, k)
    fields = ntuple(j -> row_of(unthunk(dys[j]), row[j], k), length(row))
    named = row isa Tuple ? fields : NamedTuple{keys(row)}(fields)
    return Tangent{typeof(row), typeof(named)}(named)
end
row_at(dys, ::Nothing, k) = ZeroTangent()
