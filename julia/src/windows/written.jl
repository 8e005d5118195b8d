# The written order: each window folded from init, and for reverse mode its steps again, backwards.

# One element of an operand, or of each of several.
@inline at(x::AbstractArray, c) = @inbounds x[c]
@inline at(x::Tuple, c) = map(a -> at(a, c), x)

function written(op, init, x, w::Windows)
    ks = offsets(w)
    return map(o -> lower(_fold(op, init, x, w, o, ks)), CartesianIndices(outsize(w)))
end

@inline function _fold(op, init, x, w, o, ks)
    accumulated = init
    for k in ks
        c = cell(w, o, k)
        c === nothing || (accumulated = combine(op, accumulated, element(op, at(x, c))))
    end
    return accumulated
end

"The cotangents of op, init and the cells, `x̄` zero at the start."
function undo_written!(x̄, config, op, init, x, ȳ, w::Windows)
    ōp, īnit = NoTangent(), _zero(eltype(x̄))
    ks = offsets(w)
    seen = CartesianIndex{length(w.size)}[]
    for o in CartesianIndices(ȳ)
        empty!(seen)
        accumulators = Any[init]
        for k in ks
            c = cell(w, o, k)
            c === nothing && continue
            push!(seen, c)
            push!(accumulators, combine(op, last(accumulators), element(op, at(x, c))))
        end
        ā = ȳ[o]
        for j in length(seen):-1:1
            c = seen[j]
            step, ā, b̄ = undo(config, op, accumulators[j], element(op, at(x, c)), ā)
            ōp = _accumulate(ōp, step)
            x̄[c] = _plus(x̄[c], b̄)
        end
        īnit = _plus(īnit, ā)
    end
    return ōp, īnit
end

_accumulate(::AbstractZero, b) = b
_accumulate(a, ::AbstractZero) = a
_accumulate(::AbstractZero, b::AbstractZero) = b
_accumulate(a, b) = a + b
