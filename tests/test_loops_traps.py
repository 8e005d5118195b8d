"""Bounded loops where others were found wrong, at their limits, and on bad input.

Each public report of a fault in another loop is a test here, named by it, with its right value.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pybridge import bounded_fori_loop, bounded_scan_until, bounded_while_loop

pytestmark = pytest.mark.usefixtures("x64")


def close(a, b, tol=1e-12):
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=tol, atol=tol), a, b)


def power(x, steps, max_steps, **options):
    """x**(2**steps) by squaring."""
    body = lambda c: (c[0] * c[0], c[1] + 1)
    return bounded_while_loop(lambda c: c[1] < steps, body, (x, 0), max_steps, **options)[0]


# ---- public reports ----


def test_jax_8239_gradient_does_not_grow_with_the_bound():
    """The gradient's cost grew with max_steps: count what the compiled gradient evaluates."""
    counts = []

    def tick(x):
        return jax.pure_callback(
            lambda x: counts.append(1) or x, jax.ShapeDtypeStruct((), x.dtype), x
        )

    @jax.custom_jvp
    def step(x):
        return tick(x)

    step.defjvp(lambda x, dx: (step(*x), tick(x[0]) * dx[0]))
    taken = []
    for bound in (8, 4096):
        run = lambda x, m=bound: bounded_fori_loop(0, 8, lambda _, x: step(x), x, max_steps=m)
        counts.clear()
        jax.jit(jax.grad(run))(1.0).block_until_ready()
        taken.append(len(counts))
    assert max(taken) <= 4 * 8


@pytest.mark.parametrize("bound", [3, 7, np.int32(12), np.uint8(9)])
def test_jax_8239_bound_need_not_be_a_power_of_two(bound):
    close(jax.grad(power)(1.1, 3, bound), 8 * 1.1**7)


def test_jax_2469_bounded_loop_in_reverse_mode():
    close(jax.vjp(lambda x: power(x, 3, 5), 1.2)[1](1.0)[0], 8 * 1.2**7)


@pytest.mark.parametrize("checkpoints", [1, 3])
def test_jax_2139_checkpointed_loop(checkpoints):
    close(jax.grad(lambda x: power(x, 4, 9, checkpoints=checkpoints))(1.05), 16 * 1.05**15)


def test_jax_19250_linear_steps_store_no_states():
    """fori of 100 steps on f32[500] stored (100, 500); a step linear in its carry needs nothing."""
    a = jnp.linspace(0.9, 1.1, 500)
    run = lambda x: jnp.sum(bounded_fori_loop(0, 100, lambda _, x: x * a, x))
    assert "[100,500]" not in str(jax.jit(jax.grad(run)).trace(a).jaxpr)
    close(jax.grad(run)(jnp.ones(500)), a**100)


def test_jax_2947_vmap_of_cond_of_while_ends():
    """Under vmap cond becomes select, and the loop of the branch not taken never ended."""

    def run(x):
        halve = lambda x: bounded_while_loop(lambda x: x > 1.0, lambda x: x / 2, x, 50)
        forever = lambda x: bounded_while_loop(lambda x: x < 1.0, lambda x: x * 2, x, 50)
        return lax.cond(x > 0, halve, forever, x)

    xs = jnp.array([6.0, -3.0, 0.5])
    close(jax.jit(jax.vmap(run))(xs[::2]), jnp.array([0.75, 0.5]))
    close(jax.jit(jax.vmap(jax.grad(run)))(xs[::2]), jnp.array([1 / 8, 1.0]))
    assert run(-3.0) == -3.0 * 2.0**50
    assert jax.jit(jax.vmap(run))(xs).shape == (3,)


@pytest.mark.parametrize("steps", [1, 5, 9])
def test_equinox_282_saved_states_need_no_second_forward_pass(steps):
    """With rows for all steps the reverse pass computes each step once, and no loop runs twice."""
    loops = str(jax.jit(jax.grad(lambda x: power(x, steps, 9))).trace(1.1).jaxpr)
    assert loops.count("bounded_loop[") == 2
    assert "trajectory_fold[" not in loops


