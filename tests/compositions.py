"""Compositions of JAX transformations as data: each takes (g, f), the inner gradient and the value
of one function, and gives a callable and its arguments.

The function is one that JAX sees into and whose Julia text is beside it, so that every composition
of an engine's form is held against the same composition of plain JAX derivatives.
"""

import jax
import jax.numpy as jnp
import numpy as np

JULIA = "(x, ps) -> ps.a * sum(abs2, tanh.(ps.W * x .+ ps.b)) + sum(sin, x) * prod(x)^2"
# The same of a batch, its samples last.
BATCH = """
(X, ps) -> begin
    values = ps.a .* sum(abs2, tanh.(ps.W * X .+ ps.b); dims=1)
    products = X[1:1, :] .* X[2:2, :] .* X[3:3, :]
    vec(values .+ sum(sin.(X); dims=1) .* products .^ 2)
end
"""


def f(x, ps):
    y = jnp.tanh(ps["W"] @ x + ps["b"])
    return jnp.sum(y**2) * ps["a"] + jnp.sum(jnp.sin(x)) * jnp.prod(x) ** 2


_rng = np.random.default_rng(0)
N, M = 5, 3


def parameters(*lead):
    return {
        "W": _rng.normal(size=(*lead, 4, 3)),
        "b": _rng.normal(size=(*lead, 4)),
        "a": _rng.normal(size=lead),
    }


x, ps, X, XX, PS = (
    _rng.normal(size=3),
    parameters(),
    _rng.normal(size=(N, 3)),
    _rng.normal(size=(M, N, 3)),
    parameters(N),
)
v, dps = _rng.normal(size=3), parameters()


def scalar(g):
    """A scalar function of the inner gradient: what a gradient penalty is."""
    return lambda x, ps: jnp.sum(g(x, ps) ** 2) + jnp.sum(jnp.cos(g(x, ps)))


def over(g, axes=(0, None)):
    return lambda x, ps: jnp.sum(jnp.sin(jax.vmap(g, axes)(x, ps)))


def _linearized(g):
    def apply(x, ps):
        out, pushforward = jax.linearize(g, x, ps)
        return out, pushforward(v, dps), pushforward(2 * v, dps)

    return apply


def _scan(g, f):
    def loss(x, ps):
        def step(c, xi):
            return c - 0.1 * g(c + 0.1 * xi, ps), g(c, ps)

        return jnp.sum(jax.lax.scan(step, x, X)[1] ** 2)

    return loss


def _while(g, f):
    def run(x, ps):
        step = lambda c: (c[0] + 1, c[1] - 0.1 * g(c[1], ps))
        return jax.lax.while_loop(lambda c: c[0] < 4, step, (0, x))[1]

    return lambda x, ps: jax.jvp(run, (x, ps), (v, dps))


def _cond(g, f):
    pick = lambda x, ps: jax.lax.cond(x[0] > 0, lambda x: g(x, ps), lambda x: 2 * x, x)
    return lambda x, ps: jnp.sum(pick(x, ps) ** 2)


def _fori(g, f):
    return lambda x, ps: jnp.sum(jax.lax.fori_loop(0, 4, lambda i, c: c - 0.1 * g(c, ps), x))


def _instantiated_zeros(g, f):
    # A custom_jvp rule that calls jax.jvp gets zeros that are values: a linear slot partly known.
    h = jax.custom_jvp(g)
    h.defjvp(lambda primals, tangents: jax.jvp(g, primals, tangents))
    return lambda ps: jnp.sum(h(x, ps) ** 2)


def _transposed(g, f):
    push = lambda d: jax.jvp(lambda y: g(y, ps), (x,), (d,))[1]
    return lambda c: jax.linear_transpose(push, x)(c)


def _third(g, f):
    inner = lambda x, ps: jnp.sum(jax.grad(scalar(g), 1)(x, ps)["W"] ** 2)
    return jax.grad(inner, (0, 1))


def _debugged(g, f):
    def apply(x, ps):
        with jax.debug_nans(True):
            return jax.jit(jax.grad(scalar(g), (0, 1)))(x, ps)

    return apply


