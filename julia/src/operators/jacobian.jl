# jacobian: column by column on dual numbers, or row by row in reverse, whichever are fewer.
# Written without mutation, since an outer AD differentiates it.

jacobian(f::F, backend, x, contexts) where {F} = last(value_and_jacobian(
    f,
    backend,
    x,
    contexts,
))
function value_and_jacobian(f::F, backend, x, contexts) where {F}
    args = arguments(x, contexts)
    y = f(args...)
    if length(x) <= length(y)
        column(e) = vec(dense(
            form(inner(backend), f, args, (nothing, alone(e, args)), Val(0)),
            y,
        ))
        return y, sidebyside(map(column, basis(x)), y)
    end
    wanted = onlyfirst(args)
    row(e) = vec(dense(
        first(form(inner(backend), f, args, (e, nothing), Val(1); wanted)),
        x,
    ))
    return y, permutedims(sidebyside(map(row, basis(y)), x))
end

"The matrix of `columns`, each as long as `like`; there may be none."
sidebyside(columns, like) = isempty(columns) ?
    zeros(basefloat(eltype(like)), length(like), 0) :
    reduce(hcat, columns)

"The unit arrays of the shape of `x`, in the order of its elements."
function basis(x)
    return map(eachindex(IndexLinear(), x)) do i
        e = zeros(basefloat(eltype(x)), size(x))
        e[i] = 1
        return e
    end
end
ChainRulesCore.@non_differentiable basis(::Any)

"""
    batched_jacobian(f, backend, x, contexts...)

The Jacobians of all samples of a batch: `f(x, contexts...)` maps samples, stacked in the last dimension of
`x`, to outputs stacked in the last dimension, each sample by itself (a Lux model in test mode does).
Returns an array of size (outputs, inputs, samples) that can be differentiated again. Costs one pass an
input or one an output of a single sample, whichever are fewer.

Throws a `DimensionMismatch` if the number of samples changes.

```jldoctest
julia> using NestedGradients, Zygote, ADTypes

julia> batched_jacobian(x -> x .^ 2, AutoZygote(), [1.0 3.0; 2.0 4.0])
2×2×2 Array{Float64, 3}:
[:, :, 1] =
 2.0  0.0
 0.0  4.0

[:, :, 2] =
 6.0  0.0
 0.0  8.0
```
"""
function batched_jacobian(f::F, backend, x, contexts...) where {F}
    args = arguments(x, contexts)
    y = f(args...)
    batch = size(x, ndims(x))
    size(y, ndims(y)) == batch ||
        throw(DimensionMismatch(
            "batched_jacobian needs as many samples out as in; got $(size(y, ndims(y))) for $batch (sizes $(size(y)) and $(size(x)))",
        ))
    inputs, outputs = length(x) ÷ batch, length(y) ÷ batch
    if inputs <= outputs
        column(e) = vec(dense(
            form(inner(backend), f, args, (nothing, alone(e, args)), Val(0)),
            y,
        ))
        columns = reduce(hcat, map(column, batchbasis(x)))
        return permutedims(reshape(columns, outputs, batch, inputs), (1, 3, 2))
    end
    wanted = onlyfirst(args)
    row(e) = vec(dense(
        first(form(inner(backend), f, args, (e, nothing), Val(1); wanted)),
        x,
    ))
    rows = reduce(hcat, map(row, batchbasis(y)))
    return permutedims(reshape(rows, inputs, batch, outputs), (3, 1, 2))
end

"The unit arrays of one sample of `x`, the same for all samples."
function batchbasis(x)
    batch = size(x, ndims(x))
    return map(1:(length(x) ÷ batch)) do i
        e = zeros(basefloat(eltype(x)), length(x) ÷ batch, batch)
        e[i, :] .= 1
        return reshape(e, size(x))
    end
end
ChainRulesCore.@non_differentiable batchbasis(::Any)
