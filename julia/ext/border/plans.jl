# A plan is one call resolved when its program is compiled: the function, the structure of its
# arguments, where each leaf lies and how it moves from sample to sample. Shapes are values and only
# ranks and element types are types, so a new batch size compiles nothing.

# A leaf whose buffer holds one value a sample of every level it is batched at.
struct Leaf{T, N, L}
    dims::NTuple{N, Int}
    strides::NTuple{L, Int} # elements from sample to sample, a level; 0 where it is shared
    count::Int              # elements of the whole buffer
    summed::Bool            # as an output: shared at a level, so summed over it
end

function Leaf{T}(
    dims::NTuple{N, Int},
    flags::NTuple{L, Bool},
    sizes::NTuple{L, Int},
) where {T, N, L}
    strides = zeros(Int, L)
    step = prod(dims)
    for level in L:-1:1
        flags[level] || continue
        strides[level] = step
        step *= sizes[level]
    end
    summed = any(level -> !flags[level], 1:L)
    return Leaf{T, N, L}(dims, NTuple{L, Int}(strides), step, summed)
end

# A leaf of the batch form: all samples at once, in a last dimension of its own (M = N + 1).
struct Stacked{T, M, L}
    dims::NTuple{M, Int}
    strides::NTuple{L, Int}
    sizes::NTuple{L, Int}
    count::Int
end

function Stacked{T}(
    dims::NTuple{N, Int},
    flags::NTuple{L, Bool},
    sizes::NTuple{L, Int},
) where {T, N, L}
    leaf = Leaf{T}(dims, flags, sizes)
    return Stacked{T, N + 1, L}((dims..., prod(sizes)), leaf.strides, sizes, leaf.count)
end

contiguous(leaf::Stacked) = leaf.count == prod(leaf.dims)

struct Plan{F, A, R, Z <: Tuple, S <: Tuple, O <: Tuple, L, Open, W <: Tuple}
    name::String
    call::F
    args::A # skeletons
    result::R
    z::Z     # leaves; nothing where a slot's leaf is zero, or unwanted
    slots::S # the open one is ()
    out::O
    sizes::NTuple{L, Int} # the levels to loop over; none in the batch form
    threads::Bool
    open::Val{Open}
    wanted::W # one Bool an argument
end

"""
    plan(; id, args, result, open, sizes, owners, z, slots, out) -> Int

Resolve a call of function `id`. `z`, each of `slots` and `out` are tuples of
`(element type, dims, flags)` or `nothing`; `owners` says which argument each leaf of `z` is of.
"""
function plan(; id, args, result, open, sizes, owners, z, slots, out)
    f = function_of(id)
    batch = batchable(f, open, sizes, owners, z, slots, out)
    stacked(i) = batch && is_sample(f, owners[i])
    # Only a plain value is lent its arguments; derivatives work on arrays of their own anyway.
    lend = isempty(sizes) &&
        open == 0 &&
        length(slots) == 1 &&
        length(out) == 1 &&
        (f.borrow === nothing ? lendable(f.call, args, z) : f.borrow)
    make(spec, stack) = if spec === nothing
        nothing
    elseif stack
        Stacked{spec[1]}(spec[2], spec[3], sizes)
    elseif batch
        Leaf{spec[1]}(spec[2], (), ())
    else
        Leaf{spec[1]}(spec[2], spec[3], sizes)
    end
    leaves(specs, isoutput) = ntuple(
        i -> make(specs[i], isoutput ? batch : stacked(i)),
        length(specs),
    )
    lent = !lend ?
        leaves(z, false) :
        map(
            ((T, dims, flags),) -> isempty(dims) ||
                f.borrow === nothing && !islarge((T, dims, flags)) ?
                Leaf{T}(dims, (), ()) :
                Lent{T, length(dims)}(dims),
            z,
        )
    p = Plan(
        f.name,
        batch ? f.batch : f.call,
        args,
        result,
        lent,
        ntuple(j -> leaves(slots[j], j == 1), length(slots)),
        leaves(out, open == 0),
        batch ? () : sizes,
        f.threads,
        Val(open),
        ntuple(
            n -> open > 0 &&
                any(i -> owners[i] == n && out[i] !== nothing, eachindex(owners)),
            length(args),
        ),
    )
    return add_plan(p)
end

is_sample(f, argument) = get(f.samples, argument, false)

# The batch form serves where everything that is not a sample is shared at every level: then the
# call is one form of the sum over samples. Which samples are batched at which level is free.
function batchable(f, open, sizes, owners, z, slots, out)
    (f.batch === nothing || isempty(sizes)) && return false
    shared(specs) = all(eachindex(specs)) do i
        is_sample(f, owners[i]) || specs[i] === nothing || !any(specs[i][3])
    end
    return shared(z) && all(shared, slots[2:end]) && (open == 0 || shared(out))
end

# Calls read the table while plans are added: a vector is never changed, only replaced.
mutable struct PlanTable
    @atomic plans::Vector{Any}
end

const PLANS = PlanTable(Any[])
const PLANS_LOCK = Base.Threads.SpinLock()

function add_plan(p::Plan)
    return lock(PLANS_LOCK) do
        free = findfirst(isnothing, PLANS.plans)
        plans = copy(PLANS.plans)
        free === nothing ? push!(plans, p) : (plans[free] = p)
        @atomic PLANS.plans = plans
        free === nothing ? length(plans) : free
    end
end

function remove_plan(number)
    lock(PLANS_LOCK) do
        plans = copy(PLANS.plans)
        plans[number] = nothing
        @atomic PLANS.plans = plans
    end
    return nothing
end
