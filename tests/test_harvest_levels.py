"""Every derivative of a named value, through every transformation, against central differences.

A scenario is a function of (x, sow), and the same in plain Python: no JAX control flow, a perturbation
added where a value is named, and the named values returned. The reference is finite differences of the
plain one in float64, so it shares no code with what is tested.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pybridge import bounded_fori_loop, harvest
from pybridge.harvest import HarvestError, Undefined, plant, reap, sow

pytestmark = pytest.mark.usefixtures("x64")

STEP = 1e-5


def central(f, x):
    """The Jacobian of f at x, f(x).shape + x.shape, by central differences."""
    x = np.asarray(x, float)
    columns = []
    for i in np.ndindex(x.shape):
        e = np.zeros_like(x)
        e[i] = STEP
        columns.append((np.asarray(f(x + e)) - np.asarray(f(x - e))) / (2 * STEP))
    return np.stack(columns, -1).reshape(*np.shape(f(x)), *x.shape)


class Plain:
    """sow for the plain function: adds a perturbation and keeps the value."""

    def __init__(self, eps=None, calls=()):
        self.eps, self.value, self.rows = eps, None, []

    def __call__(self, v, _name):
        n = len(self.rows)
        if self.eps is not None:
            v = v + (self.eps if np.ndim(self.eps) == np.ndim(v) else self.eps[n])
        self.rows.append(v)
        return v


@dataclasses.dataclass
class Scenario:
    name: str
    program: Callable  # (x, sow) -> scalar, in JAX
    plain: Callable  # the same in NumPy and Python loops
    x: np.ndarray
    stacked: bool = False  # the value is sown once an iteration


X = np.array([0.5, -0.3, 0.8])


def straight(x, sow):
    return jnp.sum(jnp.sin(sow(x**3, "v")) * x)


def straight_plain(x, sow):
    return np.sum(np.sin(sow(x**3, "v")) * x)


def loop_plain(x, sow, order=(1.0, 2.0, 3.0)):
    c = x
    for t in order:
        c = np.sin(sow(c * t, "v")) + x
    return np.sum(c)


def scanned(x, sow, reverse=False):
    body = lambda c, t: (jnp.sin(sow(c * t, "v")) + x, None)
    return jnp.sum(lax.scan(body, x, jnp.arange(1.0, 4.0), reverse=reverse)[0])


def fori(x, sow):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, c: jnp.sin(sow(c * (i + 1), "v")) + x, x))


def mapped(x, sow):
    return jnp.sum(harvest.vmap(lambda y: jnp.sin(sow(y**2, "v")) * y)(x))


def branching(x, sow):
    sow_in = lambda x: jnp.sum(jnp.sin(sow(x**2, "v")))
    return lax.cond(x[0] > 0, sow_in, lambda x: jnp.sum(x), x) * x[1]


def switching(x, sow):
    branches = [lambda x: x, lambda x: jnp.sin(sow(x**2, "v")), lambda x: jnp.cos(sow(x, "v"))]
    return jnp.sum(lax.switch(1, branches, x)) * x[1]


def cond_plain(x, sow):
    return np.sum(np.sin(sow(x**2, "v"))) * x[1]


def nested_scan(x, sow):
    inner = lambda c, t: (jnp.sin(sow(c * t, "v")), None)
    outer = lambda c, t: (lax.scan(inner, c * t, jnp.arange(1.0, 3.0))[0] + x, None)
    return jnp.sum(jax.jit(lambda x: lax.scan(outer, x, jnp.arange(1.0, 3.0))[0])(x))


def nested_scan_plain(x, sow):
    c = x
    for t in (1.0, 2.0):
        c = c * t
        for s in (1.0, 2.0):
            c = np.sin(sow(c * s, "v"))
        c = c + x
    return np.sum(c)


SCENARIOS = [
    Scenario("straight", straight, straight_plain, X),
    Scenario("jit", lambda x, sow: jax.jit(lambda x: straight(x, sow))(x), straight_plain, X),
    Scenario(
        "checkpoint",
        lambda x, sow: jax.checkpoint(lambda x: straight(x, sow))(x),
        straight_plain,
        X,
    ),
    Scenario("scan", scanned, loop_plain, X, stacked=True),
    Scenario(
        "scan reversed",
        functools.partial(scanned, reverse=True),
        lambda x, sow: loop_plain(x, sow, (3.0, 2.0, 1.0)),
        X,
        stacked=True,
    ),
    Scenario("fori_loop", fori, loop_plain, X, stacked=True),
    Scenario("vmap", mapped, lambda x, sow: np.sum(np.sin(sow(x**2, "v")) * x), X),
    Scenario("cond", branching, cond_plain, X),
    Scenario("switch", switching, cond_plain, X),
    Scenario("scan in scan in jit", nested_scan, nested_scan_plain, X, stacked=True),
    Scenario(
        "checkpointed scan",
        lambda x, sow: jax.checkpoint(lambda x: scanned(x, sow))(x),
        loop_plain,
        X,
        stacked=True,
    ),
]


def reference(s):
    """(value, cotangent, jacobian) of the named value, rows in order of execution."""

    def value(x):
        record = Plain()
        s.plain(x, record)
        return np.stack(record.rows) if s.stacked else record.rows[0]

    v = value(s.x)
    result = lambda eps: s.plain(s.x, Plain(eps))
    return v, central(result, np.zeros_like(v)), central(value, s.x)


def in_order(s, got, want):
    """Stacked rows in order of execution, scans in scans flattened."""
    got = np.asarray(got)[::-1] if s.name == "scan reversed" else np.asarray(got)
    return got.reshape(want.shape)


by_name = pytest.mark.parametrize("s", SCENARIOS, ids=lambda s: s.name)


@by_name
@pytest.mark.parametrize("jit", [False, True], ids=["", "jitted"])
def test_grad(s, jit):
    f = harvest.grad(lambda x: s.program(x, sow))
    out, named = reap(jax.jit(f) if jit else f)(s.x)
    value, cotangent, jacobian = reference(s)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
    same(out, central(lambda x: s.plain(x, Plain()), s.x))
    e = named["v"]
    same(in_order(s, e.value, value), value)
    same(in_order(s, e.cotangent, cotangent), cotangent)
    same(in_order(s, e.jacobian, jacobian), jacobian)


@by_name
def test_jvp(s):
    dx = np.array([1.0, 2.0, -1.0])
    (_, dout), named = reap(lambda x, dx: harvest.jvp(lambda x: s.program(x, sow), (x,), (dx,)))(
        s.x, dx
    )
    value, _, jacobian = reference(s)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
    same(dout, central(lambda x: s.plain(x, Plain()), s.x) @ dx)
    same(in_order(s, named["v"].value, value), value)
    same(in_order(s, named["v"].tangent, jacobian @ dx), jacobian @ dx)


@by_name
def test_raw_grad_has_value_and_cotangent(s):
    _, named = reap(jax.grad(lambda x: s.program(x, sow)))(s.x)
    value, cotangent, _ = reference(s)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
    same(in_order(s, named["v"].cotangent, cotangent), cotangent)
    same(in_order(s, named["v"].value, value), value)


@by_name
def test_vmap_of_grad(s):
    xs = np.stack([s.x, s.x * 0.9])
    f = harvest.grad(lambda x: s.program(x, sow))
    _, named = reap(harvest.vmap(f, out_axes=-1))(xs)
    for i, x in enumerate(xs):
        value, cotangent, jacobian = reference(dataclasses.replace(s, x=x))
        same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
        e = named["v"]
        same(in_order(s, e.value[..., i], value), value)
        same(in_order(s, e.cotangent[..., i], cotangent), cotangent)
        same(in_order(s, e.jacobian[..., i], jacobian), jacobian)


@by_name
def test_sow_changes_nothing(s):
    bare = lambda v, name: v
    second = [jax.hessian] if s.name == "scan" else []
    for t in (lambda f: f, jax.grad, *second):
        np.testing.assert_array_equal(
            t(lambda x: s.program(x, sow))(s.x), t(lambda x: s.program(x, bare))(s.x)
        )


# ---- two levels and more ----

x0 = 1.1
v0, dv, ddv = x0**3, 3 * x0**2, 6 * x0  # v = x^3
c0, dc = np.cos(v0), -np.sin(v0)  # y = sin v: dy/dv, and its derivative in v


def g(x):
    return jnp.sin(sow(x**3, "v"))


def test_grad_of_grad_all_nine():
    # G(x) = c(v) J(x), with c = dy/dv and J = dv/dx
    out, named = reap(harvest.grad(harvest.grad(g)))(x0)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    same(out, dc * dv**2 + c0 * ddv)
    e = named["v"]
    same([e.value.value, e.cotangent.value, e.jacobian.value], [v0, c0, dv])
    same([e.value.cotangent, e.cotangent.cotangent], [dc * dv, dv])
    same([e.value.jacobian, e.cotangent.jacobian, e.jacobian.jacobian], [dv, dc * dv, ddv])
    same([e.value.tangent, e.tangent.tangent], [dv, ddv])


def repeat(step, x):
    return lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]


LOOPS = {
    "scan": repeat,
    "harvest.scan": lambda step, x: harvest.scan(lambda c, _: (step(c), None), x, None, length=3)[
        0
    ],
    "fori_loop": lambda step, x: lax.fori_loop(0, 3, lambda _, c: step(c), x),
    "cond in scan": lambda step, x: repeat(lambda c: lax.cond(c > -9, step, jnp.cos, c), x),
    "checkpoint of scan": lambda step, x: jax.checkpoint(functools.partial(repeat, step))(x),
    "checkpoint in scan": lambda step, x: repeat(jax.checkpoint(step), x),
    "bounded": lambda step, x: bounded_fori_loop(0, 3, lambda _, c: step(c), x, 3),
    "bounded, checkpoints": lambda step, x: bounded_fori_loop(
        0, 3, lambda _, c: step(c), x, 3, checkpoints=2
    ),
    "checkpoint of bounded": lambda step, x: jax.checkpoint(
        lambda x: bounded_fori_loop(0, 3, lambda _, c: step(c), x, 3)
    )(x),
    "scan in bounded": lambda step, x: bounded_fori_loop(0, 1, lambda _, c: repeat(step, c), x, 1),
    "bounded in scan": lambda step, x: lax.scan(
        lambda c, _: (bounded_fori_loop(0, 3, lambda _, c: step(c), c, 3), None), x, None, length=1
    )[0],
    "scan under vmap": lambda step, x: harvest.vmap(functools.partial(repeat, step))(x[None])[0],
}
INNER = {
    "grad": harvest.grad,
    "value_and_grad": lambda f: lambda x: harvest.value_and_grad(f)(x)[1],
    "jvp": lambda f: lambda x: harvest.jvp(f, (x,), (1.0,))[1],
    "jax.grad": jax.grad,
}


# jax.grad hides the sows of the loop that keeps checkpoints, which is refused by name.
CASES = [
    pytest.param(LOOPS[loop], INNER[inner], id=f"{loop}, {inner}")
    for loop, inner in itertools.product(LOOPS, INNER)
    if (loop, inner) != ("bounded, checkpoints", "jax.grad")
]


@pytest.mark.parametrize(("loop", "inner"), CASES)
def test_a_loop_in_two_levels_answers_to_a_value_in_it(loop, inner):
    """The derivative of the outer result in what each step sows, against the loop written out."""

    def plain(x, eps):
        for e in eps:
            x = jnp.sin(2 * x + e)
        return x

    want = jax.jacrev(lambda eps: jax.grad(plain)(0.4, eps))(jnp.zeros(3))
    f = lambda x: loop(lambda c: jnp.sin(sow(2 * c, "a")), x)
    _, named = reap(harvest.grad(inner(f)))(jnp.array(0.4))
    got = named["a"].value.cotangent
    np.testing.assert_allclose(np.ravel(got), want, rtol=1e-12)


@pytest.mark.parametrize("grad", [jax.grad, harvest.grad], ids=["jax", "harvest"])
def test_what_a_checkpoint_computes_again_is_planted_too(grad):
    f = jax.checkpoint(lambda x: jnp.sin(sow(2 * x, "a")) * x)
    np.testing.assert_allclose(plant(grad(f), {"a": 0.3})(0.4), np.sin(0.3), rtol=1e-12)


def test_jax_s_own_grad_of_grad_of_a_checkpoint_says_what_to_use():
    f = jax.checkpoint(lambda x: jnp.sin(sow(2 * x, "a")))
    with pytest.raises(
        HarvestError, match=r"sown twice.*checkpoint repeats it, use pybridge\.harvest"
    ):
        reap(jax.grad(jax.grad(f)))(0.4)
    _, named = reap(harvest.grad(harvest.grad(f)))(0.4)
    np.testing.assert_allclose(named["a"].value.cotangent, -2 * np.sin(0.8), rtol=1e-12)


def test_one_of_several_that_a_checkpoint_computes_again():
    """Which of them an order of jax's own grad repeats is not known, so there is no cotangent."""
    f = jax.checkpoint(lambda x: jnp.sin(sow(2 * x, "a", mode="last")))
    twice = lambda x: f(f(x))
    _, named = reap(harvest.grad(jax.grad(twice)))(0.4)
    with pytest.raises(Undefined, match=r"computes it again.*use pybridge\.harvest\.grad"):
        _ = named["a"].value.cotangent
    plain = lambda x, e: jnp.sin(2 * jnp.sin(2 * x) + e)
    want = jax.grad(lambda e: jax.grad(plain)(0.4, e))(0.0)
    _, named = reap(harvest.grad(harvest.grad(twice)))(0.4)
    np.testing.assert_allclose(named["a"].value.cotangent, want, rtol=1e-12)