ALL = {
    "value": lambda g, f: (f, x, ps),
    "gradient": lambda g, f: (g, x, ps),
    "jit": lambda g, f: (jax.jit(g), x, ps),
    "grad of value": lambda g, f: (jax.grad(f, (0, 1)), x, ps),
    "value_and_grad": lambda g, f: (jax.value_and_grad(f, (0, 1)), x, ps),
    "grad": lambda g, f: (jax.grad(scalar(g), (0, 1)), x, ps),
    "jit(grad)": lambda g, f: (jax.jit(jax.grad(scalar(g), (0, 1))), x, ps),
    "grad(jit)": lambda g, f: (jax.grad(jax.jit(scalar(g)), (0, 1)), x, ps),
    "grad in one leaf": lambda g, f: (
        jax.grad(lambda b: scalar(g)(x, {**ps, "b": b})),
        ps["b"],
    ),
    "jvp": lambda g, f: (lambda *a: jax.jvp(g, a, (v, dps)), x, ps),
    "jvp in x": lambda g, f: (lambda x: jax.jvp(lambda y: g(y, ps), (x,), (v,)), x),
    "linearize": lambda g, f: (_linearized(g), x, ps),
    "jit(linearize)": lambda g, f: (jax.jit(_linearized(g)), x, ps),
    "jacfwd": lambda g, f: (jax.jacfwd(g, (0, 1)), x, ps),
    "jacrev": lambda g, f: (jax.jacrev(g, (0, 1)), x, ps),
    "hessian of value": lambda g, f: (jax.hessian(f, (0, 1)), x, ps),
    "hessian": lambda g, f: (jax.hessian(scalar(g)), x, ps),
    "jacrev(jacrev)": lambda g, f: (jax.jacrev(jax.jacrev(g, 1), 0), x, ps),
    "jacrev(jacfwd)": lambda g, f: (jax.jacrev(jax.jacfwd(g, 1), 0), x, ps),
    "jit(jacfwd(jacrev))": lambda g, f: (jax.jit(jax.jacfwd(jax.jacrev(g, 0), 1)), x, ps),
    "third derivative": lambda g, f: (jax.jacfwd(jax.hessian(f)), x, ps),
    "grad(grad(grad))": lambda g, f: (_third(g, f), x, ps),
    "linear_transpose": lambda g, f: (_transposed(g, f), v),
    "vmap x": lambda g, f: (jax.vmap(g, (0, None)), X, ps),
    "vmap x, axes 1": lambda g, f: (jax.vmap(g, (1, None), 1), X.T.copy(), ps),
    "vmap ps": lambda g, f: (jax.vmap(g, (None, 0)), x, PS),
    "vmap both": lambda g, f: (jax.vmap(g), X, PS),
    "vmap one leaf": lambda g, f: (
        jax.vmap(g, (0, {"W": 0, "a": None, "b": None})),
        X,
        {**ps, "W": PS["W"]},
    ),
    "vmap(vmap) x": lambda g, f: (jax.vmap(jax.vmap(g, (0, None)), (0, None)), XX, ps),
    "vmap(vmap) x, ps": lambda g, f: (jax.vmap(jax.vmap(g, (0, None)), (None, 0)), X, PS),
    "vmap value": lambda g, f: (jax.vmap(f, (0, None)), X, ps),
    "grad(vmap)": lambda g, f: (jax.jit(jax.grad(over(g), (0, 1))), X, ps),
    "grad(vmap value)": lambda g, f: (jax.grad(over(f), (0, 1)), X, ps),
    "grad(vmap(vmap))": lambda g, f: (
        jax.grad(over(jax.vmap(g, (0, None)), (None, 0)), (0, 1)),
        X,
        PS,
    ),
    "vmap(grad)": lambda g, f: (jax.vmap(jax.grad(scalar(g), 1), (0, None)), X, ps),
    "vmap(grad(vmap))": lambda g, f: (
        jax.vmap(jax.grad(over(g), (0, 1)), (0, None)),
        XX,
        ps,
    ),
    "grad(vmap(grad))": lambda g, f: (
        jax.grad(over(lambda x, p: jax.grad(scalar(g), 1)(x, p)["W"]), (0, 1)),
        X,
        ps,
    ),
    "hvp of a vmapped loss": lambda g, f: (
        lambda p: jax.jvp(jax.grad(lambda p: over(g)(X, p)), (p,), (dps,)),
        ps,
    ),
    "jacrev(vmap)": lambda g, f: (jax.jacrev(jax.vmap(g, (0, None)), 1), X, ps),
    "grad(scan)": lambda g, f: (jax.grad(_scan(g, f), (0, 1)), x, ps),
    "jit(jvp(scan))": lambda g, f: (
        jax.jit(lambda *a: jax.jvp(_scan(g, f), a, (v, dps))),
        x,
        ps,
    ),
    "jvp(while_loop)": lambda g, f: (jax.jit(_while(g, f)), x, ps),
    "grad(fori_loop)": lambda g, f: (jax.grad(_fori(g, f), (0, 1)), x, ps),
    "grad(cond)": lambda g, f: (jax.grad(_cond(g, f), (0, 1)), x, ps),
    "vmap(cond)": lambda g, f: (jax.vmap(_cond(g, f), (0, None)), X, ps),
    "grad(checkpoint)": lambda g, f: (
        jax.grad(lambda x, p: jnp.sum(jnp.sin(jax.checkpoint(g)(jnp.sin(x), p))), (0, 1)),
        x,
        ps,
    ),
    "jit(grad(checkpoint(vmap)))": lambda g, f: (
        jax.jit(jax.grad(jax.checkpoint(lambda x, p: over(g)(jnp.sin(x), p)), (0, 1))),
        X,
        ps,
    ),
    "debug_nans": lambda g, f: (_debugged(g, f), x, ps),
    "custom_jvp with zeros": lambda g, f: (_instantiated_zeros(g, f), ps),
}


def check(name, gradient, value):
    """The composition of an engine's gradient and value is that of plain JAX derivatives."""
    apply, *args = ALL[name](gradient, value)
    plain, *_ = ALL[name](jax.grad(f), f)
    args = jax.tree.map(jnp.asarray, args)
    assert_same(apply(*args), plain(*args))


def assert_same(got, want, rtol=1e-9):
    """The same tree of the same shapes and dtypes, and values that are close by each leaf's size."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert np.shape(a) == np.shape(b)
        assert jnp.result_type(a) == jnp.result_type(b)
        scale = np.max(np.abs(b), initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * scale)
