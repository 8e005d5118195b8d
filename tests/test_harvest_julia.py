"""`sow` in Julia code, reaped from Python: against the same function in JAX, named alike."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pybridge import (
    harvest,
    hvp,
    julia_function,
    laplacian,
    mixed_vjp,
    nested_grad,
    nested_value_and_grad,
)
from pybridge.harvest import HarvestError, Undefined, nest, plant, reap, sow

pytestmark = pytest.mark.usefixtures("julia", "x64")

x, p = np.array([0.5, 0.8]), 1.5


@functools.cache
def in_julia():
    return julia_function(
        "(x, p) -> sum(sin.(sow(p .* x .^ 3, :v)))", using=("NestedGradients",), name="loss"
    )


def in_jax(x, p):
    return jnp.sum(jnp.sin(sow(p * x**3, "v")))


def twice(t):
    """A transformation of it, reaped on both sides: two pairs (result, entry)."""
    pairs = [reap(t(f))(x) for f in (in_julia(), in_jax)]
    return [(out, named["v"]) for out, named in pairs]


same = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)

FIRST = {
    "grad": lambda f: harvest.grad(lambda x: f(x, p)),
    "jit of grad": lambda f: jax.jit(harvest.grad(lambda x: f(x, p))),
    "vmap of grad": lambda f: (
        lambda x: harvest.vmap(harvest.grad(f), in_axes=(0, None), out_axes=1)(
            jnp.stack([x, 2 * x, x + 1]), p
        )
    ),
    "scan": lambda f: harvest.grad(
        lambda x: jax.lax.scan(lambda c, t: (c + f(x * t, c), None), 0.5, jnp.arange(1.0, 4.0))[0]
    ),
}


@pytest.mark.parametrize("t", FIRST.values(), ids=FIRST.keys())
def test_values_cotangents_jacobians(t):
    (out, e), (out_, e_) = twice(t)
    same(out, out_)
    for attribute in ("value", "cotangent", "jacobian"):
        same(getattr(e, attribute), getattr(e_, attribute))


def test_jvp():
    (_, e), (_, e_) = twice(lambda f: lambda x: harvest.jvp(lambda x: f(x, p), (x,), (x,)))
    same(e.value, e_.value)
    same(e.tangent, e_.tangent)


def second(f):
    """The gradient of a squared inner gradient; the inner one is nested_grad's where f is Julia's."""
    inner = harvest.grad if f is in_jax else lambda f: lambda x, p: nested_grad(f, x, p)
    return lambda x: harvest.grad(lambda p: jnp.sum(inner(f)(x, p) ** 2))(p)


SECOND = {
    "grad of nested_grad": second,
    "grad of grad": lambda f: harvest.grad(lambda x: jnp.sum(harvest.grad(f)(x, p) ** 2)),
}


@pytest.mark.parametrize("t", SECOND.values(), ids=SECOND.keys())
def test_second_order(t):
    (out, e), (out_, e_) = twice(t)
    same(out, out_)
    for a in ("value", "cotangent"):
        for b in ("value", "cotangent", "jacobian"):
            same(getattr(getattr(e, a), b), getattr(getattr(e_, a), b), err_msg=f"{a}.{b}")


def test_jax_s_own_grad():
    out, named = reap(jax.grad(lambda x: in_julia()(x, p)))(x)
    same(out, jax.grad(in_jax)(x, p))
    same(named["v"].value, p * x**3)
    same(named["v"].cotangent, np.cos(p * x**3))
    with pytest.raises(Undefined, match=r"pybridge\.harvest\.grad"):
        _ = named["v"].jacobian


NESTED = {
    "nested_grad": lambda f: lambda x: nested_grad(f, x, p, argnums=(0, 1)),
    "nested_value_and_grad": lambda f: lambda x: nested_value_and_grad(f, x, p),
    "hvp": lambda f: lambda x: hvp(f, x, x, p),
    "mixed_vjp": lambda f: lambda x: mixed_vjp(f, x, x, p),
    "laplacian": lambda f: lambda x: laplacian(f, x, p),
}


@pytest.mark.parametrize("t", NESTED.values(), ids=NESTED.keys())
def test_nested_derivatives_as_of_the_same_function_in_python(t):
    """Values, cotangents and Jacobians, all orders there are."""
    (out, e), (out_, e_) = twice(t)
    jax.tree.map(same, out, out_)
    for a in ("value", "cotangent", "jacobian"):
        one, two = getattr(e, a), getattr(e_, a)
        for d in ("value", "tangent") if e.order == 2 else ():
            of = lambda entry, d=d: jax.tree.map(lambda entry: getattr(entry, d), entry)
            jax.tree.map(same, of(one), of(two))
        if e.order == 1:
            jax.tree.map(same, one, two)


def test_lazy():
    lazy = reap(harvest.grad(in_julia()), lazy=True)
    same(lazy["v"](x, p), p * x**3)
    same(lazy["v"].cotangent(x, p), np.cos(p * x**3))
    same(lazy["grad", "v"](x, p), np.diag(3 * p * x**2))


def test_names_on_both_sides():
    f = lambda x: in_julia()(sow(x**2, "square"), p)
    _, named = reap(harvest.grad(f))(x)
    assert sorted(named) == ["square", "v"]
    same(named["square"].cotangent, np.cos(p * x**6) * 3 * p * x**4)
    same(named["v"].jacobian, np.diag(6 * p * x**5))


def test_several_values_and_what_is_ignored():
    f = julia_function(
        "x -> (sow(x^2, :spare); s = sow((a = 2x, b = [x, 3x]), :pair); s.a * sum(s.b))",
        using=("NestedGradients",),
    )
    _, named = reap(harvest.grad(f))(2.0)
    assert list(named) == ["pair", "spare"]
    assert named["pair"].value["b"].tolist() == [2, 6]
    assert named["pair"].cotangent["a"] == 8
    assert named["pair"].cotangent["b"].tolist() == [4, 4]
    assert (named["spare"].value, named["spare"].jacobian) == (4, 4)
    with pytest.raises(Undefined, match="result is ignored"):
        _ = named["spare"].cotangent


def test_nest_reaches_into_julia():
    f = in_julia()
    both = lambda x: nest(f, "a")(x, p) + nest(jax.jit(f), ("b", 1))(x, 2 * p)
    _, named = reap(harvest.grad(both))(x)
    assert list(named) == [("a", "v"), ("b", 1, "v")]
    same(named["a"]["v"].cotangent, np.cos(p * x**3))
    same(named["b", 1, "v"].cotangent, np.cos(2 * p * x**3))


def test_jax_s_own_vmap_puts_the_batch_first():
    xs = np.stack([x, 2 * x, x + 1])
    total = lambda vmap, f: lambda p: jnp.sum(vmap(f, (0, None))(xs, p) ** 2)
    _, named = reap(jax.grad(total(jax.vmap, in_julia())))(p)  # sums over lanes in one form
    _, named_ = reap(harvest.grad(total(harvest.vmap, in_jax)))(p)
    for attribute in ("value", "cotangent"):
        same(getattr(named["v"], attribute), getattr(named_["v"], attribute))


def test_what_is_refused():
    f = in_julia()
    with pytest.raises(HarvestError, match="sown twice"):
        reap(lambda x: f(x, p) + f(2 * x, p))(x)
    with pytest.raises(HarvestError, match="nothing can be planted"):
        plant(f, {"v": x})(x, p)
    with pytest.raises(HarvestError, match=r"Use those of pybridge\.harvest"):
        reap(jax.grad(lambda x: jnp.sum(jax.grad(f)(x, p) ** 2)))(x)


def test_a_function_that_sows_nothing():
    f = julia_function("x -> 3x")
    _, named = reap(harvest.grad(lambda x: f(sow(x**2, "a"))))(2.0)
    assert named["a"].cotangent == 3
