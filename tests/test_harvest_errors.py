"""Nothing is dropped in silence, and bad input is told what is wrong at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pybridge import bounded_fori_loop, bounded_while_loop, harvest
from pybridge.harvest import HarvestError, Undefined, nest, plant, reap, sow


def unused(x):
    sow(x * 2, "a")
    return x * 3


def unused_in_scan(x):
    def body(c, t):
        sow(c * t, "a")
        return c * t, None

    return lax.scan(body, x, jnp.arange(1.0, 4.0))[0]


def unused_in_bounded_loop(x):
    w = x + 1  # feeds the named value alone
    body = lambda c: (sow(c * w, "a"), c * 2)[1]
    return bounded_while_loop(lambda c: c < 9, body, x, max_steps=3)


DEAD = [jax.jit(unused), unused_in_scan, jax.checkpoint(unused)]
KEPT = [unused, unused_in_bounded_loop]


@pytest.mark.parametrize("f", DEAD, ids=["jit", "scan", "checkpoint"])
def test_a_value_that_jax_removes_as_dead_code(f):
    with pytest.raises(HarvestError, match=r"'a' was sown at .*test_harvest_errors.*harvest\.grad"):
        reap(jax.grad(f))(2.0)
    _, named = reap(harvest.grad(f))(2.0)
    assert np.max(named["a"].value) > 0


@pytest.mark.parametrize(
    "f", [*DEAD, *KEPT], ids=["jit", "scan", "checkpoint", "no jit", "bounded loop"]
)
def test_a_sow_whose_result_is_ignored_has_no_cotangent(f):
    _, named = reap(harvest.grad(f))(2.0)
    with pytest.raises(Undefined, match=r"result is ignored.*value that sow returns"):
        _ = named["a"].cotangent
    assert np.all(named["a"].tangent > 0)


def ignored_in_scan(x):
    """In harvest.scan two ignored values, and one that is used."""

    def body(c, t):
        h = sow(c * t, "a")
        sow(h + t, "b")
        return sow(c * t, "c"), None

    return harvest.scan(body, x, jnp.arange(1.0, 4.0))[0]


IGNORED = {
    "jit": harvest.jit(unused),
    "jit of static arguments": functools.partial(
        harvest.jit(lambda x, n, how: unused(x) * n, static_argnums=1, static_argnames="how"),
        n=3,
        how="s",
    ),
    "scan": ignored_in_scan,
    "jit of scan": harvest.jit(ignored_in_scan),
}


@pytest.mark.parametrize("f", IGNORED.values(), ids=IGNORED.keys())
@pytest.mark.parametrize("grad", [jax.grad, harvest.grad])
def test_harvest_s_jit_and_scan_keep_ignored_values(f, grad):
    """Under jax.grad, too, which removes them from a jit or a scan of jax's."""
    _, plain = reap(f)(2.0)
    out, named = reap(grad(f))(2.0)
    assert sorted(named) == sorted(plain)
    for name in plain:
        np.testing.assert_array_equal(named[name].value, plain[name].value)
    with pytest.raises(Undefined, match=r"nothing uses the result|result is ignored"):
        _ = named["a"].cotangent
    if "c" in named:
        assert named["c"].cotangent.tolist() == [6, 3, 1]
    assert out == grad(f)(2.0)


@pytest.mark.parametrize("grad", [jax.grad, harvest.grad, lambda f: f], ids=["jax", "harvest", ""])
def test_harvest_s_jit_keeps_trees_and_order(grad):
    def f(x, mode):
        sow({"u": x, "v": (2 * x, 3 * x)}, "tree")
        sow(x, "many", mode=mode)
        sow(x * 2, "many", mode=mode)
        return x**2

    for mode, want in (("append", (3, 6)), ("last", 6)):
        _, named = reap(grad(harvest.jit(lambda x: f(x, mode))))(3.0)  # noqa: B023
        assert named["tree"].value == {"u": 3, "v": (6, 9)}
        assert named["many"].value == want

    def partly(x, mode):
        sow(x, "many", mode=mode)
        return sow(x * 2, "many", mode=mode)

    for mode, want in (("append", (3, 6)), ("last", 6)):
        g = harvest.jit(lambda x: partly(x, mode))  # noqa: B023
        if grad is jax.grad and mode == "append":  # what is dead stays inside, in order
            with pytest.raises(HarvestError, match=r"'many' was sown at .*harvest\.grad"):
                reap(grad(g))(3.0)
        elif grad is not jax.grad:
            assert reap(grad(g))(3.0)[1]["many"].value == want


