"""Named values in loops and branches that know where they stop, under custom derivative rules, in
scopes and modes; what is planted there; and what reaping leaves in the compiled program: nothing."""

import gc
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pybridge import harvest
from pybridge.harvest import HarvestError, Undefined, nest, plant, reap, sow

# ---- loops ----


def doubling(x):
    return lax.while_loop(lambda c: c < 10, lambda c: sow(c * 2, "c"), x)


def test_while_loop_gives_the_last_value_and_the_count():
    out, named = reap(doubling)(1.0)
    assert (out, named["c"].value, named["c"].count, named["c"].taken) == (16, 16, 4, True)
    (_, dout), named = reap(lambda x: harvest.jvp(doubling, (x,), (1.0,)))(1.0)
    assert (dout, named["c"].tangent, named["c"].count) == (16, 16, 4)


def test_a_while_loop_that_does_not_run_says_so():
    out, named = reap(doubling)(100.0)
    assert (out, named["c"].count, named["c"].taken) == (100, 0, False)
    with pytest.raises(HarvestError, match="was not sown in this run"):
        _ = named["c"].value


def test_while_loop_condition():
    f = lambda x: lax.while_loop(lambda c: sow(c, "seen") < 10, lambda c: c * 2, x)
    assert reap(f)(1.0)[1]["seen"].value == 16
    assert reap(f)(20.0)[1]["seen"].value == 20


def test_while_in_scan_stacks_last_values_and_counts():
    f = lambda x: lax.scan(lambda c, t: (c, doubling(t)), x, jnp.array([1.0, 3.0, 50.0]))[1]
    _, named = reap(jax.jit(f))(0.0)
    assert named["c"].count.tolist() == [4, 2, 0]
    assert named["c"].taken.tolist() == [True, True, False]
    assert named["c"].value.tolist() == [16, 12, 0]


def test_fori_loop_of_a_length_that_is_traced():
    f = lambda x, n: lax.fori_loop(0, n, lambda i, c: sow(c * 2, "c"), x)
    _, named = reap(jax.jit(f))(1.0, 5)
    assert (named["c"].value, named["c"].count) == (32, 5)


def test_a_level_inside_a_while_loop():
    u = lambda x: jnp.sin(sow(x**2, "v"))
    f = lambda x: lax.while_loop(lambda x: x < 1.0, lambda x: x + 0.1 * harvest.grad(u)(x), x)
    out, named = reap(f)(0.5)
    x, steps = 0.5, 0
    while x < 1.0:
        v, x, steps = x**2, x + 0.1 * np.cos(x**2) * 2 * x, steps + 1
    np.testing.assert_allclose(out, x, rtol=1e-5)
    assert named["v"].count == steps
    np.testing.assert_allclose(named["v"].value, v, rtol=1e-5)
    np.testing.assert_allclose(named["v"].cotangent, np.cos(v), rtol=1e-4)


# ---- branches ----


def fork(x):
    return lax.cond(x > 0, lambda x: sow(jnp.sin(x), "a"), lambda x: sow(jnp.cos(x), "b"), x)


def test_cond_marks_the_branch_not_taken():
    _, named = reap(harvest.grad(fork))(1.0)
    assert (named["a"].taken, named["b"].taken) == (True, False)
    np.testing.assert_allclose(named["a"].value, np.sin(1.0), rtol=1e-6)
    assert named["a"].cotangent == 1
    for attribute in ("value", "cotangent", "jacobian"):
        with pytest.raises(HarvestError, match="was not entered"):
            getattr(named["b"], attribute)


def test_switch_in_a_scan_marks_iterations():
    branches = [lambda x: sow(x * 1, "a"), lambda x: sow(x * 2, "b"), lambda x: x]
    f = lambda x: lax.scan(
        lambda c, i: (lax.switch(i, branches, c), None), x, jnp.array([0, 1, 2, 1])
    )[0]
    _, named = reap(harvest.grad(f))(1.0)
    assert named["b"].taken.tolist() == [False, True, False, True]
    assert named["b"].value.tolist() == [0, 2, 0, 4]
    assert named["b"].cotangent.tolist() == [0, 2, 0, 1]
    assert named["a"].taken.tolist() == [True, False, False, False]


