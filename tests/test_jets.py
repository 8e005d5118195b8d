"""The form under every composition of transformations, against plain JAX derivatives of the same
function, and against central differences where that is the anchor."""

import compositions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pybridge import jets
from pybridge.engines.jax import JaxFunction, engine

pytestmark = pytest.mark.usefixtures("x64")

value = JaxFunction(compositions.f)


def inner_gradient(target, x, *rest):
    """grad_x of a scalar target, bound as a form: what nested_grad does for a Julia function."""
    args = (x, *rest)
    out = jets.cotangent(
        target_engine(target), target, args, [jnp.ones(())], wanted=[True, *(False for _ in rest)]
    )
    return jax.tree.unflatten(jax.tree.structure(x), [ct for ct in out if ct is not None])


def target_engine(target):
    return getattr(target, "engine", engine)


def gradient(x, ps):
    return inner_gradient(value, x, ps)


@pytest.mark.parametrize("name", compositions.ALL)
def test_composition(name):
    compositions.check(name, gradient, value)


def test_third_order_against_central_differences():
    check_grads(gradient, (compositions.x, compositions.ps), 3, ["fwd", "rev"])


def test_vmap_with_shared_parameters_is_one_call_and_one_cotangent():
    loss = lambda ps: compositions.over(gradient)(compositions.X, ps)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(compositions.ps)
    forms = [eqn for eqn in jaxpr.eqns if eqn.primitive is jets.form_p]
    assert len(forms) == 2  # the inner gradient, and its pullback
    assert [v.aval.shape for v in forms[1].outvars] == [(4, 3), (), (4,)]
    per_sample = [
        v.aval.shape[:1] == (compositions.N,) and v.aval.ndim == 3 for e in forms for v in e.outvars
    ]
    assert not any(per_sample)


def test_unwanted_outputs_are_dropped_from_the_form():
    loss = lambda x, ps: jnp.sum(jax.grad(value)(x, ps) ** 2)
    jaxpr = jax.make_jaxpr(jax.jit(jax.grad(loss)))(compositions.x, compositions.ps)
    (call,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("jit", "pjit")]
    forms = [eqn for eqn in call.params["jaxpr"].eqns if eqn.primitive is jets.form_p]
    assert forms
    wanted = [
        flags is not None for eqn in forms for flags in eqn.params["sflags"][eqn.params["open"]]
    ]
    assert sum(wanted) == len([v for eqn in forms for v in eqn.outvars])
    assert all(v.aval.shape != (4, 3) for eqn in forms for v in eqn.outvars)


def h(x, ps):
    """Two outputs, one of them an integer, a nested tree, and leaves of every kind."""
    y = jnp.tanh(ps["W"] @ x["u"]) * x["t"] ** ps["n"]
    return y, {"q": jnp.sum(x["u"]) * ps["b"], "count": jnp.sum(y > 0)}


X_TREE = {"u": np.array([0.3, -0.7, 1.1]), "t": 1.3}
PS_TREE = {
    "W": np.arange(12.0).reshape(4, 3) / 12,
    "b": np.array([1.0, -2.0]),
    "n": 3,
    "none": None,
    "unused": np.ones(7),
    "labels": np.arange(3),
}


@pytest.mark.parametrize(
    "build",
    [
        lambda h: h,
        lambda h: jax.jacfwd(lambda x, p: h(x, p)[0]),
        lambda h: jax.jacrev(lambda x, p: h(x, p)[0]),
        lambda h: jax.jacrev(jax.jacfwd(lambda x, p: h(x, p)[0])),
        lambda h: jax.grad(lambda x, p: jnp.sum(h(x, p)[1]["q"] ** 2), (0, 1), allow_int=True),
        lambda h: jax.jit(jax.grad(lambda x, p: jnp.sum(h(x, p)[0] ** 2), (0, 1), allow_int=True)),
        lambda h: lambda x, p: jax.jvp(lambda x: h(x, p), (x,), (x,))[0],
    ],
    ids=["value", "jacfwd", "jacrev", "hessian", "grad of one output", "jit(grad)", "jvp"],
)
def test_array_values_and_leaves_without_a_derivative(build):
    got, want = build(JaxFunction(h))(X_TREE, PS_TREE), build(h)(X_TREE, PS_TREE)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        if jnp.result_type(b) == jax.dtypes.float0:
            assert jnp.result_type(a) == jax.dtypes.float0
        else:
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_key_leaves_travel_and_batch():
    f = lambda x, ps: x * ps["a"] * jax.random.normal(ps["key"])
    ps = {"a": jnp.arange(1.0, 4.0), "key": jax.random.split(jax.random.key(0), 3)}
    build = lambda f: jax.vmap(jax.grad(f), (None, 0))
    np.testing.assert_allclose(build(JaxFunction(f))(2.0, ps), build(f)(2.0, ps))


