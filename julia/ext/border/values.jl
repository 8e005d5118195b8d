# fatou-ignore-file discouraged-function: memory of XLA and of Python is reached through pointers, and every one is loaded, stored or wrapped within the call that it was given to.
# Structures of arrays that go over as values, outside compiled programs: a model's first
# parameters, what a closure captured. Julia keeps them until Python has copied them.

const HELD = Dict{Int, Vector{Any}}()
const HELD_LOCK = Base.Threads.SpinLock()

"""
    hold(x) -> String

`x` as a Python literal in which each leaf has its address, after a number for `drop`.
"""
function hold(x)
    leaves = Any[]
    description = sprint(io -> hold_value(io, x, leaves, ()))
    key = lock(HELD_LOCK) do
        key = maximum(keys(HELD); init = 0) + 1
        HELD[key] = leaves
        key
    end
    return "($key, $description)"
end

drop(key) = (lock(() -> delete!(HELD, key), HELD_LOCK); "")

hold_value(io, ::Nothing, leaves, path) = print(io, "None")
hold_value(io, x::Number, leaves, path) = hold_array(io, x, Base.fill(x), leaves)
hold_value(io, x::AbstractArray{<:Number}, leaves, path) = hold_array(
    io,
    x,
    Array(x),
    leaves,
)

function hold_array(io, x, array, leaves)
    push!(leaves, array)
    print(io, "('array', '", dtype(eltype(array)), "', (")
    foreach(n -> print(io, n, ","), size(array))
    print(io, "), ", UInt(pointer(array)), ")")
end

function hold_value(io, x::Tuple, leaves, path)
    print(io, "('tuple', [")
    for (i, y) in pairs(x)
        hold_value(io, y, leaves, (path..., i))
        print(io, ", ")
    end
    print(io, "])")
end

function hold_value(io, x::NamedTuple, leaves, path)
    print(io, "('dict', {")
    for (key, y) in pairs(x)
        print(io, python_string(key), ": ")
        hold_value(io, y, leaves, (path..., key))
        print(io, ", ")
    end
    print(io, "})")
end

function hold_value(io, x, leaves, path)
    place = isempty(path) ? "the value" : "the field `$(join(path, '.'))`"
    throw(ArgumentError(
        "$place is a $(typeof(x)), which cannot be given to Python; accepted are numbers, arrays of \
         numbers, nothing, and tuples and named tuples of these. Make it one of them: a vector of \
         arrays, say, a tuple by Tuple(v), or one array by stack(v)",
    ))
end

python_string(key) = replace(repr(String(key)), "\\\$" => "\$")

"""
    structure(skeleton, leaves)

The structure of copies of `leaves`, each `(element type, dims, address)`.
"""
structure(skeleton, leaves::Tuple) = NestedGradients.fill(skeleton, map(copied, leaves))

copied((T, dims, address)) = isempty(dims) ?
    unsafe_load(Ptr{T}(address)) :
    copy(unsafe_wrap(Array, Ptr{T}(address), dims))

# ---- what a function captured ------------------------------------------------------------------

"""
    unwrapped(id, numbers) -> String

Register the skeleton of function `id`; its number, and its captures as `hold` gives them.
"""
function unwrapped(id, numbers)
    f = function_of(id)
    skeleton, params = NestedGradients.unwrap(f.call)
    if !numbers
        params = without_numbers(params)
    end
    new = add_function(UserFunction(
        string(f.name, " (unwrapped)"),
        skeleton,
        nothing,
        Bool[],
        f.threads,
        f.borrow,
    ))
    return "($new, $(hold(params)))"
end

# Plain numbers steer shapes and branches: they stay in the skeleton unless asked for.
without_numbers(x) = x
without_numbers(::Number) = nothing
without_numbers(x::Tuple) = map(without_numbers, x)
function without_numbers(x::NamedTuple)
    kept = map(without_numbers, x)
    return NamedTuple(
        name => value
        for (name, value) in pairs(kept)
        if value !== nothing && value != (;)
    )
end
