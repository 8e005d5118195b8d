"""nested_grad and its family on the JAX engine, against central differences in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pybridge
from pybridge import (
    hvp,
    laplacian,
    mixed_vjp,
    nested_grad,
    nested_jacobian,
    nested_value_and_grad,
)

rng = np.random.default_rng(0)


def central(f, x, v, h=1e-6):
    """The derivative of f at x along v."""
    move = lambda s: jax.tree.map(lambda a, d: a + s * d, x, v)
    return jax.tree.map(
        lambda a, b: (np.asarray(a) - np.asarray(b)) / (2 * h), f(move(h)), f(move(-h))
    )


def central_gradient(f, x, h=1e-6):
    x = np.asarray(x, np.float64)
    units = np.eye(x.size).reshape(x.size, *x.shape)
    return np.array([central(f, x, e, h) for e in units]).reshape(x.shape)


# ---- the worked example of the public discussion (seeds/004) ------------------------------------


def check_discussion(f):
    """f(x, p) = sum(p)^2 / |x| + p[1] x[2], h = (sum of grad_x f)^3, in p and in x."""
    h = jax.jit(lambda x, p: jnp.sum(nested_grad(f, x, p)) ** 3)
    draw = np.random.default_rng(0)
    x, p = draw.normal(size=5), draw.normal(size=4)

    def by_hand(x, p):
        # The inner gradient by hand, so that the differences know nothing of any AD.
        inner = -(np.sum(p) ** 2) * x / np.linalg.norm(x) ** 3
        inner[1] += p[0]
        return np.sum(inner) ** 3

    np.testing.assert_allclose(h(x, p), by_hand(x, p), rtol=1e-12)
    for got, want in zip(
        jax.grad(h, (0, 1))(x, p),
        (
            central_gradient(lambda x: by_hand(x, p), x),
            central_gradient(lambda p: by_hand(x, p), p),
        ),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_the_public_discussions_example(x64):
    check_discussion(lambda x, p: jnp.sum(p) ** 2 / jnp.linalg.norm(x) + p[0] * x[1])


# ---- values, and every order by differences ---------------------------------------------------------


def loss(x, ps):
    y = jnp.tanh(ps["W"] @ x["u"] + ps["b"]) * x["t"]
    return jnp.sum(y**2) + jnp.sum(jnp.sin(x["u"]) * x["t"] ** 3)


X = {"u": rng.normal(size=3), "t": 0.7}
PS = {"W": rng.normal(size=(4, 3)), "b": rng.normal(size=4)}
V = {"u": rng.normal(size=3), "t": 0.3}


def test_gradient_is_a_tree_like_x_and_right(x64):
    got = nested_grad(loss, X, PS)
    assert jax.tree.structure(got) == jax.tree.structure(X)
    np.testing.assert_allclose(
        got["t"], central(lambda t: loss({**X, "t": t}, PS), 0.7, 1.0), rtol=1e-8
    )
    want = central_gradient(lambda u: loss({**X, "u": u}, PS), X["u"])
    np.testing.assert_allclose(got["u"], want, rtol=1e-7)


def test_every_mode_to_the_third_order(x64):
    check_grads(functools.partial(nested_grad, loss), (X, PS), order=3, modes=["fwd", "rev"])


def test_value_and_grad(x64):
    value, grad = nested_value_and_grad(loss, X, PS)
    np.testing.assert_allclose(value, loss(X, PS))
    np.testing.assert_allclose(grad["u"], nested_grad(loss, X, PS)["u"])


def test_hvp_and_mixed_vjp_against_differences_of_the_gradient(x64):
    both = lambda x: nested_grad(loss, x, PS, argnums=(0, 1))
    want_x, want_ps = central(both, X, V)
    got_x, got_ps = mixed_vjp(loss, X, V, PS)
    check = functools.partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-8)
    jax.tree.map(check, got_x, want_x)
    jax.tree.map(check, got_ps, want_ps)
    jax.tree.map(check, hvp(loss, X, V, PS), want_x)


def test_mixed_vjp_is_the_pullback_of_nested_grad(x64):
    _, pullback = jax.vjp(functools.partial(nested_grad, loss), X, PS)
    want = pullback(jax.tree.map(jnp.asarray, V))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-12), mixed_vjp(loss, X, V, PS), want
    )


def test_jacobian_against_differences_and_differentiable(x64):
    h = lambda x, ps: jnp.tanh(ps @ x)
    x, ps = rng.normal(size=3), rng.normal(size=(2, 3))
    want = np.stack([central(lambda y: h(y, ps), x, e) for e in np.eye(3)], axis=1)
    np.testing.assert_allclose(nested_jacobian(h, x, ps), want, rtol=1e-8)
    wide = rng.normal(size=(5, 3))
    assert nested_jacobian(h, x, wide).shape == (5, 3)
    check_grads(lambda x, ps: nested_jacobian(h, x, ps), (x, ps), order=2, modes=["fwd", "rev"])


def test_laplacian_against_second_differences_and_differentiable(x64):
    f = lambda x, p: jnp.exp(p * x["a"][0]) * jnp.sin(x["a"][1]) + x["b"] ** 4
    x = {"a": rng.normal(size=2), "b": 0.6}

    def second(move, h=1e-4):
        return (f(move(h), 1.3) - 2 * f(x, 1.3) + f(move(-h), 1.3)) / h**2

    want = second(lambda h: {**x, "b": x["b"] + h})
    for e in np.eye(2):
        want += second(lambda h, e=e: {**x, "a": x["a"] + h * e})
    np.testing.assert_allclose(laplacian(f, x, 1.3), want, rtol=1e-6)
    check_grads(lambda p: laplacian(f, x, p), (1.3,), order=2, modes=["fwd", "rev"])


# ---- trees, dtypes, argnums, aux ---------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    u: object
    t: object


def test_dataclasses_lists_tuples_and_none():
    f = lambda x, ps: jnp.sum(x.u[0] * ps[0]) + x.t[1] ** 2 * ps[1]
    x = Point([jnp.ones(2)], (None, 3.0))
    got = nested_grad(f, x, (jnp.arange(2.0), 2.0))
    assert isinstance(got, Point)
    assert got.t[0] is None
    np.testing.assert_allclose(got.u[0], [0.0, 1.0])
    np.testing.assert_allclose(got.t[1], 12.0)


def test_integer_boolean_and_key_leaves_pass_and_get_float0():
    def f(x, ps):
        noise = jax.random.normal(ps["key"], x.shape)
        return jnp.sum(jnp.where(ps["mask"], x**2, noise * x) * ps["n"] * ps["w"])

    ps = {"key": jax.random.key(1), "mask": jnp.array([True, False]), "n": 3, "w": jnp.ones(2)}
    gradient = lambda x, ps: nested_grad(f, x, ps, argnums=(0, 1))
    dx, dps = gradient(jnp.array([1.0, 2.0]), ps)
    np.testing.assert_allclose(dx[0], 6.0)
    float0 = jax.dtypes.float0
    assert [dps[k].dtype for k in ("key", "mask", "n")] == [float0] * 3
    _, dps = mixed_vjp(f, jnp.array([1.0, 2.0]), jnp.ones(2), ps)
    assert [dps[k].dtype for k in ("key", "mask", "n")] == [float0] * 3
    np.testing.assert_allclose(dps["w"][0], 6.0)  # d/dx of d/dw (3 x^2 w)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_is_kept(x64, dtype):
    x, ps = jax.tree.map(lambda a: np.asarray(a, dtype), (X, PS))
    for leaf in jax.tree.leaves((nested_grad(loss, x, ps), mixed_vjp(loss, x, x, ps))):
        assert leaf.dtype == dtype


def test_float64_numpy_input_follows_jax_in_32_bit_mode():
    assert nested_grad(lambda x: jnp.sum(x**2), np.ones(2)).dtype == np.float32


def test_argnums_as_in_jax_grad(x64):
    for argnums in (0, 1, -1, (0, 1), (1,)):
        got = nested_grad(loss, X, PS, argnums=argnums)
        want = jax.grad(loss, argnums)(X, PS)
        assert jax.tree.structure(got) == jax.tree.structure(want)


def test_has_aux():
    f = lambda x, ps: (jnp.sum(x**2) * ps, {"double": 2 * x})
    grad, aux = nested_grad(f, jnp.ones(2), 3.0, has_aux=True)
    np.testing.assert_allclose(grad, [6.0, 6.0])
    np.testing.assert_allclose(aux["double"], [2.0, 2.0])
    (value, aux), grad = nested_value_and_grad(f, jnp.ones(2), 3.0, has_aux=True)
    np.testing.assert_allclose(value, 6.0)


def test_a_zero_by_structure_is_legitimate():
    np.testing.assert_array_equal(nested_grad(lambda x, ps: ps * 2.0, jnp.ones(2), 1.0), [0, 0])


def test_nan_passes_through():
    assert np.isnan(nested_grad(lambda x: jnp.sum(x**2), jnp.array([np.nan, 1.0]))[0])


def test_debug_nans_is_quiet_where_nothing_is_nan(x64):
    with jax.debug_nans(True):
        penalty = lambda ps: sum(jnp.sum(g**2) for g in jax.tree.leaves(nested_grad(loss, X, ps)))
        jax.block_until_ready(jax.jit(jax.grad(penalty))(PS))


# ---- closures --------------------------------------------------------------------------------------------


def test_captured_values_get_their_gradients(x64):
    """Lux#630 in Python: the inner gradient of (z -> dot(v, z)) after a linear model, in v."""
    W, v, x = rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=3)

    def penalty(v, W):
        return jnp.sum(nested_grad(lambda x: v @ (W @ x), x) ** 2)

    check_grads(penalty, (v, W), order=2, modes=["fwd", "rev"])
    np.testing.assert_allclose(jax.grad(penalty)(v, W), 2 * W @ W.T @ v, rtol=1e-12)


