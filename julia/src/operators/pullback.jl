# pullback: one reverse pass a covector.

pullback(f::F, backend, x, ty, contexts) where {F} = map(
    s -> covector(f, backend, x, s, contexts),
    ty,
)
function value_and_pullback(f::F, backend, x, ty, contexts) where {F}
    return f(arguments(x, contexts)...), pullback(f, backend, x, ty, contexts)
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
