"""The public thread "harvest after grad" (tensorflow/probability), its examples one by one with its
numbers; what other threads asked for; and oryx's own documented examples, rewritten."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pybridge import harvest
from pybridge.harvest import Undefined, nest, plant, reap, sow


def f(x):
    return sow(x**3, "x3") + 1


# ---- the thread ----


def test_thread_1_reap_of_grad_gives_the_gradient_of_the_named_value():
    out, named = reap(harvest.grad(f))(3.0)
    assert out == 27
    assert named["x3"].value == 27
    assert named["x3"].tangent == 27  # the thread's x3_jvp, whichever mode was used
    assert named["x3"].cotangent == 1  # the thread's x3_vjp


def test_thread_1_reap_of_jvp_gives_the_same():
    (out, dout), named = reap(lambda x: harvest.jvp(f, (x,), (1.0,)))(3.0)
    assert (out, dout) == (28, 27)
    assert named["x3"].value == 27
    assert named["x3"].tangent == 27


def test_thread_1_under_jax_s_own_transformations():
    _, named = reap(jax.grad(f))(3.0)
    assert (named["x3"].value, named["x3"].cotangent) == (27, 1)
    with pytest.raises(Undefined, match=r"pybridge\.harvest\.grad"):
        _ = named["x3"].tangent
    _, named = reap(lambda x: jax.jvp(f, (x,), (1.0,)))(3.0)
    assert (named["x3"].value, named["x3"].tangent) == (27, 27)


def with_jvp(x, name):
    """The thread's workaround, sow_with_jvp."""

    @jax.custom_jvp
    def custom(x):
        return sow(x, name)

    @custom.defjvp
    def _(primals, tangents):
        return custom(*primals), sow(tangents[0], f"{name}_jvp")

    return custom(x)


def with_vjp(x, name):
    """The thread's workaround, sow_with_vjp."""

    @jax.custom_vjp
    def custom(x):
        return sow(x, name)

    custom.defvjp(lambda x: (custom(x), None), lambda _, ct: (sow(ct, f"{name}_vjp"),))
    return custom(x)


@pytest.mark.parametrize("grad", [jax.grad, harvest.grad])
def test_thread_1_the_workaround_with_custom_vjp(grad):
    _, named = reap(grad(lambda x: with_vjp(x**3, "x3") + 1))(3.0)
    assert {k: float(e.value) for k, e in named.items()} == {"x3": 27.0, "x3_vjp": 1.0}


@pytest.mark.parametrize("jvp", [jax.jvp, harvest.jvp])
def test_thread_1_the_workaround_with_custom_jvp(jvp):
    _, named = reap(lambda x: jvp(lambda x: with_jvp(x**3, "x3") + 1, (x,), (1.0,)))(3.0)
    assert {k: float(e.value) for k, e in named.items()} == {"x3": 27.0, "x3_jvp": 27.0}


def test_thread_1_jacrev_which_the_workaround_folded_away():
    _, named = reap(harvest.jacrev(f))(3.0)
    assert (named["x3"].value, named["x3"].cotangent, named["x3"].jacobian) == (27, 1, 27)
    _, named = reap(jax.jacrev(lambda x: with_vjp(x**3, "x3") + 1))(3.0)
    assert named["x3_vjp"].value.shape == (1,)  # a row a basis vector, as jax's batching has it


def test_thread_2_nested_jvps_give_nested_entries():
    f1 = harvest.jacfwd(f)
    f2 = harvest.jacfwd(f1)
    _, named = reap(f1)(1.0)
    assert (named["x3"].value, named["x3"].jacobian) == (1, 3)
    _, named = reap(f2)(1.0)  # oryx: "Variable has already been reaped: jvp"
    e = named["x3"]
    assert (e.value.value, e.jacobian.value, e.value.jacobian, e.jacobian.jacobian) == (1, 3, 3, 6)


def test_thread_2_jvp_of_jvp():
    g = lambda x: jnp.sin(sow(x**3, "x3"))
    push = lambda h: lambda x: harvest.jvp(h, (x,), (1.0,))[1]
    _, named = reap(push(push(g)))(3.0)
    e = named["x3"]
    got = [e.value.value, e.tangent.value, e.value.tangent, e.tangent.tangent]
    assert [float(v) for v in got] == [27, 27, 27, 18]


@pytest.mark.parametrize("grad", [jax.grad, harvest.grad])
def test_thread_2_grad_of_grad(grad):
    g = lambda x: jnp.sin(sow(x**3, "x3"))
    _, named = reap(grad(grad(g)))(3.0)
    e = named["x3"]
    got = [e.value.value, e.cotangent.value, e.cotangent.cotangent, e.value.cotangent]
    np.testing.assert_allclose(got, [27, -0.292139, 27, -25.82215], rtol=1e-5)