@pytest.mark.parametrize(
    ("report", "build", "value"),
    [
        (
            "Zygote#1218",
            lambda: jax.grad(lambda y: nested_grad(lambda x: x * jnp.sum(y), 0.1))(np.ones(3)),
            np.ones(3),
        ),
        (
            "Zygote#1268",
            lambda: jax.grad(
                lambda b: jnp.sum(nested_jacobian(lambda x: x**3, X["u"]) @ X["u"] + b)
            )(np.ones(3)),
            np.ones(3),
        ),
        (
            "Zygote#1264",
            lambda: jax.grad(
                lambda ps: jnp.sum(
                    jax.hessian(lambda x: jnp.sum(x**3))(X["u"]) @ X["u"] + ps["bias"]
                )
            )({"bias": np.ones(3)})["bias"],
            np.ones(3),
        ),
        ("Zygote#1013", lambda: jax.grad(lambda x: nested_grad(lambda x: x**2 * 3.0, x))(1.0), 6.0),
        (
            "Zygote#1271",
            lambda: jax.jacfwd(lambda x: nested_grad(lambda x: jnp.sum(x**2 * PS["b"]), x))(
                np.ones(4)
            ),
            np.diag(2 * PS["b"]),
        ),
    ],
)
def test_public_report(x64, report, build, value):
    np.testing.assert_allclose(build(), value, rtol=1e-12)