def test_equinox_927_diffrax_612_forward_mode():
    run = lambda x: power(x, 3, 6)
    close(jax.jvp(run, (1.1,), (2.0,)), (1.1**8, 16 * 1.1**7))
    close(jax.jacfwd(jax.jacfwd(run))(1.1), 56 * 1.1**6)
    close(jax.jacfwd(jax.grad(run))(1.1), 56 * 1.1**6)
    close(jax.grad(jax.grad(run))(1.1), 56 * 1.1**6)
    unbounded = lambda x: power(x, 3, None)
    close(jax.jit(jax.jacfwd(jax.jacfwd(unbounded)))(1.1), 56 * 1.1**6)
    close(jax.linearize(unbounded, 1.1)[1](1.0), 8 * 1.1**7)


def test_optimistix_48_grad_of_vmap():
    """grad(vmap) of a solver that closes over a batched tracer."""

    def root(a):
        return bounded_while_loop(
            lambda x: jnp.abs(x**3 - a) > 1e-12, lambda x: x - (x**3 - a) / (3 * x**2), 1.0 + a, 60
        )

    a = jnp.array([0.5, 2.0, 8.0])
    close(jax.jit(jax.grad(lambda a: jnp.sum(jax.vmap(root)(a))))(a), a ** (-2 / 3) / 3, 1e-10)


def test_many_lanes_share_one_cotangent_of_the_weights():
    """equinox holds the cotangent of shared weights once a lane."""
    w = jnp.linspace(-0.5, 0.5, 64).reshape(8, 8)
    xs, steps = jnp.ones((16, 8)), jnp.arange(16) % 5

    def run(w):
        def each(x, n):
            body = lambda c: (jnp.tanh(w @ c[0]), c[1] + 1)
            return bounded_while_loop(lambda c: c[1] < n, body, (x, 0), 6)[0]

        return jnp.sum(jax.vmap(each)(xs, steps))

    assert "16,8,8]" not in str(jax.jit(jax.grad(run)).trace(w).jaxpr)


# ---- past the stop ----


def sqrt_down(x):
    """x - 1 while x >= 1, through a step that is NaN, with NaN derivatives, below 1."""
    return jnp.sqrt(x - 1.0) ** 2 + 0.0 * jnp.log(x - 1.0 + 1e-300)


@pytest.mark.parametrize("batched_weight", [False, True])
def test_a_body_that_is_nan_past_its_stop(batched_weight):
    xs = jnp.array([1.5, 3.25, 0.25, 2.5, -4.0])  # two lanes never start

    def each(w, x):
        body = lambda x: jnp.sqrt(w * (x - 1.0)) * jnp.sqrt(x - 1.0)
        return bounded_while_loop(lambda x: x > 1.0, body, x, 10)

    def total(w):
        lanes = jax.vmap(each, (0 if batched_weight else None, 0))(w, xs)
        return jnp.sum(lanes * jnp.arange(1.0, 6.0))

    def theirs(w):
        out = 0.0
        for k, x in enumerate(xs):
            y = x
            while y > 1.0:
                y = jnp.sqrt((w[k] if batched_weight else w) * (y - 1.0)) * jnp.sqrt(y - 1.0)
            out += y * (k + 1.0)
        return out

    w = jnp.ones(5) * 1.01 if batched_weight else jnp.float64(1.01)
    grad = jax.jit(jax.grad(total))(w)
    assert np.all(np.isfinite(grad))
    close(grad, jax.grad(theirs)(w), 1e-10)
    per_lane = jax.jit(jax.vmap(jax.grad(each, (0, 1)), (0 if batched_weight else None, 0)))(w, xs)
    assert all(np.all(np.isfinite(g)) for g in per_lane)
    close(per_lane[1][jnp.array([2, 4])], jnp.ones(2))
    second = jax.jit(jax.jacfwd(jax.grad(total)))(w)
    assert np.all(np.isfinite(second))
    twice = jax.jit(jax.jacrev(jax.vmap(jax.grad(each), (0 if batched_weight else None, 0))))(w, xs)
    assert np.all(np.isfinite(twice))