@pytest.mark.parametrize(("mode", "used"), [("append", 0), ("append", 2), ("last", 0), ("last", 2)])
def test_one_of_many_that_jax_removes(mode, used):
    """Sown at one place, so by place alone a missing one would not be missed."""
    f = jax.jit(lambda x: [sow(x**2 * i, "a", mode=mode) for i in (1.0, 2.0, 3.0)][used])
    if (mode, used) == ("last", 2):
        assert reap(jax.grad(f))(3.0)[1]["a"].value == 27
    else:
        with pytest.raises(HarvestError, match="'a' was sown at"):
            reap(jax.grad(f))(3.0)
    want = {"append": (9, 18, 27), "last": 27}[mode]
    assert reap(harvest.grad(f))(3.0)[1]["a"].value == want


def test_harvest_s_jit_is_jax_s():
    f = harvest.jit(lambda x, n: sow(x * n, "a"), static_argnums=1)
    assert isinstance(f, jax.stages.Wrapped)
    assert f.lower(2.0, 3).compile()(2.0) == f(2.0, 3) == 6
    f.clear_cache()

    class Model:
        @harvest.jit(static_argnums=0)
        def call(self, x):
            return sow(x, "a")

    assert reap(Model().call)(1.0)[1]["a"].value == 1
    traces = []
    g = reap(harvest.jit(lambda x: traces.append(1) or sow(x, "a")))
    assert [g(float(i))[1]["a"].value for i in range(3)] == [0, 1, 2]
    assert len(traces) == 1


def test_an_ignored_result_that_feeds_another_ignored_one():
    def f(x):
        h = sow(x * 2, "a")
        sow(h * 3, "b")
        return x

    _, named = reap(harvest.grad(f))(2.0)
    for name in "ab":
        with pytest.raises(Undefined, match="result is ignored"):
            _ = named[name].cotangent


def test_a_function_that_was_only_traced():
    def f(x):
        jax.eval_shape(lambda x: sow(x, "a"), x)
        return x

    with pytest.raises(HarvestError, match="eval_shape"):
        reap(f)(1.0)


def test_a_primitive_that_hides_a_sow():
    solve = lambda x: lax.custom_linear_solve(
        lambda v: sow(v * 2, "a"), x, lambda mv, b: b / 2, symmetric=True
    )
    with pytest.raises(HarvestError, match=r"'a' is sown at .* inside custom_linear_solve"):
        reap(solve)(1.0)
    add = lambda a, b: sow(a + b, "a")
    with pytest.raises(HarvestError, match="inside reduce"):
        reap(lambda x: lax.reduce(x, 0.0, add, (0,)))(jnp.ones(3))
    assert solve(1.0) == 0.5  # without reap it is no one's business


def test_the_condition_of_a_bounded_loop():
    seen = lambda c: sow(c, "a") < 10
    with pytest.raises(HarvestError, match=r"'a' is sown at .* in the condition of a bounded loop"):
        reap(lambda x: bounded_while_loop(seen, lambda c: c * 2, x, max_steps=9))(1.0)
    with pytest.raises(HarvestError, match="a loop of no steps"):
        reap(lambda x: bounded_while_loop(lambda c: c < 9, lambda c: sow(c, "a"), x, 0))(1.0)