def test_float32_stays_float32():
    x, ps = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (compositions.x, compositions.ps))
    build = lambda g: jax.grad(compositions.scalar(g), (0, 1))
    want = build(jax.grad(compositions.f))(x, ps)
    compositions.assert_same(build(gradient)(x, ps), want, rtol=1e-4)


def test_linear_transpose_of_what_is_not_linear_is_refused():
    x, ps = jax.tree.map(jnp.asarray, (compositions.x, compositions.ps))
    with pytest.raises(NotImplementedError, match="not a linear function"):
        jax.linear_transpose(lambda x: value(x, ps), x)(1.0)


def test_complex_derivatives_are_refused_and_complex_values_pass():
    f = JaxFunction(lambda z: jnp.sum(jnp.abs(z) ** 2))
    z = jnp.array([1.0 + 2.0j])
    np.testing.assert_allclose(f(z), 5.0)
    with pytest.raises(TypeError, match=r"complex128.*real and imaginary parts"):
        jax.grad(f)(z)


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"argument 1\['mode'\] is 'train' of type str"):
        value(compositions.x, {**compositions.ps, "mode": "train"})


def test_eager_calls_do_not_trace_again():
    traced = []
    f = JaxFunction(lambda x: traced.append(1) or jnp.sum(x**2))
    for _ in range(5):
        f(jnp.ones(3))
    assert len(traced) == 2  # once for its shape, once to lower it


def test_debug_nans_names_a_nan_and_is_quiet_without_one():
    f = JaxFunction(lambda x: jnp.sum(jnp.sqrt(x)))
    with jax.debug_nans(True):
        np.testing.assert_allclose(jax.jit(jax.grad(f))(jnp.ones(2)), [0.5, 0.5])
        for call in (f, jax.jit(f), jax.jit(jax.grad(f))):
            with pytest.raises(FloatingPointError):
                jax.block_until_ready(call(-jnp.ones(2)))


def test_the_compiled_program_survives_cleared_caches():
    compiled = jax.jit(JaxFunction(lambda x: jnp.sum(x**2))).lower(jnp.ones(3)).compile()
    jax.clear_caches()
    np.testing.assert_allclose(compiled(jnp.full(3, 2.0)), 12.0)


@pytest.mark.parametrize("seed", range(6))
def test_random_compositions(seed):
    """Random stacks of vmap, grad, jvp, jit, scan, cond and checkpoint agree with plain JAX."""
    rng = np.random.default_rng(seed)
    f = lambda x, w: jnp.sum(jnp.tanh(w * x) ** 2 + x**3 * w)
    ours = JaxFunction(f)
    w = rng.normal(size=3)

    def wrap(kind, g):
        def pick(x, w):
            return jax.lax.cond(x[0] > 0, lambda x: g(x, w), lambda x: g(2 * x, w), x)

        return {
            "grad x": lambda x, w: jnp.sum(jnp.sin(jax.grad(g)(x, w))),
            "grad w": lambda x, w: jnp.sum(jnp.sin(jax.grad(g, 1)(x, w))),
            "jvp": lambda x, w: jax.jvp(lambda x: g(x, w), (x,), (jnp.cos(x),))[1],
            "vmap x": lambda x, w: jnp.sum(jax.vmap(g, (0, None))(jnp.stack([x, 2 * x]), w)),
            "vmap w": lambda x, w: jnp.sum(jax.vmap(g, (None, 0))(x, jnp.stack([w, w - 1]))),
            "jit": lambda x, w: jax.jit(g)(x, w),
            "checkpoint": lambda x, w: jax.checkpoint(g)(x, w),
            "cond": pick,
            "scan": lambda x, w: jax.lax.scan(
                lambda c, s: (c + g(s * x, w), None), 0.0 * x[0], jnp.arange(1.0, 3.0)
            )[0],
        }[kind]

    kinds = ["grad x", "grad w", "jvp", "vmap x", "vmap w", "jit", "checkpoint", "cond", "scan"]
    chosen, derivatives = [], 0
    while len(chosen) < 6:
        kind = str(rng.choice(kinds))
        derivatives += kind in ("grad x", "grad w", "jvp")
        if derivatives > 3 and kind in ("grad x", "grad w", "jvp"):
            continue
        chosen.append(kind)
    got, want = ours, f
    for kind in chosen:
        got, want = wrap(kind, got), wrap(kind, want)
    x = rng.normal(size=3)
    np.testing.assert_allclose(got(x, w), want(x, w), rtol=1e-9, err_msg=str(chosen))