# ---- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nested_grad(lambda x: x**2, jnp.ones(3)), ValueError, r"scalar.*shape \(3,\)"),
        (lambda: nested_grad(lambda x: (x, x), 1.0), TypeError, r"must return one scalar"),
        (lambda: nested_grad(lambda x: jnp.sum(x > 0), jnp.ones(2)), TypeError, r"dtype int32"),
        (
            lambda: nested_grad(jnp.sum, {"a": jnp.arange(3)}),
            TypeError,
            r"x\['a'\] has dtype int32",
        ),
        (lambda: nested_grad(jnp.sum, [1.0, True]), TypeError, r"x\[1\] has dtype bool"),
        (lambda: nested_grad(jnp.sum, {"name": "text"}), TypeError, r"x\['name'\].*type str"),
        (lambda: nested_grad(jnp.sum, jnp.ones((0, 3))), ValueError, r"x has shape \(0, 3\)"),
        (lambda: nested_grad(jnp.sum, None), ValueError, r"x has no leaves"),
        (lambda: nested_grad(jnp.sum, 1.0, argnums=1), ValueError, r"argnums=1.*ps is None"),
        (lambda: nested_grad(jnp.sum, 1.0, 2.0, argnums=2), ValueError, r"argnums=2"),
        (lambda: nested_grad(jnp.sum, 1.0, argnums=()), ValueError, r"at least one position"),
        (lambda: nested_grad(jnp.dot, 1.0, 2.0, argnums=(0, -2)), ValueError, r"none twice"),
        (lambda: nested_grad(jnp.dot, 1.0, {"a": "s"}), TypeError, r"ps\['a'\] is of type str"),
        (lambda: hvp(jnp.dot, 1.0, 1.0, ["s"]), TypeError, r"ps\[0\] is of type str"),
        (lambda: laplacian(jnp.dot, 1.0, "s"), TypeError, r"ps is of type str"),
        (lambda: nested_grad(jnp.sum, np.longdouble(1)), TypeError, r"x is of dtype float128"),
        (lambda: nested_grad(jnp.sum, np.array([None])), TypeError, r"x is of dtype object"),
        (lambda: hvp(jnp.sum, 1.0, 10**400), TypeError, r"v is of type int"),
        (lambda: hvp(jnp.sum, 1.0, jax.random.key(0)), TypeError, r"v has dtype key"),
        (lambda: nested_jacobian(lambda x: None, 1.0), TypeError, r"it returned None"),
        (lambda: nested_jacobian(lambda x: (x, 3), 1.0), TypeError, r"result\[1\] has dtype int"),
        (lambda: nested_jacobian(jnp.sin, 1j), TypeError, r"x is complex"),
        (lambda: nested_grad("x^2", 1.0), TypeError, r"pybridge.julia_function"),
        (lambda: nested_grad(jnp.sum, 1.0, engine="torch"), ValueError, r"'jax', 'julia'"),
        (lambda: nested_grad(jnp.sum, 1.0, engine="julia"), TypeError, r"cannot\s+differentiate"),
        (lambda: hvp(jnp.sum, jnp.ones(2), jnp.ones(3)), ValueError, r"v has shape \(3,\)"),
        (lambda: hvp(jnp.sum, {"a": 1.0}, {"b": 1.0}), ValueError, r"v must be a pytree like x"),
        (lambda: nested_grad(lambda x: x, 1.0, has_aux=True), TypeError, r"pair \(value, aux\)"),
        (lambda: pybridge.custom_vjp(jnp.sin), TypeError, r"Python callable"),
        (lambda: laplacian(jnp.abs, 1j), TypeError, r"x is complex"),
        (lambda: laplacian(lambda x: x, jnp.ones(2)), ValueError, r"must return a scalar"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