def test_cond_under_vmap_marks_lanes():
    f = lambda x: lax.cond(x > 0, lambda x: sow(jnp.sin(x), "a"), lambda x: x, x)
    _, named = reap(harvest.vmap(harvest.grad(f)))(jnp.array([1.0, -1.0]))
    assert named["a"].taken.tolist() == [True, False]
    assert named["a"].cotangent.tolist() == [1, 0]


# ---- custom derivative rules ----


def make_jvp(rule_sows):
    @jax.custom_jvp
    def f(x):
        return sow(jnp.sin(x), "a") * 2

    @f.defjvp
    def _(primals, tangents):
        t = sow(tangents[0], "t") if rule_sows else tangents[0]
        return f(*primals), 100 * t

    return f


def make_vjp(rule_sows):
    @jax.custom_vjp
    def f(x):
        return sow(jnp.sin(x), "a") * 2

    def fwd(x):
        return (f(x) if rule_sows else jnp.sin(x) * 2), None

    def bwd(_, ct):
        return (100 * (sow(ct, "ct") if rule_sows else ct),)

    f.defvjp(fwd, bwd)
    return f


@pytest.mark.parametrize("make", [make_jvp, make_vjp])
@pytest.mark.parametrize("rule_sows", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
def test_the_rule_is_kept_and_value_is_defined(make, rule_sows, wrap):
    f = wrap(make(rule_sows))
    v = np.sin(1.0)
    out, named = reap(f)(1.0)
    np.testing.assert_allclose([out, named["a"].value], [2 * v, v], rtol=1e-6)
    out, named = reap(harvest.grad(lambda x: 3 * f(x)))(1.0)
    assert out == 300
    np.testing.assert_allclose(named["a"].value, v, rtol=1e-6)
    for attribute in ("cotangent", "tangent", "jacobian"):
        with pytest.raises(Undefined, match=r"where only \.value is defined"):
            getattr(named["a"], attribute)
    if make is make_vjp and rule_sows:
        assert named["ct"].value == 3
    # derivatives of a reaped function: the result's by the rule, the named value's its own
    assert jax.grad(lambda x: reap(f)(x)[0])(1.0) == 100
    np.testing.assert_allclose(
        jax.grad(lambda x: reap(f)(x)[1]["a"].value)(1.0), np.cos(1.0), rtol=1e-6
    )


def test_a_tangent_sown_in_a_jvp_rule():
    _, named = reap(lambda x: harvest.jvp(make_jvp(True), (x,), (2.0,)))(1.0)
    assert named["t"].value == 2


def scaled(w):
    """A custom_vjp made inside the function that is differentiated, closing over what is traced there."""

    @jax.custom_vjp
    def f(x):
        return sow(x * w, "a")

    f.defvjp(lambda x: (sow(x * w, "a"), None), lambda _, ct: (sow(ct, "ct") * w,))
    return f


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
def test_a_rule_that_closes_over_a_traced_value(wrap):
    loss = lambda w, x: scaled(w)(sow(x * 2, "pre")) ** 2
    out, named = reap(wrap(harvest.grad(loss, argnums=1)))(2.0, 3.0)
    assert out == 96  # d (4 x)^2
    assert {k: float(e.value) for k, e in named.items()} == {"pre": 6, "a": 12, "ct": 24}
    assert (named["pre"].cotangent, named["pre"].jacobian) == (48, 2)
    (_, dout), named = reap(
        wrap(lambda w, x: harvest.jvp(harvest.grad(loss, 1), (w, x), (0.0, 1.0)))
    )(2.0, 3.0)
    assert (dout, named["pre"].cotangent.tangent) == (32, 16)


def test_a_rule_that_closes_over_a_scanned_value():
    slope = lambda t, c: harvest.grad(lambda x: jnp.sin(scaled(t)(sow(x**3, "pre"))))(c)
    f = lambda x: lax.scan(lambda c, t: (c + slope(t, c), None), x, jnp.arange(1.0, 4.0))[0]
    _, named = reap(f)(0.5)
    x, pre, cts = 0.5, [], []
    for t in (1.0, 2.0, 3.0):
        pre.append(x**3)
        cts.append(np.cos(t * x**3))
        x += t * cts[-1] * 3 * x**2
    np.testing.assert_allclose(named["pre"].value, pre, rtol=1e-5)
    np.testing.assert_allclose(named["ct"].value, cts, rtol=1e-3)
    np.testing.assert_allclose(named["pre"].cotangent, np.array(cts) * [1, 2, 3], rtol=1e-3)


def test_relu_and_friends_around_a_named_value():
    x = jnp.array([-1.0, 2.0])
    _, named = reap(harvest.grad(lambda x: jnp.sum(jax.nn.relu(sow(x * 3, "h")))))(x)
    assert named["h"].cotangent.tolist() == [0, 1]


# ---- scopes and modes ----


def test_nest_reaches_into_a_jitted_function_that_was_traced_before():
    layer = jax.jit(lambda x: sow(x * 2, "h"))
    layer(1.0)
    f = lambda x: nest(layer, "l0")(x) + nest(nest(layer, "in"), ("l", 1))(x)
    _, named = reap(harvest.grad(jax.jit(f)))(1.0)
    assert list(named) == [("l0", "h"), ("l", 1, "in", "h")]
    assert named["l0"]["h"].value == 2
    assert named["l", 1]["in", "h"].cotangent == 1
    assert named["grad", "l0", "h"].jacobian == 2
    assert named["l0"]["grad"]["h"].jacobian == 2


def test_recursion_of_python_functions():
    def f(x, n):
        return x if n == 0 else nest(f, f"d{n}")(sow(jnp.sin(x), "a"), n - 1)

    _, named = reap(harvest.grad(lambda x: f(x, 3)))(1.0)
    assert list(named) == ["a", ("d3", "a"), ("d3", "d2", "a")]
    s = np.sin(np.sin(1.0))
    np.testing.assert_allclose(named["d3", "a"].cotangent, np.cos(s), rtol=1e-6)


def test_append_keeps_the_derivatives_of_each():
    g = jax.jit(lambda x: sow(x * 2, "a", mode="append"))  # one trace, called twice
    _, named = reap(harvest.grad(lambda x: g(g(x))))(1.0)
    assert named["a"].value == (2, 4)
    assert named["a"].cotangent == (2, 1)
    assert named["a"].jacobian == (2, 4)
    assert len(named["a"]) == 2


# ---- plant ----


def test_plant_under_levels_and_under_reap():
    f = lambda x: jnp.sum(sow(jnp.sin(x) * 2, "a") ** 2)
    x = jnp.zeros((3, 2))
    batch = lambda x: harvest.vmap(f)(x).sum()
    out, named = reap(lambda v: plant(harvest.grad(batch), {"a": v})(x))(x + 1)
    assert out.tolist() == x.tolist()  # the planted value does not follow x
    assert named["a"].value.tolist() == (x + 1).tolist()
    assert named["a"].cotangent.tolist() == (2 * (x + 1)).tolist()
    assert plant(jax.grad(batch), {"a": x + 1})(x).tolist() == x.tolist()


def test_plant_in_loops_and_branches():
    g = lambda x: lax.scan(lambda c, t: (sow(c * t, "c") + 1, None), x, jnp.arange(1.0, 4.0))[0]
    rows = jnp.array([5.0, 6.0, 7.0])
    assert plant(jax.jit(g), {"c": rows})(1.0) == 8
    assert jax.grad(lambda rows: plant(g, {"c": rows})(1.0))(rows).tolist() == [0, 0, 1]
    assert plant(doubling, {"c": 11.0})(1.0) == 11
    assert plant(fork, {"a": 3.0})(1.0) == 3
    np.testing.assert_allclose(plant(fork, {"a": 3.0})(-1.0), np.cos(1.0), rtol=1e-6)


def test_plant_takes_what_reap_gave():
    f = lambda x: nest(lambda x: sow({"u": x * 2}, "a"), "s")(x)["u"] + sow(x, "b")
    out, named = reap(f)(3.0)
    assert plant(f, named)(100.0) == out
    assert plant(f, {"s": {"a": {"u": 1.0}}, "b": 2.0})(100.0) == 3
    assert plant(f, {("s", "a"): {"u": 1.0}})(100.0) == 101


def test_plant_modes():
    def f(x, mode):
        for _ in range(3):
            x = sow(x * 2, "a", mode=mode)
        return x

    assert plant(lambda x: f(x, "append"), {"a": (1.0, 2.0, 7.0)})(1.0) == 7
    assert plant(lambda x: f(x, "last"), {"a": 7.0})(1.0) == 7


# ---- cost ----


def mlp(ws, x, name):
    for i, w in enumerate(ws):
        x = name(jnp.tanh(x @ w), f"h{i}")
    return jnp.sum(x**2)


@pytest.mark.parametrize("transform", [lambda f: f, jax.grad, harvest.grad, jax.hessian])
def test_without_reap_the_compiled_program_is_the_same(transform):
    ws, x = [jnp.eye(3)] * 3, jnp.ones((2, 3))

    def text(name):
        f = jax.jit(transform(lambda ws: mlp(ws, x, name)))
        hlo = re.sub(r", metadata=\{[^}]*\}", "", f.lower(ws).compile().as_text())
        return hlo[hlo.index("\n%") :]  # after the table of source lines

    assert "dot" in text(sow) or "custom-call" in text(sow)
    assert text(sow) == text(lambda v, _: v)


def test_a_jitted_function_is_reaped_by_a_jitted_one():
    traces = []

    @jax.jit
    def f(x):
        traces.append(x.shape)
        return sow(x * 2, "a") + 1

    g = reap(f)
    for x in (1.0, 2.0, 3.0):
        assert g(x)[1]["a"].value == 2 * x
    assert len(traces) == 1
    g(jnp.ones(2))
    assert len(traces) == 2


def test_an_inner_jit_is_compiled_once_for_a_reaped_function():
    traces = []

    @jax.jit
    def inner(x):
        traces.append(1)
        return sow(x * 2, "a")

    g = reap(lambda x: inner(x) + 1)
    for x in (1.0, 2.0, 3.0):
        assert g(x)[1]["a"].value == 2 * x
    assert len(traces) == 1


def test_one_trace_serves_every_reap_of_a_function():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return sow(x * 2, "a")

    for _ in range(3):
        assert reap(f)(1.0)[1]["a"].value == 2
    assert len(traces) == 1


def test_a_reaped_function_is_not_kept_alive():
    for wrap in (jax.jit, lambda f: f):
        f = wrap(lambda x: sow(x * 2, "a"))
        there = weakref.ref(f)
        reap(f)(1.0)
        del f
        gc.collect()
        assert there() is None


def test_threads():
    g = reap(harvest.grad(lambda x: jnp.sin(sow(x**2, "a"))))
    with ThreadPoolExecutor(4) as pool:
        named = list(pool.map(lambda i: g(float(i))[1]["a"].value, range(16)))
    assert named == [i * i for i in range(16)]


# ---- jax's transformations around ours ----


def test_raw_transformations_around_levels():
    f = lambda x: jnp.sin(sow(x**2, "a"))
    _, named = reap(jax.vmap(harvest.grad(f)))(jnp.ones(3))
    np.testing.assert_allclose(named["a"].cotangent, [np.cos(1.0)] * 3, rtol=1e-6)
    _, named = reap(jax.grad(harvest.grad(f)))(1.0)
    assert named["a"].steps == ("grad", "grad")
    assert named["a"].cotangent.cotangent == 2
    with_aux = lambda x: harvest.value_and_grad(lambda x, n: (f(x), n), has_aux=True)(x, 3)[1]
    _, named = reap(jax.grad(with_aux))(1.0)
    assert named["a"].cotangent.cotangent == 2


# ---- arguments that are not arrays ----


def repeated(x, n, name="a"):
    for _ in range(n):
        x = sow(x * 2, name, mode="last")
    return x if n > 1 else x + 1


def test_numbers_and_strings_are_passed_as_they_are():
    for f in (repeated, jax.jit(repeated, static_argnums=1, static_argnames="name")):
        g = reap(f)
        for n in (3, 1, True, 3):
            out, named = g(jnp.ones(()), n)
            assert (out, named["a"].value) == (f(jnp.ones(()), n), 2 ** int(n))
        assert reap(f)(jnp.ones(()), 2, name="b")[1]["b"].value == 4
    g = harvest.grad(lambda x, n, flag: repeated(x, n) if flag else x)
    assert reap(g)(3.0, 2, True)[1]["a"].cotangent == 1
    assert reap(g, lazy=True)["a"].jacobian(3.0, 2, True) == 4
    assert plant(repeated, {"a": 5.0})(1.0, 2) == 5
    assert (
        reap(jax.jit(lambda x, how: sow(x * how[0], "a"), static_argnums=1))(1.0, (2, "s"))[0] == 2
    )


def test_a_static_argument_is_found_out_once():
    traces = []

    def f(x, n):
        traces.append(n)
        return repeated(x, n)

    g = reap(jax.jit(f, static_argnums=1))
    for n in (2, 2, 3, 3, 2):
        assert g(1.0, n)[1]["a"].value == 2**n
    assert len(traces) == 2