def test_grad_of_jvp():
    push = lambda x: harvest.jvp(g, (x,), (1.0,))[1]
    _, named = reap(harvest.grad(push))(x0)
    e = named["v"]
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    assert e.steps == ("jvp", "grad")
    same([e.value.value, e.tangent.value], [v0, dv])
    same([e.value.cotangent, e.tangent.cotangent], [dc * dv, c0])
    same([e.value.tangent, e.tangent.tangent], [dv, ddv])


def test_jvp_of_grad():
    _, named = reap(lambda x: harvest.jvp(harvest.grad(g), (x,), (2.0,)))(x0)
    e = named["v"]
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    same([e.value.tangent, e.cotangent.tangent, e.jacobian.tangent], [2 * dv, 2 * dc * dv, 2 * ddv])


def test_three_levels():
    _, named = reap(harvest.grad(harvest.grad(harvest.grad(g))))(x0)
    e = named["v"]
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    same(e.jacobian.jacobian.jacobian, 6.0)
    same(e.cotangent.value.value, c0)
    same(float(e), v0)
    # Reverse over G1 = c J sends J back to c, and on from there as J dc/dv dv/dx: the innermost
    # cotangent's cotangent enters the second derivative with dc/dv dv/dx.
    same(e.cotangent.cotangent.value, dv)
    same(e.cotangent.cotangent.cotangent, dc * dv)


