# derivative and second derivative in a number: dual numbers alone, without a reverse pass.

function DI.derivative(
    f::F,
    backend::AutoNested,
    x,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return last(DI.value_and_derivative(f, backend, x, contexts...))
end
function DI.value_and_derivative(
    f::F,
    backend::AutoNested,
    x,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return value_and_directional(f, backend, x, one(float(x)), contexts)
end

function DI.second_derivative(
    f::F,
    backend::AutoNested,
    x,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    args = arguments(x, contexts)
    t = alone(one(float(x)), args)
    derivative = form(inner(backend), f, args, (nothing, t, t), Val(0))
    return derivative === nothing ? zerolike(f(args...)) : derivative
end
function DI.value_derivative_and_second_derivative(
    f::F,
    backend::AutoNested,
    x,
    contexts::Vararg{DI.Context, C},
) where {F, C}
    return (
        DI.value_and_derivative(f, backend, x, contexts...)...,
        DI.second_derivative(f, backend, x, contexts...),
    )
end
