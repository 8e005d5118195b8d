# gradient: one reverse pass.

function DI.gradient(
    f::F,
    backend::AutoNested,
    x,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return nested_gradient(f, backend, x, contexts...)
end
function DI.value_and_gradient(
    f::F,
    backend::AutoNested,
    x,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return value_and_nested_gradient(f, backend, x, contexts...)
end