def test_a_name_used_twice_names_both_places():
    def f(x):
        y = sow(x, "a")
        return sow(y, "a")

    with pytest.raises(HarvestError) as e:
        reap(f)(1.0)
    first = f.__code__.co_firstlineno + 1
    assert f"test_harvest_errors.py:{first}" in str(e.value)
    assert f"test_harvest_errors.py:{first + 1}" in str(e.value)


g = jax.jit(lambda x: sow(x * 2, "a"))
TWICE = {
    "one trace called twice": lambda x: g(x) + g(x + 1),
    "plain and differentiated": lambda x: g(x) + harvest.grad(g)(x),
    "plain and by jax.grad": lambda x: g(x) + jax.grad(lambda x: sow(x**2, "a"))(x),
    "modes that differ": lambda x: sow(x, "a", mode="append") + sow(x, "a", mode="last"),
    "in a branch and outside": lambda x: lax.cond(x > 0, g, lambda x: x, x) + g(x),
}


@pytest.mark.parametrize("f", TWICE.values(), ids=TWICE.keys())
def test_used_twice(f):
    with pytest.raises(HarvestError, match=r'sown twice in one run.*mode="append"'):
        reap(f)(1.0)


def test_one_name_in_two_scopes_is_two_names():
    _, named = reap(lambda x: nest(g, "p")(x) + nest(g, "q")(x))(1.0)
    assert len(named) == 2


# ---- attributes that are not defined ----


def test_why_an_attribute_is_not_defined():
    f = lambda x: jnp.sum(sow(x**2, "a")) + sow(jnp.arange(2), "n")[0]
    x = jnp.ones(2)

    def why(named, attribute, name="a"):
        with pytest.raises(Undefined) as e:
            getattr(named[name], attribute)
        assert not hasattr(named[name], attribute)
        return str(e.value)

    named = reap(f)(x)[1]
    assert "no transformation" in why(named, "tangent")
    assert "no transformation" in why(named, "cotangent")
    named = reap(harvest.grad(f))(x)[1]
    assert ".jacobian" in why(named, "tangent")
    assert "int32" in why(named, "cotangent", "n")
    assert "not sown in a while_loop" in why(named, "count")
    named = reap(lambda x: harvest.jvp(f, (x,), (x,)))(x)[1]
    assert "harvest.grad" in why(named, "cotangent")
    assert "harvest.grad" in why(named, "jacobian")
    named = reap(harvest.jacfwd(f))(x)[1]
    assert "grad or jacrev" in why(named, "cotangent")
    named = reap(jax.grad(f))(x)[1]
    assert "pybridge.harvest.grad" in why(named, "jacobian")
    loop = lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: sow(c * 2, "a"), x)
    aux = lambda x: (jnp.sum(x), loop(lax.stop_gradient(x)))
    named = reap(harvest.grad(aux, has_aux=True))(x)[1]
    assert "ignored" in why(named, "cotangent")


def test_keys_that_are_not_there():
    _, named = reap(harvest.grad(lambda x: sow(x, "a")))(1.0)
    for key, said in (
        ("b", "sown: 'a'"),
        (("vmap", "a"), "did not go through 'vmap'; it went through: 'grad'"),
        (3, "sown: 'a'"),
    ):
        with pytest.raises(KeyError) as e:
            _ = named[key]
        assert said in str(e.value)


def test_a_jacobian_after_vmap_of_reap():
    named = jax.vmap(reap(harvest.grad(lambda x: sow(x**2, "a"))))(jnp.ones(3))[1]
    assert named["a"].value.tolist() == [1, 1, 1]
    with pytest.raises(HarvestError, match="through a vmap since"):
        _ = named["a"].jacobian


# ---- vmap ----


def test_out_axes_beyond_the_rank():
    f = harvest.vmap(lambda x: sow(x[0], "a") * x, out_axes=1)
    with pytest.raises(HarvestError, match=r"'a' .* has shape \(\) inside.*sow_axes"):
        reap(f)(jnp.ones((3, 2)))


