# gradient: one reverse pass.

gradient(f::F, backend, x, contexts) where {F} = nested_gradient(f, backend, x, contexts...)
value_and_gradient(f::F, backend, x, contexts) where {F} = value_and_nested_gradient(
    f,
    backend,
    x,
    contexts...,
)