def test_three_levels_against_raw_letters():
    """The same eight arrays by jax's own grad, whose marks are another path to them."""
    _, named = reap(harvest.grad(harvest.grad(harvest.grad(g))))(x0)
    _, raw = reap(jax.grad(jax.grad(jax.grad(g))))(x0)
    for a in ("value", "cotangent"):
        for b in ("value", "cotangent"):
            for c in ("value", "cotangent"):
                e, r = named["v"], raw["v"]
                for attribute in (a, b, c):
                    e, r = getattr(e, attribute), getattr(r, attribute)
                np.testing.assert_allclose(e, r, rtol=1e-12, err_msg=f"{a}.{b}.{c}")


def test_levels_are_addressed_in_any_order():
    h = harvest.vmap(harvest.grad(lambda x: harvest.jvp(g, (x,), (1.0,))[1]))
    _, named = reap(jax.jit(h))(jnp.array([x0]))
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    assert named["v"].steps == ("jvp", "grad", "vmap", "jit")
    same(named["jvp", "v"].tangent, [dv])
    same(named["grad", "v"].cotangent, [dc * dv])
    for key in (("jvp", "grad", "v"), ("grad", "vmap", "jvp", "v"), ("jit", "grad", "jvp", "v")):
        same(named[key].tangent.cotangent, [c0])
    same(named["grad"]["jvp"]["v"].tangent.cotangent, [c0])
    with pytest.raises(KeyError, match="did not go through 'jvp' again"):
        _ = named["jvp", "jvp", "v"]