def test_out_axes_that_differ():
    f = harvest.vmap(lambda x: (sow(x, "a"), x), out_axes=(0, 1))
    with pytest.raises(HarvestError, match="sow_axes"):
        reap(f)(jnp.ones((3, 2)))


def fork(x):
    return lax.cond(x > 0, lambda x: sow(x, "a"), lambda x: -x, x)


LANES = {
    "cond": lambda x: fork(x - 2),
    "while_loop": lambda x: lax.while_loop(lambda c: c < 5, lambda c: sow(c * 2, "a"), x),
    "bounded loop": lambda x: bounded_while_loop(
        lambda c: c < 5, lambda c: sow(c * 2, "a"), x, max_steps=9
    ),
    "fori of a length": lambda x: bounded_fori_loop(
        0, x.astype(int), lambda i, c: sow(c * 2, "a"), x, max_steps=9
    ),
}


@pytest.mark.parametrize("f", LANES.values(), ids=LANES.keys())
def test_lanes_that_part_under_jax_s_own_vmap(f):
    """JAX runs all branches and steps for all lanes, with nothing to tell what was sown for which."""
    xs = jnp.array([1.0, 8.0, 3.0])
    for t in (jax.vmap(f), jax.jit(jax.vmap(f)), jax.vmap(jax.jit(f))):
        with pytest.raises(HarvestError, match=r"'a' is sown at .*lanes.*pybridge\.harvest\.vmap"):
            reap(t)(xs)
        np.testing.assert_array_equal(t(xs), [f(x) for x in xs])
    with pytest.raises(HarvestError, match=r"and harvest's grad, jvp and vmap around"):
        reap(lambda x: jax.jvp(harvest.vmap(f), (x,), (x,)))(xs)
    out, named = reap(harvest.vmap(f))(xs)
    np.testing.assert_array_equal(out, jax.vmap(f)(xs))
    assert np.shape(named["a"].taken)[0] == 3
    together = lambda x: jax.vmap(lambda y: f(x) * y)(xs)  # no lane parts: nothing to refuse
    assert np.max(reap(together)(jnp.array(3.0))[1]["a"].value) > 0


# ---- JAX's own errors are JAX's ----

BAD_CALLS = {
    "not scalar": (harvest.grad(lambda x: sow(x, "a")), (np.ones(2),)),
    "integer": (harvest.grad(lambda x: sow(x, "a") * 1.0), (1,)),
    "a tuple": (harvest.grad(lambda x: (sow(x, "a"), x)), (1.0,)),
    "no aux": (harvest.grad(lambda x: sow(x, "a"), has_aux=True), (1.0,)),
    "argnums": (harvest.grad(lambda x: sow(x, "a"), argnums=2), (1.0,)),
    "sizes": (harvest.vmap(lambda x, y: sow(x, "a")), (np.ones(2), np.ones(3))),
    "rank": (harvest.vmap(lambda x: sow(x, "a")), (1.0,)),
    "tangent": (lambda x: harvest.jvp(lambda x: sow(x, "a"), (x,), (np.ones(3),)), (1.0,)),
}


@pytest.mark.parametrize(("f", "args"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_the_same_error_as_without_reap(f, args):
    with pytest.raises((TypeError, ValueError)) as plain:
        f(*args)
    with pytest.raises(type(plain.value)) as reaped:
        reap(f)(*args)
    assert str(reaped.value)[:40] == str(plain.value)[:40]


# ---- bad input ----


@pytest.mark.parametrize(
    "name", [3, "", (), None, ["a"], ("a", 1.5), ("a", ""), ("a", True), ("a", ["b"])]
)
def test_names(name):
    with pytest.raises(HarvestError, match="non-empty string"):
        sow(1.0, name)
    with pytest.raises(HarvestError, match="scope is"):
        nest(sow, name)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("text", "type str"),
        ({"q": [1.0, "x"]}, r"value\['q'\]\[1\]"),
        (sow, "type function"),
        ({}, "no array"),
        (None, "no array"),
    ],
)
def test_values(value, said):
    with pytest.raises(HarvestError, match=said):
        sow(value, "a")


