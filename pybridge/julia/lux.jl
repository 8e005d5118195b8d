# What LuxModel evaluates in front of the model's own code. A state is split into what varies (the
# arrays, which JAX holds) and the rest (modes, random generators), which stays here.
using Lux: Lux
using Random: Random

varying(x::AbstractArray) = x
varying(x) = nothing
function varying(x::Tuple)
    parts = map(varying, x)
    return all(isnothing, parts) ? nothing : parts
end
function varying(x::NamedTuple)
    parts = map(varying, x)
    names = Tuple(name for name in keys(parts) if parts[name] !== nothing)
    return isempty(names) ? nothing : NamedTuple{names}(parts)
end
arrays(state) = let parts = varying(state)
    parts === nothing ? (;) : parts
end

# `state` with `arrays` in the places of its own, by name.
place(state, ::Nothing) = state
place(state, array) = array
place(state::Tuple, arrays::Tuple) = map(place, state, arrays)
@generated function place(
    state::NamedTuple{names},
    arrays::NamedTuple{given},
) where {names, given}
    values = map(names) do name
        old = :(getfield(state, $(QuoteNode(name))))
        name in given ? :(place($old, getfield(arrays, $(QuoteNode(name))))) : old
    end
    return :(NamedTuple{$names}(($(values...),)))
end

draws(x) = false
draws(::Random.AbstractRNG) = true
draws(x::Union{Tuple, NamedTuple}) = any(draws, values(x))

function checked(model)
    model isa Lux.AbstractLuxLayer ||
        throw(ArgumentError(
            "the code of a LuxModel must end in a Lux model such as Chain(Dense(2 => 1)); it ends in a $(typeof(model))",
        ))
    return model
end

initial(model, seed) = Lux.setup(Random.Xoshiro(seed), model)
described(model, seed) = let (ps, st) = initial(model, seed)
    (ps, arrays(st))
end

# A vector is one sample; anything else has its samples in the last dimension, as Lux has it.
asbatch(x::AbstractVector) = reshape(x, :, 1)
asbatch(x) = x
unbatch(y::AbstractArray, ::AbstractVector) = reshape(y, Base.front(size(y)))
unbatch(y::Union{Tuple, NamedTuple}, x::AbstractVector) = map(part -> unbatch(part, x), y)
unbatch(y, x) = y

# Many samples of any rank, in a further last dimension.
join_samples(x::AbstractMatrix) = x
join_samples(x::AbstractArray) = reshape(
    x,
    Base.front(Base.front(size(x)))...,
    size(x, ndims(x) - 1) * size(x, ndims(x)),
)
split_samples(y::AbstractArray, ::AbstractMatrix) = y
split_samples(y::AbstractArray, x::AbstractArray) = reshape(
    y,
    Base.front(size(y))...,
    size(x, ndims(x) - 1),
    size(x, ndims(x)),
)
split_samples(y::Union{Tuple, NamedTuple}, x::AbstractArray) = map(
    part -> split_samples(part, x),
    y,
)

function tester(model)
    test = Lux.testmode(last(initial(model, 0)))
    function tested(x, ps, st = (;))
        y, _ = Lux.apply(model, asbatch(x), ps, place(test, st))
        return unbatch(y, x)
    end
end

function stacked_tester(model)
    test = Lux.testmode(last(initial(model, 0)))
    function tested(x, ps, st = (;))
        y, _ = Lux.apply(model, join_samples(x), ps, place(test, st))
        return split_samples(y, x)
    end
end

function trainer(model)
    train = Lux.trainmode(last(initial(model, 0)))
    draws(train) &&
        throw(ArgumentError(
            "a layer of this model draws random numbers in training mode (Dropout and its like), and \
         its generator is not a value that JAX could hold. Use test mode, or draw the mask in JAX",
        ))
    function trained(x, ps, st = (;))
        y, new = Lux.apply(model, asbatch(x), ps, place(train, st))
        return unbatch(y, x), arrays(new)
    end
end

# A loss of the user's, `loss(m, x, ps, ...)`, with the model in test mode for `m`.
with_model(loss, m) = (args...) -> loss(m, args...)
