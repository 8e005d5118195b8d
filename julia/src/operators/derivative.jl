# derivative and second derivative in a number: dual numbers alone, without a reverse pass.

derivative(f::F, backend, x, contexts) where {F} = last(value_and_derivative(
    f,
    backend,
    x,
    contexts,
))
value_and_derivative(f::F, backend, x, contexts) where {F} = value_and_directional(
    f,
    backend,
    x,
    one(float(x)),
    contexts,
)

function second_derivative(f::F, backend, x, contexts) where {F}
    args = arguments(x, contexts)
    t = alone(one(float(x)), args)
    d2 = form(inner(backend), f, args, (nothing, t, t), Val(0))
    return d2 === nothing ? zerolike(f(args...)) : d2
end
function value_derivative_and_second_derivative(f::F, backend, x, contexts) where {F}
    y, d = value_and_derivative(f, backend, x, contexts)
    return y, d, second_derivative(f, backend, x, contexts)
end