def test_thread_3_reaped_values_are_laid_out_by_out_axes():
    m, n = 3, 7
    x = jnp.arange(m * n).reshape(m, n)
    v1 = jax.vmap(f, in_axes=0, out_axes=-1)(x)
    out, named = reap(harvest.vmap(f, in_axes=0, out_axes=-1))(x)
    v2 = named["x3"].value
    assert v1.shape == v2.shape == (n, m)
    assert jnp.all(v1 == v2 + 1)
    assert jnp.all(out == v1)


def test_thread_4_a_lazy_dictionary():
    g = lambda x: sow(x**3, "x1") + 1
    assert reap(g, lazy=True)["x1"](2.0) == 8
    r2 = reap(harvest.grad(g), lazy=True)
    assert r2["x1"](2.0) == 8
    assert r2["grad", "x1"](2.0) == 12
    assert r2["grad"]["x1"](2.0) == 12
    r3 = reap(jax.jit(harvest.vmap(harvest.grad(g))), lazy=True)
    x = jnp.array([2.0, 2.0])
    assert r3["grad", "vmap", "x1"](x).tolist() == [12, 12]
    assert r3["jit", "grad", "vmap", "x1"](x).tolist() == [12, 12]
    assert r3["vmap", "jit", "grad", "x1"](x).tolist() == [12, 12]
    assert r3["x1"].cotangent(x).tolist() == [1, 1]
    assert r3.names(x) == ["x1"]


def test_thread_4_only_what_an_entry_needs_is_run():
    def deep(x):
        x = sow(x**3, "first")
        for i in range(30):
            x = sow(jnp.sin(x), f"h{i}")
        return x

    lazy = reap(harvest.grad(deep), lazy=True)

    def size(g):
        return len(jax.make_jaxpr(g)(2.0).eqns)

    assert size(lazy["first"]) == 1
    assert size(lazy["h0"]) == 2
    assert size(lazy["h29"]) == 31
    assert size(lazy["h29"].cotangent) <= 1  # it is 1, and needs nothing of x
    assert size(lazy["first"].cotangent) > 60


def quadratic(x):
    """The thread's example: the result of sow is ignored."""
    sow(x**2.0, "y")
    return x + 1.0


def test_thread_5_reap_commutes_with_linearize():
    (_, reaped), lin_of_reap = jax.linearize(reap(quadratic), 3.0)
    assert reaped["y"].value == 9
    out, lin = harvest.linearize(quadratic, 3.0)
    assert out == 4
    for t in (1.0, 2.0):
        dout, named = reap(lin)(t)
        dout_, named_ = lin_of_reap(t)
        assert dout == dout_ == t
        assert named["y"].value == named_["y"].value == 6 * t


def test_thread_5_plant_commutes_with_linearize():
    _, lin = harvest.linearize(f, 3.0)
    planted = lambda v, x: plant(f, {"x3": v})(x)
    _, lin_of_plant = jax.linearize(planted, 7.0, 3.0)
    for dv, dx in ((1.0, 0.0), (5.0, 2.0)):
        assert plant(lin, {"x3": dv})(dx) == lin_of_plant(dv, dx) == dv
    assert lin(2.0) == 54


def test_thread_5_reap_commutes_with_vjp():
    (_, reaped), pull = jax.vjp(reap(quadratic), 3.0)
    ct = jax.tree.map(lambda _: 5.0, reaped)
    assert pull((2.0, ct))[0] == 2 + 5 * 2 * 3  # ct_x + 2 ct_y x


def test_thread_5_the_transpose_of_a_read_is_a_write():
    g = lambda x: jnp.sin(sow(x**3, "y")) * x
    x = 1.2
    written = jax.grad(lambda v: plant(g, {"y": v})(x))(x**3)
    _, named = reap(harvest.grad(g))(x)
    np.testing.assert_allclose(written, named["y"].cotangent, rtol=1e-6)
    np.testing.assert_allclose(written, np.cos(x**3) * x, rtol=1e-6)


# ---- others who asked ----


def test_flax_2512_gradients_of_intermediate_activations():
    w = [jnp.full((4, 4), 0.1 * (i + 1)) for i in range(3)]

    def loss(w, x):
        for i, wi in enumerate(w):
            x = sow(jnp.tanh(x @ wi), ("layer", i))
        return jnp.sum(x**2)

    x = jnp.ones((2, 4))
    _, named = reap(harvest.grad(loss))(w, x)
    tail = lambda h: jnp.sum(jnp.tanh(h @ w[2]) ** 2)
    np.testing.assert_allclose(
        named["layer", 1].cotangent, jax.grad(tail)(named["layer", 1].value), rtol=1e-5
    )