@pytest.mark.parametrize("checkpoints", ["auto", 2])
def test_lanes_that_all_take_no_step(checkpoints):
    xs = jnp.array([-1.0, -2.0])
    each = lambda x: bounded_while_loop(
        lambda x: x > 0.0, lambda x: jnp.log(x), x, 9, checkpoints=checkpoints
    )
    close(jax.vmap(each)(xs), xs)
    close(jax.jit(jax.vmap(jax.grad(each)))(xs), jnp.ones(2))
    close(jax.jit(jax.grad(lambda xs: jnp.sum(jax.vmap(each)(xs))))(xs), jnp.ones(2))


def test_rows_past_the_stop_are_zero_and_have_no_gradient():
    body = lambda x: (x / 2, jnp.log(x - 1.0))
    run = lambda x: bounded_scan_until(lambda x: x > 1.0, body, x, 6)[1]
    close(run(6.0), jnp.array([np.log(5.0), np.log(2.0), np.log(0.5), 0, 0, 0]))
    close(jax.grad(lambda x: jnp.sum(run(x)))(6.0), 1 / 5 + 0.5 / 2 + 0.25 / 0.5)
    both = jax.vmap(jax.grad(lambda x: jnp.sum(run(x))))(jnp.array([6.0, 0.5]))
    close(both, jnp.array([1 / 5 + 0.5 / 2 + 0.25 / 0.5, 0.0]))


def test_rows_that_are_read_by_lanes_that_find_their_length():
    """The loop behind the functions also reads rows; a stopped lane must not read on."""
    from pybridge._loops import primitive, steps

    x64, at = jnp.float64(0), jnp.int32(0)
    cond = steps.trace(lambda n, i, x: [i < n], [jax.typeof(v) for v in (at, at, x64)])
    step = lambda w, i, x, row: [i + jnp.int32(1), x + jnp.sqrt(w * row), x]
    step = steps.trace(step, [jax.typeof(v) for v in (x64, at, x64, x64)])

    def run(w, n, x, rows):
        return primitive.bind(
            [n],
            [w],
            [at, x],
            [rows],
            cond=cond,
            step=step,
            bound=4,
            reverse=False,
            checkpoints="auto",
        )[2]

    # Past a lane's stop there are rows whose square root is NaN.
    rows = jnp.array([[1.0, 4.0, -1.0, -1.0], [9.0, -1.0, -1.0, -1.0], [-1.0] * 4])
    args = jnp.float64(4.0), jnp.array([2, 1, 0], jnp.int32), jnp.array([0.5, 1.0, 2.0]), rows
    many = jax.vmap(run, (None, 0, 0, 0))
    close(many(*args), jnp.array([0.5 + 2 + 4, 1.0 + 6, 2.0]))
    grads = jax.grad(lambda *args: jnp.sum(many(*args)), (0, 2, 3))(*args[:1], *args[1:])
    close(grads[0], (1 + 2 + 3) / (2 * 2.0))
    close(grads[1], jnp.ones(3))
    close(grads[2][0], jnp.array([1.0, 0.5, 0.0, 0.0]))
    close(grads[2][1:], jnp.array([[1 / 3, 0, 0, 0], [0.0] * 4]))


# ---- the limit ----