def test_modes():
    with pytest.raises(HarvestError, match="'strict', 'append', 'last'"):
        sow(1.0, "a", mode="clobber")


def test_side_effects():
    from jax.experimental import io_callback

    def f(x):
        io_callback(lambda x: None, None, x)
        return sow(x, "a")

    with pytest.raises(HarvestError, match="side effect"):
        reap(f)(1.0)
    with pytest.raises(HarvestError, match="side effect"):
        reap(jax.jit(f))(1.0)
    with pytest.raises(HarvestError, match="side effect"):
        plant(f, {"a": 1.0})(1.0)


def test_not_a_function():
    with pytest.raises(HarvestError, match="accepted: a function"):
        reap(3.0)
    with pytest.raises(HarvestError, match="accepted: a function"):
        plant(3.0, {})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"b": 1.0}, "'b' is never sown; sown are: 'a'"),
        ({"a": 1.0}, r"float32\[\]; accepted: float32\[2\]"),
        ({"a": jnp.ones(2, int)}, r"int32\[2\]; accepted: float32\[2\]"),
        ({"a": (1.0, 2.0)}, "structure"),
        ([1.0], "a mapping"),
        ({3: 1.0}, "a name in values is 3"),
    ],
)
def test_plant(values, said):
    with pytest.raises(HarvestError, match=said):
        plant(lambda x: jnp.sum(sow(x * 2, "a")), values)(jnp.ones(2))


def test_plant_modes_and_rules():
    append = lambda x: sow(x, "a", mode="append") + sow(x, "a", mode="append")
    with pytest.raises(HarvestError, match="sown 2 times"):
        plant(append, {"a": (1.0,)})(1.0)

    @jax.custom_jvp
    def f(x):
        return sow(x, "a")

    f.defjvp(lambda p, t: (p[0], t[0]))
    with pytest.raises(HarvestError, match="contradict"):
        plant(f, {"a": 1.0})(1.0)
    with pytest.raises(HarvestError, match="contradict"):
        plant(harvest.grad(f), {"a": 1.0})(1.0)


def test_an_error_leaves_no_session_behind():
    def f(x):
        sow(x, "a")
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        reap(f)(1.0)
    jaxpr = jax.make_jaxpr(harvest.grad(lambda x: sow(x, "a")))(1.0)
    assert "harvest_level" not in str(jaxpr)


def test_attributes():
    f = harvest.grad(lambda x: jnp.sin(sow(x**3, "a")))
    _, named = reap(f, attributes=("value",))(1.0)
    _, full = reap(f, attributes=tuple(harvest.ATTRIBUTES))(1.0)
    assert len(jax.tree.leaves(named)) < len(jax.tree.leaves(full))
    for attribute in ("value", "cotangent", "jacobian"):
        assert getattr(named["a"], attribute) == getattr(full["a"], attribute)
    for bad in ("value", ("gradient",)):
        with pytest.raises(HarvestError, match="attributes is"):
            reap(f, attributes=bad)


def test_an_error_is_raised_again_by_the_next_call():
    f = jax.jit(unused)
    assert reap(f)(1.0)[1]["a"].value == 2
    for g in (reap(jax.grad(f)), reap(jax.jit(jax.grad(f)))):
        for _ in range(2):  # the second meets JAX's caches of the first
            with pytest.raises(HarvestError, match="'a' was sown at"):
                g(1.0)


def test_membership():
    _, named = reap(lambda x: sow(x, "a"))(1.0)
    assert "a" in named
    for key in ("b", 3, ("a", 1.5)):
        assert key not in named


def test_branches_that_sow_one_name_in_two_shapes():
    two = lambda x: jax.lax.cond(x[0] > 0, lambda x: sow(x, "a")[0], lambda x: sow(x[0], "a"), x)
    with pytest.raises(HarvestError, match="in branches: of one shape"):
        reap(two)(jnp.ones(2))
