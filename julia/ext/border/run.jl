# fatou-ignore-file discouraged-function: memory of XLA and of Python is reached through pointers, and every one is loaded, stored or wrapped within the call that it was given to.
# A plan on pointers. Inputs are copied into arrays of Julia's own: a function that keeps or changes
# its argument then touches no memory of XLA's. Results are written into XLA's buffers.

# Where the data pointers are: in XLA's buffers (a call frame), or side by side (the callback path).
struct Buffers
    pointers::Ptr{Ptr{Cvoid}}
    framed::Bool
end

@inline function data(buffers::Buffers, i)
    p = unsafe_load(buffers.pointers, i)
    return buffers.framed ? unsafe_load(field_pointer(Ptr{Buffer}(p), Val(:data))) : p
end

@inline offset(strides::NTuple{L, Int}, at::NTuple{L, Int}) where {L} = sum(
    strides .* at;
    init = 0,
)

# ---- loading ------------------------------------------------------------------------------------

@inline load(leaf::Leaf{T, 0}, p, at) where {T} = unsafe_load(
    Ptr{T}(p),
    offset(leaf.strides, at) + 1,
)

function load(leaf::Leaf{T, N}, p, at) where {T, N}
    array = Array{T, N}(undef, leaf.dims)
    source = Ptr{T}(p) + offset(leaf.strides, at) * sizeof(T)
    GC.@preserve array unsafe_copyto!(pointer(array), source, length(array))
    return array
end

function load(leaf::Stacked{T, M}, p, at) where {T, M}
    array = Array{T, M}(undef, leaf.dims)
    GC.@preserve array begin
        if contiguous(leaf)
            unsafe_copyto!(pointer(array), Ptr{T}(p), length(array))
        else
            n = prod(Base.front(leaf.dims))
            for (i, sample) in enumerate(samples(leaf.sizes))
                source = Ptr{T}(p) + offset(leaf.strides, sample) * sizeof(T)
                unsafe_copyto!(pointer(array, (i - 1) * n + 1), source, n)
            end
        end
    end
    return array
end

# All sample positions, outermost level slowest, as XLA stores them.
samples(sizes::NTuple{L, Int}) where {L} = (
    reverse(Tuple(c)) .- 1
    for c in CartesianIndices(reverse(sizes))
)

# What all samples share is loaded once a call, the rest for each sample.
is_shared(leaf::Leaf) = all(iszero, leaf.strides)
is_shared(leaf) = true

load_shared(leaf::Leaf{T, 0}, p) where {T} = load(leaf, p, map(zero, leaf.strides))
load_shared(leaf::Leaf{T, N}, p) where {T, N} = is_shared(leaf) ?
    load(leaf, p, map(zero, leaf.strides)) :
    Array{T, N}(undef, ntuple(_ -> 0, Val(N)))
load_shared(leaf, p) = load(leaf, p, ())

# Generated: leaves of mixed types, and there may be more than inference follows in a tuple.
each_given(T, expression) = begin
    given = 0
    Expr(
        :tuple,
        map(1:fieldcount(T)) do i
            fieldtype(T, i) === Nothing ? :(nothing) : expression(i, (given += 1))
        end...,
    )
end

count_given(::Type{T}) where {T <: Tuple} = count(
    i -> fieldtype(T, i) !== Nothing,
    1:fieldcount(T),
)

@generated shared_leaves(leaves::T, buffers, first) where {T <: Tuple} = each_given(
    T,
    (i, n) -> :(load_shared(leaves[$i], data(buffers, first + $(n - 1)))),
)

@generated sample_leaves(leaves::T, shared, buffers, first, at) where {T <:
    Tuple} = each_given(
    T,
    (i, n) -> quote
        is_shared(leaves[$i]) ?
            shared[$i] :
            load(leaves[$i], data(buffers, first + $(n - 1)), at)
    end,
)

# Applies `f(leaves, first operand)` to z and to each slot: a tuple of (z, slots...).
@generated function each_group(f, plan::Plan{F, A, R, Z, S}) where {F, A, R, Z, S}
    first = count_given(Z) + 1
    groups = map(1:fieldcount(S)) do j
        start = first
        first += count_given(fieldtype(S, j))
        :(f(plan.slots[$j], $start, $(j + 1)))
    end
    return :((f(plan.z, 1, 1), $(groups...)))
end