@pytest.mark.parametrize("checkpoints", ["auto", 1, 2, 100])
@pytest.mark.parametrize("max_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("steps", [0, 1, 5, 9])
def test_steps_against_limit(steps, max_steps, checkpoints):
    run = lambda x: power(x, steps, max_steps, checkpoints=checkpoints, return_steps=False)
    n = min(steps, max_steps)
    close(jax.jit(jax.value_and_grad(run))(1.01), (1.01 ** (2**n), 2**n * 1.01 ** (2**n - 1)))


def test_return_steps():
    count = lambda x, m: bounded_while_loop(
        lambda x: x < 10.0, lambda x: x + 1.0, x, m, return_steps=True
    )
    value, steps = count(2.0, 100)
    assert (value, steps, steps.dtype) == (10.0, 8, jnp.int32)
    assert count(2.0, 3)[1] == 3
    assert count(2.0, 0)[1] == 0
    lanes = jax.vmap(lambda x: count(x, 7))(jnp.array([2.0, 8.5, 30.0]))
    close(lanes, (jnp.array([9.0, 10.5, 30.0]), jnp.array([7, 2, 0])))
    grad, n = jax.jit(jax.grad(lambda x: count(x, 100), has_aux=True))(2.0)
    assert (grad, n) == (1.0, 8)


def test_on_limit_nan():
    run = lambda x, m: bounded_while_loop(
        lambda c: c[0] < 10.0, lambda c: (c[0] * 2.0, c[1] + 1), (x, 0), m, on_limit="nan"
    )
    assert run(1.0, 4) == (16.0, 4)
    x, i = run(1.0, 3)
    assert np.isnan(x)
    assert i == 3
    assert np.isnan(run(1.0, 0)[0])
    grad = jax.grad(lambda x, m: run(x, m)[0])
    assert grad(1.0, 4) == 16.0
    assert np.isnan(grad(1.0, 3))  # and not a silent zero
    lanes = jax.vmap(lambda x: run(x, 3)[0])(jnp.array([1.0, 2.0, 20.0]))
    np.testing.assert_array_equal(lanes, [np.nan, 16.0, 20.0])


def test_on_limit_raise():
    run = lambda x: bounded_while_loop(
        lambda x: x < 10.0, lambda x: x * 2.0, x, 3, on_limit="raise"
    )
    assert run(2.0) == 16.0
    assert jax.jit(run)(2.0) == 16.0
    assert jax.jit(jax.grad(run))(2.0) == 8.0
    for fun in (run, jax.jit(run), jax.grad(run), jax.jit(jax.grad(run))):
        with pytest.raises((RuntimeError, ValueError), match="max_steps=3"):
            jax.block_until_ready(fun(1.0))
    close(jax.jit(jax.vmap(run))(jnp.array([2.0, 30.0])), jnp.array([16.0, 30.0]))
    with pytest.raises((RuntimeError, ValueError), match="max_steps=3"):
        jax.block_until_ready(jax.jit(jax.vmap(run))(jnp.array([2.0, 1.0])))


# ---- bad input ----


@pytest.mark.parametrize("bad", [1.5, "4", True, np.float64(3), np.array([2, 3])])
def test_max_steps_must_be_an_integer(bad):
    with pytest.raises(TypeError, match="max_steps"):
        power(1.0, 2, bad)


def test_max_steps_must_not_be_negative_or_traced():
    with pytest.raises(ValueError, match="max_steps is -1"):
        power(1.0, 2, -1)
    with pytest.raises(ValueError, match="below 2"):
        power(1.0, 2, 2**31)
    with pytest.raises(TypeError, match="known when the loop is traced"):
        jax.jit(lambda m: power(1.0, 2, m))(3)


def test_unbounded_loop_in_reverse_mode_is_an_error():
    with pytest.raises(ValueError, match="max_steps=None"):
        jax.grad(lambda x: power(x, 2, None))(1.0)
    with pytest.raises(ValueError, match="max_steps=None"):
        jax.jit(jax.grad(lambda x: bounded_fori_loop(0, x.astype(int), lambda i, y: y * x, x)))(2.0)
    with pytest.raises(TypeError, match="max_steps is None"):
        bounded_scan_until(lambda x: x < 1, lambda x: (x, x), 0.0, None)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (
            lambda c: (c[0].astype(jnp.float32), c[1]),
            r"init_val\[0\] is float64\[2\].*float32\[2\]",
        ),
        (lambda c: (c[0][:1], c[1]), r"init_val\[0\] is float64\[2\].*float64\[1\]"),
        (lambda c: (c[0], c[1] * 1.5), r"init_val\[1\] is int32\[\].*float64\[\]"),
        (lambda c: c[0], "keep its structure"),
    ],
)
def test_a_body_that_changes_the_carry(body, match):
    with pytest.raises(TypeError, match=match):
        bounded_while_loop(lambda c: c[1] < 3, body, (jnp.ones(2), jnp.int32(0)), 5)


