# hvp and hessian: one reverse pass over dual numbers a direction.

function hvp(f::F, backend, x, tx, contexts) where {F}
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
function gradient_and_hvp(f::F, backend, x, tx, contexts) where {F}
    return gradient(f, backend, x, contexts), hvp(f, backend, x, tx, contexts)
end

function hessian(f::F, backend, x, contexts) where {F}
    return sidebyside(map(vec, hvp(f, backend, x, basis(x), contexts)), x)
end
function value_gradient_and_hessian(f::F, backend, x, contexts) where {F}
    y, g = value_and_gradient(f, backend, x, contexts)
    return y, g, hessian(f, backend, x, contexts)
end
