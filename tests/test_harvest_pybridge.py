"""Named values through pybridge's own loops, windows and nested gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pybridge import (
    bounded_fori_loop,
    bounded_while_loop,
    harvest,
    hvp,
    laplacian,
    mixed_vjp,
    nested_grad,
    nested_jacobian,
    nested_value_and_grad,
    reduce_window,
)
from pybridge.engines.jax import JaxFunction
from pybridge.harvest import HarvestError, Undefined, plant, reap, sow

pytestmark = pytest.mark.usefixtures("x64")

same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
BOUND = 8


def grow(x, w=2.0, mode="strict", **options):
    options = {"max_steps": BOUND, **options}
    return bounded_while_loop(
        lambda c: c < 10, lambda c: sow(jnp.sin(c) + w * c, "c", mode=mode), x, **options
    )


def by_hand(x, w=2.0):
    """Values, cotangents and dv/dx of the loop, one a step."""
    values, slopes, c = [], [], x
    while c < 10:
        slopes.append(np.cos(c) + w)
        c = np.sin(c) + w * c
        values.append(c)
    jacobian = np.cumprod(slopes)
    return np.array(values), jacobian[-1:] / jacobian, jacobian


@pytest.mark.parametrize(
    ("grad", "options"),
    [(harvest.grad, {}), (harvest.grad, {"checkpoints": 2}), (jax.grad, {})],
    ids=["harvest", "harvest, checkpoints", "jax"],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
def test_bounded_while_loop(options, grad, wrap):
    out, named = reap(wrap(grad(functools.partial(grow, **options))))(1.0)
    values, cotangents, jacobian = by_hand(1.0)
    n = len(values)
    e = named["c"]
    same(out, jacobian[-1])
    same(e.value[:n], values)
    same(e.cotangent[:n], cotangents)
    assert not np.any(e.value[n:])
    assert (e.count, e.taken.tolist()) == (n, [True] * n + [False] * (BOUND - n))
    if grad is harvest.grad:
        same(e.jacobian[:n], jacobian)


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}], ids=["", "checkpoints"])
def test_a_checkpoint_around_a_bounded_loop(options):
    out, named = reap(harvest.grad(jax.checkpoint(functools.partial(grow, **options))))(1.0)
    values, cotangents, jacobian = by_hand(1.0)
    n, e = len(values), named["c"]
    pad = lambda rows: [*rows, *[0.0] * (BOUND - n)]
    same(out, jacobian[-1])
    same(e.value, pad(values))
    same(e.cotangent, pad(cotangents))
    same(e.jacobian[:n], jacobian)
    assert e.count == n


def test_jax_s_own_grad_of_a_checkpointed_loop_is_refused():
    """It folds the loop by a primitive of its own, in which a sow is hidden."""
    f = functools.partial(grow, checkpoints=2)
    with pytest.raises(HarvestError, match=r"'c' is sown at .* use pybridge\.harvest\.grad"):
        reap(jax.grad(f))(1.0)


def test_bounded_while_loop_under_vmap():
    x = jnp.array([1.0, 3.0, 50.0])
    _, named = reap(harvest.vmap(harvest.grad(grow)))(x)
    e = named["c"]
    for i in range(3):
        values, cotangents, jacobian = by_hand(float(x[i]))
        n = len(values)
        assert e.count[i] == n
        assert e.taken[i].sum() == n
        same(e.value[i, :n], values)
        if n:
            same(e.cotangent[i, :n], cotangents)
            same(e.jacobian[i, :n], jacobian)


@pytest.mark.parametrize(
    "options", [{"mode": "last"}, {"max_steps": None}], ids=["last", "no bound"]
)
def test_bounded_while_loop_that_keeps_the_last(options):
    f = functools.partial(grow, **options)
    (_, dout), named = reap(lambda x: harvest.jvp(f, (x,), (1.0,)))(1.0)
    values, _, jacobian = by_hand(1.0)
    e = named["c"]
    same([e.value, e.tangent, dout], [values[-1], jacobian[-1], jacobian[-1]])
    assert (e.count, e.taken) == (len(values), True)


def weighed(x, mode):
    """Two names, one of which feeds the result in every step."""
    step = lambda c: (
        jnp.sin(sow(c[0], "u", mode=mode)) + 2 * c[0],
        c[1] + sow(c[0] ** 2, "v", mode=mode),
    )
    c = bounded_while_loop(lambda c: c[0] < 10, step, (x, 0.0), max_steps=BOUND)
    return c[0] * c[1]


@pytest.mark.parametrize("grad", [harvest.grad, jax.grad])
def test_the_cotangent_of_a_last_value(grad):
    def by_hand(x, eps=(0.0, 0.0)):
        c, s, n = x, 0.0, len(values)
        for i in range(n):
            u, v = c + eps[0] * (i == n - 1), c**2 + eps[1] * (i == n - 1)
            c, s = np.sin(u) + 2 * c, s + v
        return c * s

    for x in (1.0, 3.0):
        values = [x]
        while values[-1] < 10:
            values.append(np.sin(values[-1]) + 2 * values[-1])
        values, h = values[:-1], 1e-6
        _, named = reap(grad(lambda x: weighed(x, "last")))(x)
        assert named["u"].count == len(values)
        same([named["u"].value, named["v"].value], [values[-1], values[-1] ** 2])
        for k, name in enumerate("uv"):
            e = np.eye(2)[k] * h
            want = (by_hand(x, e) - by_hand(x, -e)) / (2 * h)
            np.testing.assert_allclose(named[name].cotangent, want, rtol=1e-8)
            if grad is harvest.grad:
                _, rows = reap(grad(lambda x: weighed(x, "strict")))(x)
                n = len(values) - 1
                same(named[name].cotangent, rows[name].cotangent[n])
                same(named[name].jacobian, rows[name].jacobian[n])


@pytest.mark.parametrize("inner", [harvest.grad, jax.grad])
@pytest.mark.parametrize("mode", ["last", "strict"])
def test_lanes_of_a_bounded_loop_that_stop_at_different_times(inner, mode):
    xs = jnp.array([1.0, 3.0, 20.0])
    _, named = reap(harvest.vmap(inner(lambda x: weighed(x, mode))))(xs)
    for i, x in enumerate(xs[:2]):
        _, alone = reap(inner(lambda x: weighed(x, mode)))(x)
        for name in "uv":
            e, a = named[name], alone[name]
            same(e.value[i], a.value)
            same(e.cotangent[i], a.cotangent)
            assert e.count[i] == a.count
    assert not np.any(named["u"].value[2])
    assert not np.any(named["u"].cotangent[2])


def test_a_parameter_of_a_bounded_loop():
    _, named = reap(harvest.grad(lambda w: grow(1.0, w)))(2.0)
    h = 1e-6
    n = len(by_hand(1.0)[0])
    slope = (by_hand(1.0, 2 + h)[0] - by_hand(1.0, 2 - h)[0]) / (2 * h)
    np.testing.assert_allclose(named["c"].jacobian[:n], slope, rtol=1e-7)


def test_bounded_fori_loop():
    f = lambda x, n: bounded_fori_loop(0, n, lambda i, c: sow(c * (i + 1), "c"), x, max_steps=6)
    _, named = reap(jax.jit(harvest.grad(f)))(1.0, 3)
    assert named["c"].value.tolist() == [1, 2, 6, 0, 0, 0]
    assert named["c"].cotangent.tolist() == [6, 3, 1, 0, 0, 0]


def test_plant_in_a_bounded_loop_may_decide_where_it_stops():
    rows = jnp.arange(BOUND) * 3.0
    assert plant(grow, {"c": rows})(1.0) == 12
    assert jax.grad(lambda rows: plant(grow, {"c": rows})(1.0))(rows).tolist() == [
        0, 0, 0, 0, 1, 0, 0, 0,
    ]  # fmt: skip
    lanes = jax.vmap(lambda x: plant(grow, {"c": rows * x})(x))(jnp.array([1.0, 2.0, 100.0]))
    assert lanes.tolist() == [12, 12, 100]
    assert plant(functools.partial(grow, mode="last"), {"c": 77.0})(1.0) == 77
    _, named = reap(lambda x: plant(grow, {"c": rows})(x))(1.0)
    assert named["c"].value.tolist() == [0, 3, 6, 9, 12, 0, 0, 0]


# ---- windows ----


def test_values_before_and_after_a_window():
    x = jnp.arange(6.0)
    f = lambda x: jnp.sum(
        sow(reduce_window(sow(x * 2, "pre"), 0.0, lambda a, b: a + b, (2,), (1,)), "post") ** 2
    )
    _, named = reap(harvest.grad(f))(x)
    post = 2 * (x[1:] + x[:-1])
    same(named["post"].value, post)
    same(named["post"].cotangent, 2 * post)
    same(named["pre"].cotangent, np.convolve(2 * post, [1, 1]))


def test_a_value_inside_a_reducer_has_one_row_an_offset():
    x = jnp.arange(1.0, 7.0)
    fold = lambda a, b: sow(a * 2 + b, "in")
    f = lambda x: jnp.sum(reduce_window(x, 0.0, fold, (3,), (1,)))
    _, named = reap(harvest.grad(f))(x)
    rows = [np.asarray(x[:4])]
    for k in (1, 2):
        rows.append(2 * rows[-1] + np.asarray(x[k : k + 4]))
    same(named["in"].value, rows)
    same(named["in"].cotangent, [[4.0] * 4, [2.0] * 4, [1.0] * 4])


# ---- nested gradients ----


def loss(x, p):
    return jnp.sum(jnp.sin(sow(p * x**2, "v")))


def test_nested_grad_of_a_python_loss():
    x = jnp.array([0.5, 1.5])
    for f in (nested_grad, nested_value_and_grad):
        _, named = reap(lambda x, p, f=f: f(loss, x, p))(x, 2.0)
        same(named["v"].value, 2 * x**2)
        same(named["v"].cotangent, np.cos(2 * x**2))
        same(named["v"].jacobian, np.diag(4 * x))
    _, named = reap(harvest.grad(lambda p: jnp.sum(nested_grad(loss, x, p) ** 2)))(2.0)
    v, e = 2 * x**2, named["v"]
    same(e.cotangent.value, np.cos(v))
    # sum (cos(v) 2 p x)^2: its derivatives in v and in cos(v)
    same(e.value.cotangent, -2 * np.cos(v) * np.sin(v) * (4 * x) ** 2)
    same(e.cotangent.cotangent, 2 * np.cos(v) * (4 * x) ** 2)


def test_nested_second_derivatives_of_a_python_loss():
    x, v = jnp.array([0.5, 1.5]), jnp.array([1.0, -2.0])
    p = {"scale": 2.0, "steps": jnp.arange(2)}
    scaled = lambda x, p: loss(x, p["scale"])
    for f in (hvp, mixed_vjp):
        _, named = reap(lambda x, p, f=f: f(scaled, x, v, p))(x, p)
        e = named["v"]
        assert e.steps == ("grad", "jvp")
        same(e.value.value, 2 * x**2)
        same(e.value.tangent, 4 * x * v)
        same(e.cotangent.tangent, -np.sin(2 * x**2) * 4 * x * v)
    same(e.jacobian[0].tangent, np.diag(4 * v))
    same(e.jacobian[1]["scale"].value, x**2)
    assert e.jacobian[1]["steps"] is None
    out, named = reap(lambda x, p: laplacian(scaled, x, p))(x, p)
    same(out, laplacian(scaled, x, p))
    same(named["v"].value.tangent, np.diag(4 * x))  # a row a unit vector
    _, named = reap(lambda x: nested_jacobian(lambda x: jnp.sin(sow(x**2, "v")), x))(x)
    same(named["v"].jacobian, np.diag(2 * x))


@pytest.mark.parametrize("f", [nested_grad, lambda *a: hvp(a[0], a[1], a[1], a[2])])
def test_a_value_that_a_loss_ignores(f):
    def wasteful(x, p):
        sow(x * p, "spare")
        return jnp.sum(x**3)

    _, named = reap(jax.jit(lambda x, p: f(wasteful, x, p)))(jnp.ones(2), 3.0)
    same(named["spare"], [3, 3])
    with pytest.raises(Undefined, match="result is ignored"):
        _ = named["spare"].cotangent


NESTED = {
    "nested_grad": lambda x: nested_grad(loss, x, 2.0),
    "hvp": lambda x: hvp(loss, x, x, 2.0),
    "mixed_vjp": lambda x: mixed_vjp(loss, x, x, 2.0),
    "laplacian": lambda x: laplacian(loss, x, 2.0),
}


@pytest.mark.parametrize("f", NESTED.values(), ids=NESTED.keys())
def test_outside_of_reap_nested_derivatives_are_jax_s(f):
    assert "harvest_level" not in str(jax.make_jaxpr(f)(jnp.ones(2)))


def test_a_form_of_a_python_function_is_refused():
    f = JaxFunction(loss)
    for _ in range(2):  # the second meets the function's own table
        with pytest.raises(HarvestError, match=r"'v' is sown at .* Call the function itself"):
            reap(f)(jnp.ones(2), 2.0)
    assert f(jnp.ones(2), 2.0) == loss(jnp.ones(2), 2.0)