def test_bad_predicates_carries_and_options():
    with pytest.raises(TypeError, match="boolean scalar"):
        bounded_while_loop(lambda x: x, lambda x: x, 1.0, 5)
    with pytest.raises(TypeError, match="boolean scalar"):
        bounded_while_loop(lambda x: x < 1, lambda x: x, jnp.ones(2), 5)
    with pytest.raises(TypeError, match=r"init_val\['f'\]"):
        bounded_while_loop(lambda x: True, lambda x: x, {"f": "text"}, 5)
    with pytest.raises(ValueError, match="on_limit is 'stop'"):
        power(1.0, 2, 5, on_limit="stop")
    with pytest.raises(TypeError, match="boolean scalar"):
        bounded_while_loop(lambda x: (x < 1,), lambda x: x, 1.0, 5)
    with pytest.raises(TypeError, match="body_fun is 3"):
        bounded_while_loop(lambda x: True, 3, 1.0, 5)
    with pytest.raises(ValueError, match=r"on_limit is \['nan'\]"):
        power(1.0, 2, 5, on_limit=["nan"])
    with pytest.raises(ValueError, match="lower is -1: it does not fit"):
        bounded_fori_loop(-1, np.uint8(2), lambda i, x: x, 1.0, 5)
    with jax.enable_x64(False), pytest.raises(ValueError, match="upper is 1099511627776"):
        bounded_fori_loop(0, 2**40, lambda i, x: x, 1.0, 5)
    for bad in (0, -1, "all", None, 1.5, True, np.array([1, 2])):
        with pytest.raises(ValueError, match="checkpoints is"):
            power(1.0, 2, 5, checkpoints=bad)
    with pytest.raises(TypeError, match=r"upper is 2\.5"):
        bounded_fori_loop(0, 2.5, lambda i, x: x, 1.0, 5)
    with pytest.raises(TypeError, match="pair"):
        bounded_scan_until(lambda x: x < 1, lambda x: x, 0.0, 5)


# ---- details ----


def test_signatures_are_those_of_the_documentation():
    want = "(cond_fun, body_fun, init_val, max_steps, *, checkpoints='auto', on_limit='return', return_steps=False)"
    assert str(inspect.signature(bounded_while_loop)) == want
    assert str(inspect.signature(bounded_scan_until)) == want


def test_a_predicate_that_is_a_python_bool_or_constant():
    assert bounded_while_loop(lambda x: jnp.bool_(True), lambda x: x + 1, 0, 3) == 3
    assert bounded_while_loop(lambda x: True, lambda x: x + 1, 0, 3) == 3
    assert jax.vmap(lambda x: bounded_while_loop(lambda x: True, lambda x: x + 1, x, 3))(
        jnp.arange(2)
    ).tolist() == [3, 4]


def test_a_predicate_that_depends_on_what_is_differentiated_but_not_mapped():
    def run(a, x):
        return bounded_while_loop(lambda x: x < a, lambda x: x * a, x, 20)

    xs = jnp.array([0.5, 1.0])
    ours = jax.jit(jax.grad(lambda a: jnp.sum(jax.vmap(lambda x: run(a, x))(xs))))(3.0)
    close(ours, 0.5 * 2 * 3.0 + 1.0)


def _inner_checkpoints(x):
    body = lambda c: (c[0] + 1, jnp.sin(c[1]))
    return bounded_while_loop(lambda c: c[0] < 3, body, (0, x), 5, checkpoints=1)[1]


def _inner_prints(x):
    def body(c):
        jax.debug.callback(lambda _: None, c[1])
        return c[0] + 1, jnp.sin(c[1])

    return bounded_while_loop(lambda c: c[0] < 3, body, (0, x), 5)[1]


