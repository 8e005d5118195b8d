# hvp and hessian: one reverse pass over dual numbers a direction.

function DI.hvp(
    f::F,
    backend::AutoNested,
    x,
    tx::NTuple,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    args = arguments(x, contexts)
    wanted = onlyfirst(args)
    product(v) = first(form(
        inner(backend),
        f,
        args,
        (Unit(), alone(v, args), nothing),
        Val(2);
        wanted,
    ))
    return map(v -> dense(product(v), x), tx)
end
function DI.gradient_and_hvp(
    f::F,
    backend::AutoNested,
    x,
    tx::NTuple,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return nested_gradient(f, backend, x, contexts...),
        DI.hvp(f, backend, x, tx, contexts...)
end

function DI.hessian(
    f::F,
    backend::AutoNested,
    x,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    columns = DI.hvp(f, backend, x, Tuple(basis(x)), contexts...)
    return reduce(hcat, map(vec, columns))
end
function DI.value_gradient_and_hessian(
    f::F,
    backend::AutoNested,
    x,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return (
        value_and_nested_gradient(f, backend, x, contexts...)...,
        DI.hessian(f, backend, x, contexts...),
    )
end