def test_a_name_that_was_sown_comes_before_a_level_called_the_same():
    f = lambda x: sow(x**2, ("grad", "x")) + 3 * sow(x**3, "x")
    _, named = reap(harvest.grad(f))(2.0)
    assert list(named) == [("grad", "x"), "x"]
    for e in (named["grad", "x"], named["grad"]["x"], dict(named)["grad", "x"]):
        assert (e.value, e.cotangent, e.jacobian) == (4.0, 1.0, 4.0)
    assert (named["x"].value, named["x"].cotangent, named["x"].jacobian) == (8.0, 3.0, 12.0)
    assert float(named["grad", "grad", "x"]) == 4.0


def test_hessian_lays_out_a_named_jacobian_as_the_result():
    x = jnp.array([0.5, -0.3])
    f = lambda x: jnp.stack([jnp.prod(sow(x**3, "v")), jnp.sum(x)])
    out, named = reap(harvest.hessian(f))(x)
    assert out.shape == (2, 2, 2)
    e = named["v"]
    assert e.steps == ("jacrev", "jacfwd")
    np.testing.assert_allclose(e.jacobian.jacobian, jax.hessian(lambda x: x**3)(x), rtol=1e-12)
    v = x**3
    np.testing.assert_allclose(e.cotangent.value, [[v[1], v[0]], [0, 0]], rtol=1e-12)
    want = jax.jacfwd(lambda x: jnp.stack([(x**3)[::-1], 0 * x]))(x)
    np.testing.assert_allclose(e.cotangent.jacobian, want, rtol=1e-12)