def _inner_while(x):
    body = lambda c: (c[0] + 1, jnp.sin(c[1]))
    return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (_inner_checkpoints, jax.jacrev),
        (_inner_prints, jax.jacrev),
        (_inner_prints, jax.jacfwd),
        (_inner_while, jax.jacfwd),
    ],
)
def test_a_value_in_a_body_does_not_seem_to_need_its_tangent(inner, outer):
    """vmap of a jvp of a loop: the inner loop computes values and tangents together, and the values
    came out with an axis of lanes, which jacfwd refuses."""
    run = lambda x: bounded_while_loop(lambda v: v < 0.5, lambda v: inner(v) + 0.3, x, 3)
    first = outer(run)
    theirs = (first(0.3 + 1e-5) - first(0.3 - 1e-5)) / 2e-5
    close(jax.jacfwd(first)(0.3), theirs, 1e-8)
    value = jax.vmap(lambda t: jax.jvp(first, (0.3,), (t,)), out_axes=(None, 0))(jnp.ones(2))[0]
    close(value, first(0.3))


def test_collectives_inside_the_body():
    def run(x):
        body = lambda c: (jnp.sin(c[0]) + lax.pmean(c[0], "i"), c[1] + 1)
        return bounded_while_loop(lambda c: c[1] < 3, body, (x, 0), 5)[0]

    def theirs(xs):
        for _ in range(3):
            xs = jnp.sin(xs) + jnp.mean(xs)
        return xs

    xs = jnp.array([0.1, 0.5, 0.9])
    mapped = jax.vmap(run, axis_name="i")
    close(mapped(xs), theirs(xs))
    weigh = jnp.array([1.0, -2.0, 3.0])
    grad = lambda fun: jax.jit(jax.grad(lambda xs: jnp.sum(weigh * fun(xs))))(xs)
    close(grad(mapped), grad(theirs))


def test_jitted_and_custom_functions_inside_the_body():
    @jax.custom_vjp
    def clipped(x):
        return x * 2.0

    clipped.defvjp(lambda x: (x * 2.0, None), lambda _, ct: (jnp.clip(ct, -1.5, 1.5),))
    body = jax.jit(lambda c: (clipped(jnp.sin(c[0])), c[1], c[2] + 1))
    run = lambda x: bounded_while_loop(lambda c: c[2] < 3, body, (x, jnp.ones(9), 0), 5)[0]

    def theirs(x):
        for _ in range(3):
            x = clipped(jnp.sin(x))
        return x

    close(jax.grad(run)(0.3), jax.grad(theirs)(0.3))
    assert (
        "9" not in str(jax.make_jaxpr(run)(0.3)).split("bounded_loop[")[1].split("while")[0][:200]
    )


def test_stop_gradient_and_disconnected_parts():
    def run(x, y):
        body = lambda c: (c[0] * lax.stop_gradient(x), jnp.sin(c[1]), c[2] + 1)
        return bounded_while_loop(lambda c: c[2] < 3, body, (x, y, 0), 5)[0]

    close(jax.grad(run, (0, 1))(1.2, 0.5), (1.2**3, 0.0))


def test_vmap_with_other_axes():
    xs = jnp.arange(6.0).reshape(2, 3) / 6
    run = lambda x: bounded_while_loop(lambda c: jnp.sum(c) < 4.0, lambda c: c * 1.5 + 0.1, x, 30)
    ours = jax.vmap(run, in_axes=1, out_axes=1)(xs)
    close(ours, jnp.stack([run(x) for x in xs.T], 1))
    grad = jax.vmap(jax.grad(lambda x: jnp.sum(run(x))), in_axes=1, out_axes=1)(xs)
    close(grad, jnp.stack([jax.grad(lambda x: jnp.sum(run(x)))(x) for x in xs.T], 1))


