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
    return buffers.framed ? unsafe_load(field_pointer(Ptr{Buffer}(p), :data)) : p
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

# Generated: leaves of mixed types, and there may be more than inference follows in a tuple.
@generated function load_leaves(leaves::T, buffers, first, at) where {T <: Tuple}
    given = 0
    loads = map(1:fieldcount(T)) do i
        fieldtype(T, i) === Nothing && return :(nothing)
        given += 1
        :(load(leaves[$i], data(buffers, first + $(given - 1)), at))
    end
    return :(($(loads...),))
end

count_given(::Type{T}) where {T <: Tuple} = count(
    i -> fieldtype(T, i) !== Nothing,
    1:fieldcount(T),
)

@generated function load_slots(plan::Plan{F, A, R, Z, S}, buffers, at) where {F, A, R, Z, S}
    first = count_given(Z) + 1
    loads = map(1:fieldcount(S)) do j
        start = first
        first += count_given(fieldtype(S, j))
        :(load_leaves(plan.slots[$j], buffers, $start, at))
    end
    return :(($(loads...),))
end

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
    run_sample(plan, inputs, outputs, ())

function (plan::Plan)(inputs::Buffers, outputs::Buffers)
    zero_sums!(plan.out, outputs)
    if plan.threads
        run_chunks(plan, inputs, outputs)
    else
        for at in samples(plan.sizes)
            run_sample(plan, inputs, outputs, at)
        end
    end
    return nothing
end

function run_sample(
    plan::Plan{F, A, R, Z, S, O, L, Open},
    inputs,
    outputs,
    at,
) where {F, A, R, Z, S, O, L, Open}
    args = NestedGradients.fill(plan.args, load_leaves(plan.z, inputs, 1, at))
    if Open == 0 && fieldcount(S) == 1
        value = plan.call(args...)
        store_leaves!(plan.out, outputs, at, NestedGradients.flatten(plan.result, value))
        return nothing
    end
    given = load_slots(plan, inputs, at)
    slots = ntuple(Val(fieldcount(S))) do j
        if j == Open + 1
            nothing
        elseif j == 1
            NestedGradients.fill(plan.result, given[1])
        else
            NestedGradients.fill(plan.args, given[j])
        end
    end
    value = form(
        BACKEND,
        plan.call,
        args,
        slots,
        plan.open;
        wanted = Open == 0 ? nothing : plan.wanted,
    )
    skeleton = Open == 0 ? plan.result : plan.args
    store_leaves!(plan.out, outputs, at, NestedGradients.flatten(skeleton, value))
    return nothing
end

# Samples on Julia's threads. The chunks depend on the number of samples alone and their sums are
# added in order, so the result is the same to the last bit for any number of threads.
const CHUNKS = 16

function run_chunks(plan, inputs, outputs)
    positions = collect(samples(plan.sizes))
    chunks = collect(Iterators.partition(positions, cld(length(positions), CHUNKS)))
    sums = [partial_sums(plan.out) for _ in chunks]
    tasks = map(chunks, sums) do chunk, own
        Threads.@spawn run_chunk(plan, inputs, outputs, chunk, own)
    end
    foreach(wait, tasks)
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
        for at in chunk
            run_sample(plan, inputs, target, at)
        end
    end
    return nothing
end
