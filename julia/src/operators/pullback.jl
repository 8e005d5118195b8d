# pullback: one reverse pass a covector.

function DI.pullback(
    f::F,
    backend::AutoNested,
    x,
    ty::NTuple,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return map(s -> covector(f, backend, x, s, contexts), ty)
end
function DI.value_and_pullback(
    f::F,
    backend::AutoNested,
    x,
    ty::NTuple,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return f(arguments(x, contexts)...), DI.pullback(f, backend, x, ty, contexts...)
end

function covector(f::F, backend, x, s0, contexts) where {F}
    args = arguments(x, contexts)
    cotangents = form(
        inner(backend),
        f,
        args,
        (s0, nothing),
        Val(1);
        wanted = onlyfirst(args),
    )
    return dense(first(cotangents), x)
end