@pytest.mark.parametrize("checkpoints", ["auto", 2])
def test_no_lanes_at_all(checkpoints):
    def run(x):
        body = lambda x: jnp.sin(x) * 2
        return bounded_while_loop(lambda x: x < 9.0, body, x, 5, checkpoints=checkpoints)

    none = jnp.ones(0)
    assert jax.vmap(run)(none).shape == (0,)
    assert jax.vmap(jax.grad(run))(none).shape == (0,)
    assert jax.grad(lambda xs: jnp.sum(jax.vmap(run)(xs)))(none).shape == (0,)


@pytest.mark.parametrize("checkpoints", ["auto", 2])
def test_without_jit_at_all(checkpoints):
    with jax.disable_jit():
        run = lambda x: power(x, 3, 5, checkpoints=checkpoints)
        close(jax.value_and_grad(run)(1.1), (1.1**8, 8 * 1.1**7))


def test_the_same_loop_twice_and_repeated_calls_of_jit():
    run = jax.jit(lambda x, n: power(power(x, n, 4), n, 4))
    for n in (0, 1, 2):
        close(run(1.01, n), 1.01 ** (2 ** (2 * n)))


def test_strict_dtype_promotion_and_32_bits():
    with jax.enable_x64(False), jax.numpy_dtype_promotion("strict"):
        x = jnp.float32(1.1)
        run = lambda x: power(x, jnp.int32(3), 5)
        assert run(x).dtype == jnp.float32
        np.testing.assert_allclose(jax.grad(run)(x), 8 * 1.1**7, rtol=1e-5)
        mapped = jax.vmap(lambda n: jax.grad(lambda x: power(x, n, 5, checkpoints=2))(x))
        np.testing.assert_allclose(mapped(jnp.int32([0, 2])), [1.0, 4 * 1.1**3], rtol=1e-5)
        bounded_fori_loop(jnp.int32(0), jnp.int32(3), lambda i, x: x + jnp.float32(1), x, 5)
        bounded_scan_until(lambda x: x < 9, lambda x: (x + jnp.float32(1), x), x, 5)


def test_repeated_calls_compile_once_and_see_what_closures_hold_now():
    scale = 2.0
    cond, body = (lambda c: c[1] < 3), (lambda c: (c[0] * scale, c[1] + 1))
    run = lambda x: bounded_while_loop(cond, body, (x, 0), 9)[0]
    assert run(1.0) == 8.0
    before = loop_programs()
    assert run(1.5) == 12.0
    assert loop_programs() == before
    scale = jnp.float64(3.0)
    assert run(1.0) == 27.0
    close(jax.grad(run)(1.0), 27.0)
    scale = jnp.float64(4.0)
    assert run(1.0) == 64.0
    close(jax.grad(run)(1.0), 64.0)


def loop_programs():
    from pybridge._loops import primitive

    return primitive._compiled.cache_info().misses


def test_nothing_leaks_tracers():
    with jax.checking_leaks():
        run = lambda x, n: power(x, n, 6, checkpoints=2)
        jax.jit(jax.hessian(run))(1.1, 3)
        jax.vmap(jax.grad(run))(jnp.ones(2), jnp.array([0, 2]))


@pytest.mark.parametrize("max_steps", [10**6, 10**8, 2**31 - 1])
def test_huge_bounds(max_steps):
    close(jax.jit(jax.grad(lambda x, n: power(x, n, max_steps)))(1.01, 3), 8 * 1.01**7)


@pytest.mark.filterwarnings("ignore")
def test_inside_shard_map_without_its_check():
    spec = jax.sharding.PartitionSpec("i")
    mesh = jax.make_mesh((1,), ("i",))
    xs = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, spec))
    run = jax.shard_map(
        lambda w, x: bounded_fori_loop(0, 3, lambda i, x: jnp.sin(w * x), x, 5),
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), spec),
        out_specs=spec,
        check_vma=False,
    )

    def theirs(w, x):
        for _ in range(3):
            x = jnp.sin(w * x)
        return x

    total = lambda fun: jax.jit(jax.value_and_grad(lambda w: jnp.sum(fun(w, xs))))(2.0)
    close(total(run), total(theirs))