def test_tesseract_133_one_name_at_two_orders():
    _, named = reap(harvest.hessian(lambda x: jnp.sum(sow(x**3, "a"))))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(named["a"].value.value, [1, 8])
    np.testing.assert_allclose(named["a"].jacobian.value, np.diag([3.0, 12.0]))


def test_jax_6668_intermediates_of_a_scan():
    def total(x):
        return jax.lax.scan(lambda c, t: (sow(c * t, "c"), None), x, jnp.arange(1.0, 5.0))[0]

    _, named = reap(harvest.grad(total))(1.0)
    assert named["c"].value.tolist() == [1, 2, 6, 24]
    assert named["c"].cotangent.tolist() == [24, 12, 4, 1]
    assert named["c"].tangent.tolist() == [1, 2, 6, 24]


# ---- oryx's documented examples ----


def plus_two(x):
    y = sow(x + 1.0, "y")
    return y + 1.0


def test_oryx_reap():
    for x, out, y in ((1.0, 3, 2), (5.0, 7, 6)):
        result, named = reap(plus_two)(x)
        assert (result, named["y"].value) == (out, y)


def test_oryx_plant():
    assert plant(plus_two, {"y": 0.0})(1.0) == 1
    assert plant(plus_two, {"y": 0.0})(5.0) == 1


def test_oryx_nothing_is_left_for_an_outer_reap():
    (_, inner), outer = reap(reap(plus_two))(1.0)
    assert inner["y"].value == 2
    assert len(outer) == 0


def test_oryx_nest():
    foo = lambda x: sow(x, "x")
    assert reap(foo)(1.0)[1]["x"].value == 1
    _, named = reap(nest(foo, "a"))(1.0)
    assert named["a"]["x"].value == named["a", "x"].value == 1
    assert list(named) == [("a", "x")]


@pytest.mark.parametrize(("mode", "want"), [("append", (2, 4, 8)), ("last", 8)])
def test_oryx_modes(mode, want):
    def foo(x):
        for _ in range(3):
            x = sow(2 * x, "x", mode=mode)
        return x

    assert reap(foo)(1.0)[1]["x"].value == want


def test_oryx_without_a_session_sow_is_the_identity():
    assert sow(3.0, "x") == 3.0
    x = {"a": np.arange(3), "b": jnp.ones(2)}
    assert sow(x, "x")["a"] is x["a"]
    assert plus_two(1.0) == 3


def test_thread_4_an_entry_addressed_by_levels_is_the_derivative():
    _, named = reap(harvest.grad(f))(2.0)
    assert float(named["x3"]) == 8
    assert float(named["grad", "x3"]) == np.asarray(named["grad"]["x3"]) == 12
    assert jnp.add(named["grad", "x3"].value, 0) == 8


def test_oryx_harvest_plants_and_reaps_at_once():
    both = lambda plants, x: reap(lambda x: plant(plus_two, plants)(x))(x)
    out, named = both({"y": 0.0}, 5.0)
    assert (out, named["y"].value) == (1, 0)
    out, named = both({}, 5.0)
    assert (out, named["y"].value) == (7, 6)


def test_oryx_sow_cond():
    """A value sown where a predicate holds, zeros where it never did: a cond, and a mark."""

    def body(c, t):
        keep = lambda c: sow(c * t, "kept")
        jax.lax.cond(t % 2 == 0, keep, lambda c: c, c)
        return c + 1, None

    _, named = reap(lambda x: jax.lax.scan(body, x, jnp.arange(4))[0])(1.0)
    assert named["kept"].taken.tolist() == [True, False, True, False]
    assert named["kept"].value.tolist() == [0, 0, 6, 0]


@pytest.mark.parametrize(
    "name",
    [
        "grad",
        "value_and_grad",
        "jvp",
        "vmap",
        "jit",
        "scan",
        "jacfwd",
        "jacrev",
        "hessian",
        "linearize",
    ],
)
def test_signatures_are_those_of_jax(name):
    homes = (harvest, jax.lax if name == "scan" else jax)
    ours, theirs = (inspect.signature(getattr(m, name)).parameters for m in homes)
    assert [*ours][: len(theirs)] == [*theirs]
    assert [p.default for p in ours.values()][: len(theirs)] == [p.default for p in theirs.values()]