@pytest.mark.parametrize("outer", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("inner", ["jacfwd", "jacrev"])
def test_the_four_hessians_of_a_matrix(outer, inner):
    x = jnp.arange(6.0).reshape(2, 3) / 5
    named_value = lambda x: x @ x.T  # (2, 2)
    tail = lambda v: jnp.sin(v)[0] * v[1]  # (2,)
    f = lambda x: tail(sow(named_value(x), "v"))
    both = lambda m: lambda f: getattr(m, outer)(getattr(m, inner)(f))
    out, named = reap(jax.jit(both(harvest)(f)))(x)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
    same(out, both(jax)(f)(x))
    e = named["v"]
    assert e.steps == (inner, outer, "jit")
    same(e.value.value, named_value(x))
    same(e.jacobian.value, jax.jacfwd(named_value)(x))
    same(e.value.jacobian, jax.jacfwd(named_value)(x))
    same(e.jacobian.jacobian, both(jax)(named_value)(x))
    slopes = central(lambda x: central(tail, named_value(x)), x)  # d (dy/dv) / dx
    if inner == "jacrev":
        same(e.cotangent.value, jax.jacrev(tail)(named_value(x)))
        np.testing.assert_allclose(e.cotangent.jacobian, slopes, rtol=1e-3, atol=1e-4)
    if outer == "jacrev":  # the result is dy/dv dv/dx: its derivative in v, where v enters dy/dv
        along = lambda v: jnp.einsum("iab,abkl->ikl", jax.jacrev(tail)(v), e.jacobian.value)
        same(e.value.cotangent, jax.jacrev(along)(named_value(x)))


def test_jacrev_and_jacfwd_with_matrices():
    x = jnp.arange(6.0).reshape(2, 3) / 5
    f = lambda x: jnp.sin(sow(x @ x.T, "v")) @ x
    for jac in (harvest.jacrev, harvest.jacfwd):
        out, named = reap(jac(f))(x)
        np.testing.assert_allclose(out, jax.jacrev(f)(x), rtol=1e-12)
        np.testing.assert_allclose(
            named["v"].jacobian, jax.jacrev(lambda x: x @ x.T)(x), rtol=1e-12, atol=1e-15
        )
    _, named = reap(harvest.jacrev(f))(x)
    want = central(lambda v: np.sin(v) @ np.asarray(x), np.asarray(x @ x.T))
    np.testing.assert_allclose(named["v"].cotangent, want, rtol=1e-6, atol=1e-9)


def test_jacrev_of_jacrev_has_cotangents_of_cotangents():
    x = jnp.array([0.5, -0.3])
    f = lambda x: jnp.sin(sow(x**3, "v"))
    _, named = reap(harvest.jacrev(harvest.jacrev(f)))(x)
    # result[i, j] = c[i, k] J[k, j]: its derivative in c[a, b] is delta_ia J[b, j]
    want = jnp.einsum("ia,bj->ijab", jnp.eye(2), jnp.diag(3 * x**2))
    np.testing.assert_allclose(named["v"].cotangent.cotangent, want, rtol=1e-12)


def test_a_constant_has_a_cotangent():
    _, named = reap(harvest.grad(lambda x: x * sow(2.0 * jnp.ones(()), "k")))(3.0)
    assert named["k"].cotangent == 3
    assert named["k"].tangent == 0


def test_several_arguments_pytrees_and_integers():
    def f(p, n, x):
        u = sow({"u": p["a"] * x, "n": jnp.arange(2)}, "t")["u"]
        return jnp.sum(u) * n * p["b"]

    p = {"a": jnp.array([1.0, 2.0]), "b": 3.0}
    _, named = reap(harvest.grad(f, argnums=(0, 2)))(p, 2, 5.0)
    e = named["t"]
    assert e.value["u"].tolist() == [5, 10]
    assert e.cotangent["u"].tolist() == [6, 6]
    assert e.cotangent["n"].dtype == jax.dtypes.float0
    jp, jx = e.jacobian["u"]
    assert jp["a"].tolist() == [[5, 0], [0, 5]]
    assert jp["b"].tolist() == [0, 0]
    assert jx.tolist() == [1, 2]


def test_complex():
    _, named = reap(harvest.grad(lambda z: jnp.abs(sow(z**2, "v")) ** 2))(1.0 + 2.0j)
    assert named["v"].cotangent == jax.grad(lambda v: jnp.abs(v) ** 2)((1 + 2j) ** 2)
    _, named = reap(harvest.grad(lambda z: sow(z**2, "v") ** 2, holomorphic=True))(1.0 + 2.0j)
    assert (named["v"].cotangent, named["v"].jacobian) == (2 * (1 + 2j) ** 2, 2 + 4j)


def test_inside_a_scan_a_level_is_a_level():
    u = lambda x: jnp.sin(sow(x**2, "v"))
    f = lambda x: lax.scan(
        lambda c, t: (c + harvest.grad(u)(c * t), None), x, jnp.arange(1.0, 3.0)
    )[0]
    _, named = reap(harvest.grad(f))(0.5)
    e = named["v"]
    assert e.steps == ("grad", "scan", "grad")
    c = [0.5, 0.5 + 2 * 0.5 * np.cos(0.25)]
    v = np.array([c[0] ** 2, (2 * c[1]) ** 2])
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    same(e.value.value, v)
    same(e.cotangent.value, np.cos(v))
    # the last row's cotangent enters the result by dv/dx = 2 (2 c1), and nothing follows it
    same(e.cotangent.cotangent[1], 2 * 2 * c[1])


def test_reaped_functions_are_transformed_in_turn():
    h = lambda x: reap(harvest.grad(g))(x)[1]["v"]
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    same(jax.grad(lambda x: h(x).jacobian)(x0), ddv)
    same(jax.grad(lambda x: h(x).cotangent)(x0), dc * dv)
    same(jax.jit(lambda x: h(x).value)(x0), v0)
    same(jax.vmap(lambda x: h(x).jacobian)(jnp.array([x0])), [dv])
    _, named = reap(lambda x: sow(h(x).jacobian, "j"))(x0)
    same(named["j"].value, dv)


def test_a_jacobian_asked_for_after_jit():
    def f(p, x):
        return reap(harvest.grad(lambda x: p * g(x)))(x)

    _, named = jax.jit(f)(2.0, x0)
    np.testing.assert_allclose(named["v"].jacobian, dv, rtol=1e-12)
    with jax.checking_leaks():
        jax.jit(f)(2.0, x0)


def test_vmap_layouts_nest():
    x = jnp.arange(12.0).reshape(2, 3, 2)
    f = lambda x: jnp.sum(harvest.vmap(lambda y: jnp.sin(sow(y**2, "v")), out_axes=-1)(x))
    _, named = reap(harvest.vmap(harvest.grad(f), out_axes=1))(x)
    want = jnp.moveaxis(jnp.moveaxis(x**2, 1, -1), 0, 1)
    np.testing.assert_array_equal(named["v"].value, want)
    np.testing.assert_allclose(named["v"].cotangent, jnp.cos(want), rtol=1e-12)


def test_vmap_with_names_sizes_and_shared_arguments():
    f = lambda x, w: sow(x * w / lax.psum(x, "i"), "v")
    out, named = reap(harvest.vmap(f, (0, None), axis_name="i"))(jnp.ones(4), 2.0)
    np.testing.assert_array_equal(named["v"].value, out)
    _, named = reap(harvest.vmap(lambda x, w: x * sow(w, "w"), (0, None)))(jnp.ones(3), 2.0)
    assert named["w"].value.tolist() == [2, 2, 2]  # as jax lays out an unmapped output
    _, named = reap(harvest.vmap(lambda x: (sow(x, "v"), x), out_axes=(0, 1), sow_axes=1))(
        jnp.ones((3, 2))
    )
    assert named["v"].value.shape == (2, 3)
