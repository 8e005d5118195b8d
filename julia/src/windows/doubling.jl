# Associative reducers over long windows, at a cost logarithmic in the window.
#
# A window of several axes is folded axis by axis from the last to the first, which keeps the written
# order of elements. Along an axis runs of length 2^j are combined to runs of length 2^(j+1), and a
# window is put together of the runs that its binary digits name, from left to right. Reverse mode
# goes the same way back. Where there is no cell there is nothing, and nothing is combined.

"Elements, and which of them are there."
struct Runs{V, H}
    values::V
    have::H
end

part(a::AbstractArray, axis, range) = selectdim(a, axis, range)
part(r::Runs, axis, range) = Runs(part(r.values, axis, range), part(r.have, axis, range))

# The runs that begin `first` positions into each window.
function _pieces(r, w, axis, first)
    return part(r, axis, range(first + 1; step = w.stride[axis], length = outsize(w)[axis]))
end

function _pairs(op, left, right)
    have = left.have .| right.have
    values = similar(left.values, size(have))
    for i in CartesianIndices(have)
        if left.have[i] && right.have[i]
            values[i] = combine(op, left.values[i], right.values[i])
        elseif have[i]
            values[i] = left.have[i] ? left.values[i] : right.values[i]
        end
    end
    return Runs(values, have)
end

# The positions of an axis' line that hold its cells: (cell, position) from 1.
function _line(w, axis, n)
    length = (outsize(w)[axis] - 1) * w.stride[axis] + span(w, axis)
    held = [
        (i, position(w, axis, i) + 1)
        for i in 1:n
        if 0 <= position(w, axis, i) < length
    ]
    return held, length
end

"What a fold along one axis leaves for the way back."
struct Trail
    levels::Vector{Any}            # runs of length 1, 2, 4, ...
    parts::Vector{Tuple{Int, Int}} # (level, first position) of what makes a window
    befores::Vector{Any}           # what each part but the first was combined with
end

function _along(op, runs, w, axis)
    held, length = _line(w, axis, size(runs.have, axis))
    sizes = ntuple(i -> i == axis ? length : size(runs.have, i), ndims(runs.have))
    line = Runs(similar(runs.values, sizes), falses(sizes))
    for (i, p) in held
        from, to = part(runs, axis, i), part(line, axis, p)
        for j in CartesianIndices(from.have)
            from.have[j] || continue
            to.values[j] = from.values[j]
            to.have[j] = true
        end
    end
    trail = Trail(Any[line], Tuple{Int, Int}[], Any[])
    result, first, run = nothing, 0, 1
    while true
        level = last(trail.levels)
        if w.window[axis] & run != 0
            piece = _pieces(level, w, axis, first)
            push!(trail.parts, (lastindex(trail.levels), first))
            if result === nothing
                result = piece
            else
                push!(trail.befores, result)
                result = _pairs(op, result, piece)
            end
            first += run * w.dilation[axis]
        end
        2run > w.window[axis] && return result, trail
        push!(trail.levels, _pairs(op, _halves(level, axis, run * w.dilation[axis])...))
        run *= 2
    end
end

function _halves(a, axis, shift)
    n = size(a isa Runs ? a.have : a, axis)
    return part(a, axis, 1:(n - shift)), part(a, axis, (1 + shift):n)
end

"Each window's fold without init, and the trail of every axis."
function _runs(op, x, w::Windows{N}) where {N}
    cells = map(c -> element(op, at(x, c)), CartesianIndices(w.size))
    runs, trails = Runs(cells, trues(w.size)), Trail[]
    for axis in N:-1:1
        runs, trail = _along(op, runs, w, axis)
        pushfirst!(trails, trail)
    end
    return runs, trails
end

function doubled(op, init, x, w::Windows)
    runs, _ = _runs(op, x, w)
    return map(CartesianIndices(runs.have)) do o
        return lower(runs.have[o] ? combine(op, init, runs.values[o]) : init)
    end
end

"As [`undo_written!`](@ref)."
function undo_doubled!(x̄, config, op, init, x, ȳ, w::Windows{N}) where {N}
    runs, trails = _runs(op, x, w)
    ōp, īnit = NoTangent(), _zero(eltype(x̄))
    c̄ = Base.fill(_zero(eltype(x̄)), size(ȳ))
    for o in CartesianIndices(ȳ)
        ā = ȳ[o]
        if runs.have[o]
            step, ā, c̄[o] = undo(config, op, init, runs.values[o], ā)
            ōp = _accumulate(ōp, step)
        end
        īnit = _plus(īnit, ā)
    end
    for axis in 1:N
        n = axis == N ? w.size : ntuple(i -> i <= axis ? w.size[i] : size(c̄, i), N)
        step, c̄ = _back_along(config, op, trails[axis], w, axis, c̄, n)
        ōp = _accumulate(ōp, step)
    end
    copyto!(x̄, c̄)
    return ōp, īnit
end

function _back_along(config, op, trail, w, axis, c̄, sizes)
    zeroed(r) = Base.fill(_zero(eltype(c̄)), size(r.have))
    levels = map(zeroed, trail.levels)
    ōp = NoTangent()
    for m in length(trail.parts):-1:1
        level, first = trail.parts[m]
        piece = _pieces(levels[level], w, axis, first)
        if m == 1
            piece .= _plus.(piece, c̄)
        else
            before = trail.befores[m - 1]
            b̄efore = zeroed(before)
            right = _pieces(trail.levels[level], w, axis, first)
            ōp = _accumulate(
                ōp,
                _back_pairs!(b̄efore, piece, config, op, before, right, c̄),
            )
            c̄ = b̄efore
        end
    end
    for j in length(levels):-1:2
        shift = size(levels[j - 1], axis) - size(levels[j], axis)
        cotangents = _halves(levels[j - 1], axis, shift)
        halves = _halves(trail.levels[j - 1], axis, shift)
        ōp = _accumulate(ōp, _back_pairs!(cotangents..., config, op, halves..., levels[j]))
    end
    x̄ = Base.fill(_zero(eltype(c̄)), sizes)
    for (i, p) in _line(w, axis, sizes[axis])[1]
        part(x̄, axis, i) .= part(levels[1], axis, p)
    end
    return ōp, x̄
end

function _back_pairs!(l̄eft, r̄ight, config, op, left, right, c̄)
    ōp = NoTangent()
    for i in CartesianIndices(c̄)
        if left.have[i] && right.have[i]
            step, ā, b̄ = undo(config, op, left.values[i], right.values[i], c̄[i])
            ōp = _accumulate(ōp, step)
            l̄eft[i], r̄ight[i] = _plus(l̄eft[i], ā), _plus(r̄ight[i], b̄)
        elseif left.have[i]
            l̄eft[i] = _plus(l̄eft[i], c̄[i])
        elseif right.have[i]
            r̄ight[i] = _plus(r̄ight[i], c̄[i])
        end
    end
    return ōp
end
