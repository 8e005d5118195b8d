# pushforward: one evaluation on dual numbers a direction.

pushforward(f::F, backend, x, tx, contexts) where {F} = last(value_and_pushforward(
    f,
    backend,
    x,
    tx,
    contexts,
))
function value_and_pushforward(f::F, backend, x, tx, contexts) where {F}
    pairs = map(t -> value_and_directional(f, backend, x, t, contexts), tx)
    return first(first(pairs)), map(last, pairs)
end

function value_and_directional(f::F, backend, x, t, contexts) where {F}
    args = arguments(x, contexts)
    y = f(args...)
    dy = form(inner(backend), f, args, (nothing, alone(t, args)), Val(0))
    return y, dense(dy, y)
end