load_shared_groups(plan::Plan, inputs) = each_group(
    (leaves, first, _) -> shared_leaves(leaves, inputs, first),
    plan,
)

load_sample(plan::Plan, shared, inputs, at) = each_group(plan) do leaves, first, group
    sample_leaves(leaves, shared[group], inputs, first, at)
end

# A function that changes an argument which all samples share would be given it changed at the next.
function check_shared(plan::Plan, shared, inputs)
    unchanged = each_group(plan) do leaves, first, group
        all(same_leaves(leaves, shared[group], inputs, first))
    end
    all(unchanged) ||
        error(
            "the function changed an argument that all samples of a vmap share; copy it first, or \
         map over that argument too",
        )
    return nothing
end

@generated same_leaves(leaves::T, shared, buffers, first) where {T <: Tuple} = Expr(
    :tuple,
    filter(
        !=(:(nothing)),
        each_given(
            T,
            (i, n) -> :(same(leaves[$i], shared[$i], data(buffers, first + $(n - 1)))),
        ).args,
    )...,
)

same(leaf, value, p) = true
same(leaf::Leaf, value::Array, p) = GC.@preserve value is_shared(leaf) ?
    iszero(
        @ccall memcmp(
            pointer(value)::Ptr{Cvoid},
            p::Ptr{Cvoid},
            sizeof(value)::Csize_t,
        )::Cint
    ) :
    true

# ---- storing ------------------------------------------------------------------------------------

function store!(leaf::Leaf{T, N}, p, at, value) where {T, N}
    target = Ptr{T}(p) + offset(leaf.strides, at) * sizeof(T)
    value === nothing && return leaf.summed ? nothing : zero!(target, prod(leaf.dims))
    check_size(value, leaf.dims)
    if leaf.summed
        add!(target, value, leaf.dims)
    else
        write!(target, value, leaf.dims)
    end
    return nothing
end

function store!(leaf::Stacked{T, M}, p, at, value) where {T, M}
    target = Ptr{T}(p)
    contiguous(leaf) || zero!(target, leaf.count)
    value === nothing && return zero!(target, leaf.count)
    check_size(value, leaf.dims)
    contiguous(leaf) && return write!(target, value, leaf.dims)
    n = prod(Base.front(leaf.dims))
    columns = reshape(value, n, last(leaf.dims))
    for (i, sample) in enumerate(samples(leaf.sizes))
        place = target + offset(leaf.strides, sample) * sizeof(T)
        add!(place, view(columns, :, i), (n,))
    end
    return nothing
end

function check_size(value, dims)
    size(value) == dims ||
        throw(DimensionMismatch(
            "the function returned a value of size $(size(value)) where one of size $dims was " *
                "expected (given by result=, or found by one evaluation when the program was traced)",
        ))
    return nothing
end

zero!(target::Ptr{T}, n) where {T} = (
    fill!(unsafe_wrap(Array, target, n), zero(T));
    nothing
)

write!(target::Ptr{T}, value::Number, ::Tuple{}) where {T} = unsafe_store!(
    target,
    convert(T, value),
)
write!(target::Ptr{T}, value::AbstractArray, ::Tuple{}) where {T} = unsafe_store!(
    target,
    convert(T, only(value)),
)
write!(target::Ptr{T}, value::Array{T}, dims) where {T} = GC.@preserve value unsafe_copyto!(
    target,
    pointer(value),
    length(value),
)
write!(target::Ptr, value::AbstractArray, dims) = copyto!(
    unsafe_wrap(Array, target, dims),
    value,
)

add!(target::Ptr{T}, value::Number, ::Tuple{}) where {T} = unsafe_store!(
    target,
    unsafe_load(target) + convert(T, value),
)
add!(target::Ptr{T}, value::AbstractArray, ::Tuple{}) where {T} = add!(
    target,
    only(value),
    (),
)

function add!(target::Ptr, value::AbstractArray, dims)
    array = unsafe_wrap(Array, target, dims)
    array .+= value
    return nothing
end

@generated function store_leaves!(leaves::T, buffers, at, values) where {T <: Tuple}
    given = 0
    stores = map(1:fieldcount(T)) do i
        fieldtype(T, i) === Nothing && return :(nothing)
        given += 1
        :(store!(leaves[$i], data(buffers, $given), at, values[$i]))
    end
    return quote
        $(stores...)
        nothing
    end
