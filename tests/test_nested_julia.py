"""nested_grad and its family on the Julia engine, against central differences and by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_nested import central, central_gradient, check_discussion

from pybridge import (
    LuxModel,
    custom_vjp,
    hvp,
    julia_function,
    laplacian,
    mixed_vjp,
    nested_grad,
    nested_jacobian,
    nested_value_and_grad,
)

pytestmark = pytest.mark.usefixtures("julia", "x64")
rng = np.random.default_rng(0)


def test_the_public_discussions_example():
    """seeds/004, with its function in Julia."""
    check_discussion(julia_function("(x, p) -> sum(p)^2 / sqrt(sum(abs2, x)) + p[1] * x[2]"))


CUBIC = "(x, p) -> p.a * sum(x .^ 3) * p.n + sum(p.w .* x)"


@pytest.fixture(scope="module")
def cubic():
    return julia_function(
        CUBIC, name="cubic", result=lambda x, p: jax.ShapeDtypeStruct((), x.dtype)
    )


X, P = np.array([0.5, -1.0, 2.0]), {"a": 0.7, "n": 2, "w": np.array([1.0, 2.0, 3.0])}


def test_argnums_and_leaves_without_a_derivative(cubic):
    value, (dx, dp) = nested_value_and_grad(cubic, X, P, argnums=(0, 1))
    np.testing.assert_allclose(value, 1.4 * np.sum(X**3) + P["w"] @ X)
    np.testing.assert_allclose(dx, 4.2 * X**2 + P["w"])
    np.testing.assert_allclose(dp["a"], 2 * np.sum(X**3))
    np.testing.assert_allclose(dp["w"], X)
    assert dp["n"].dtype == jax.dtypes.float0
    np.testing.assert_allclose(nested_grad(cubic, X, P, argnums=-1)["a"], dp["a"])


def test_hvp_and_mixed_vjp(cubic):
    v = rng.normal(size=3)
    np.testing.assert_allclose(hvp(cubic, X, v, P), 8.4 * X * v)
    products = mixed_vjp(cubic, X, v, P)
    np.testing.assert_allclose(products[0], 8.4 * X * v)
    np.testing.assert_allclose(products[1]["a"], 6 * X**2 @ v)
    np.testing.assert_allclose(products[1]["w"], v)
    assert products[1]["n"].dtype == jax.dtypes.float0


def test_laplacian_in_every_mode(cubic):
    lap = lambda x, a: laplacian(cubic, x, {**P, "a": a})
    np.testing.assert_allclose(lap(X, 0.7), 8.4 * np.sum(X))
    dx, da = jax.grad(lap, (0, 1))(X, 0.7)
    np.testing.assert_allclose(dx, np.full(3, 8.4))
    np.testing.assert_allclose(da, 12 * np.sum(X))
    batch = np.stack([X, 2 * X])
    np.testing.assert_allclose(jax.vmap(lap, (0, None))(batch, 0.7), 8.4 * np.sum(batch, axis=1))


def test_laplacian_of_a_lux_model_in_a_loss():
    """The residual of a physics-informed network: third derivatives, with shared parameters."""
    model = LuxModel("Chain(Dense(2 => 5, tanh), Dense(5 => 1))")
    ps, _ = model.setup(0, dtype=np.float64)
    u = model.loss("(m, x, ps) -> sum(m(x, ps))", batch="(m, x, ps) -> vec(m(x, ps))")

    def twin(x, ps):
        first, second = ps["layer_1"], ps["layer_2"]
        h = jnp.tanh(first["weight"] @ x + first["bias"])
        return (second["weight"] @ h + second["bias"])[0]

    points = rng.normal(size=(7, 2))

    def residual(u):
        return lambda ps: jnp.mean(jax.vmap(lambda x: laplacian(u, x, ps))(points) ** 2)

    got, want = (jax.jit(jax.value_and_grad(residual(f)))(ps) for f in (u, twin))
    check = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    jax.tree.map(check, got, want)
    weight = ps["layer_1"]["weight"]
    e = np.zeros_like(weight)
    e[1, 0] = 1.0
    move = lambda w: residual(u)({**ps, "layer_1": {**ps["layer_1"], "weight": w}})
    np.testing.assert_allclose(
        got[1]["layer_1"]["weight"][1, 0], central(move, weight, e), rtol=1e-6
    )


def test_jacobian_of_an_array_valued_function():
    h = julia_function("(x, W) -> tanh.(W * x)", name="layer")
    W, x = rng.normal(size=(2, 3)), rng.normal(size=3)
    slope = 1 - np.tanh(W @ x) ** 2
    np.testing.assert_allclose(nested_jacobian(h, x, W), slope[:, None] * W)
    total = lambda W: jnp.sum(nested_jacobian(h, x, W) ** 2)
    by_hand = lambda W: np.sum(((1 - np.tanh(W @ x) ** 2)[:, None] * W) ** 2)
    np.testing.assert_allclose(jax.grad(total)(W), central_gradient(by_hand, W), rtol=1e-6)


def test_has_aux():
    f = julia_function("(x, p) -> (p * sum(abs2, x), (double=2 .* x,))", name="with_aux")
    (value, aux), grad = nested_value_and_grad(f, X, 3.0, has_aux=True)
    np.testing.assert_allclose(value, 3 * X @ X)
    np.testing.assert_allclose(aux["double"], 2 * X)
    np.testing.assert_allclose(grad, 6 * X)
    bad = julia_function("(x, p) -> p * sum(abs2, x)", name="without_aux")
    with pytest.raises(TypeError, match=r"pair \(value, aux\)"):
        nested_grad(bad, X, 3.0, has_aux=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    position: object
    charge: object


def test_dataclasses_tuples_and_keys():
    f = julia_function(
        "(x, ps) -> x.charge^2 * sum(x.position[1]) + ps[2] * length(ps[1])", name="state"
    )
    x = State((np.ones(2),), 3.0)
    got = nested_grad(f, x, (jax.random.key(0), 2.0))
    assert isinstance(got, State)
    np.testing.assert_allclose(got.position[0], [9.0, 9.0])
    np.testing.assert_allclose(got.charge, 12.0)


def test_custom_vjp_is_that_rule_and_no_more(cubic):
    rule = custom_vjp(cubic)
    assert isinstance(rule, jax.custom_vjp)
    dx, dp = jax.jit(jax.grad(rule, (0, 1), allow_int=True))(X, P)
    np.testing.assert_allclose(dx, 4.2 * X**2 + P["w"])
    np.testing.assert_allclose(dp["a"], 2 * np.sum(X**3))
    second = jax.grad(lambda x: jnp.sum(jax.grad(rule)(x, P)))(X)
    np.testing.assert_allclose(second, 8.4 * X)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: rule(x, P), (X,), (X,))


def test_engines_are_not_mixed_up(cubic):
    with pytest.raises(TypeError, match="engine='jax' was asked for"):
        nested_grad(cubic, X, P, engine="jax")
    np.testing.assert_allclose(nested_grad(cubic, X, P, engine="julia"), 4.2 * X**2 + P["w"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: nested_grad(f, np.arange(3), P), TypeError, "x has dtype int64"),
        (
            lambda f: nested_grad(f, X, {**P, "w": "text"}),
            TypeError,
            r"ps\['w'\] is of type str",
        ),
        (lambda f: nested_grad(f, X[:0], P), ValueError, r"x has shape \(0,\)"),
        (lambda f: hvp(f, X, X[:2], P), ValueError, r"v has shape \(2,\)"),
    ],
)
def test_bad_input(cubic, call, error, message):
    with pytest.raises(error, match=message):
        call(cubic)


def test_nan_passes_through(cubic):
    assert np.isnan(nested_grad(cubic, np.array([np.nan, 1.0, 1.0]), P)[0])