end

@generated function zero_sums!(leaves::T, buffers) where {T <: Tuple}
    given = 0
    zeros = map(1:fieldcount(T)) do i
        fieldtype(T, i) === Nothing && return :(nothing)
        given += 1
        :(zero_sum!(leaves[$i], data(buffers, $given)))
    end
    return quote
        $(zeros...)
        nothing
    end
end

zero_sum!(leaf::Leaf{T}, p) where {T} = leaf.summed ? zero!(Ptr{T}(p), leaf.count) : nothing

# ---- running ------------------------------------------------------------------------------------

const BACKEND = AutoZygote()

(plan::Plan{F, A, R, Z, S, O, 0})(
    inputs::Buffers,
    outputs::Buffers,
) where {F, A, R, Z, S, O} = islent(Z) ?
    run_lent(plan, inputs, outputs) :
    run_sample(plan, load_shared_groups(plan, inputs), outputs, ())

function (plan::Plan)(inputs::Buffers, outputs::Buffers)
    zero_sums!(plan.out, outputs)
    if plan.threads
        run_chunks(plan, inputs, outputs)
    else
        run_samples(plan, inputs, outputs, samples(plan.sizes))
    end
    return nothing
end

function run_samples(plan, inputs, outputs, positions)
    shared = load_shared_groups(plan, inputs)
    for at in positions
        run_sample(plan, load_sample(plan, shared, inputs, at), outputs, at)
    end
    return check_shared(plan, shared, inputs)
end

function run_sample(
    plan::Plan{F, A, R, Z, S, O, L, Open},
    (z, given...),
    outputs,
    at,
) where {F, A, R, Z, S, O, L, Open}
    args = NestedGradients.fill(plan.args, z)
    if Open == 0 && fieldcount(S) == 1
        value = NestedGradients.flatten(plan.result, plan.call(args...))
        any(isnothing, value) &&
            throw(ArgumentError(
                "the function returned nothing where a number or an array was expected",
            ))
        store_leaves!(plan.out, outputs, at, value)
        return nothing
    end
    slots = ntuple(Val(fieldcount(S))) do j
        if j == Open + 1
            nothing
        elseif j == 1
            NestedGradients.fill(plan.result, given[1])
        else
            NestedGradients.fill(plan.args, given[j])
        end
    end
    wanted = Open == 0 ? nothing : plan.wanted
    value = form(BACKEND, plan.call, args, slots, plan.open; wanted)
    skeleton = Open == 0 ? plan.result : plan.args
    store_leaves!(plan.out, outputs, at, NestedGradients.flatten(skeleton, value))
    return nothing
end

# Samples on Julia's threads. The chunks depend on the number of samples alone and their sums are
# added in order, so the result is the same to the last bit for any number of threads. A lone thread
# is Python's and takes no tasks.
const CHUNKS = 16

function run_chunks(plan, inputs, outputs)
    positions = collect(samples(plan.sizes))
    chunks = collect(Iterators.partition(positions, cld(length(positions), CHUNKS)))
    sums = [partial_sums(plan.out) for _ in chunks]
    if Threads.nthreads() == 1
        foreach((chunk, own) -> run_chunk(plan, inputs, outputs, chunk, own), chunks, sums)
    else
        tasks = map(chunks, sums) do chunk, own
            Threads.@spawn run_chunk(plan, inputs, outputs, chunk, own)
        end
        foreach(wait, tasks)
    end
    for own in sums, (i, part) in pairs(own)
        part === nothing && continue
        target = unsafe_wrap(Array, Ptr{eltype(part)}(data(outputs, i)), length(part))
        target .+= part
    end
    return nothing
end

# One zeroed buffer a summed leaf; nothing where samples have places of their own.
partial_sums(out) = Any[partial_sum(leaf) for leaf in out if leaf !== nothing]
partial_sum(leaf::Leaf{T}) where {T} = leaf.summed ? zeros(T, leaf.count) : nothing

function run_chunk(plan, inputs, outputs, chunk, own)
    pointers = [
        part === nothing ? data(outputs, i) : Ptr{Cvoid}(pointer(part))
        for (i, part) in pairs(own)
    ]
    GC.@preserve own pointers begin
        target = Buffers(pointer(pointers), false)
        run_samples(plan, inputs, target, chunk)
    end
    return nothing
end
