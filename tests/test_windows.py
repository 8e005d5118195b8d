"""reduce_window against a plain loop, and its derivatives against central differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from windows_reference import REDUCERS, first, loop, second, single

from pybridge import reduce_window

pytestmark = pytest.mark.usefixtures("x64")

OURS = {
    "add": lax.add,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "logaddexp": jnp.logaddexp,
    "user": lambda a, b: jnp.sin(a) * b + 0.5 * a,
}


def geometry(rng):
    """A random geometry: rank 1 to 3, all options, not empty."""
    rank = int(rng.integers(1, 4))
    draw = lambda low, high, p_one=0.0: [
        1 if rng.random() < p_one else int(v) for v in rng.integers(low, high, rank)
    ]
    while True:
        case = {
            "shape": draw(1, 7 - rank),
            "window": draw(1, 4, 0.2),
            "stride": draw(1, 4, 0.4),
            "padding": [tuple(int(v) for v in rng.integers(-1, 3, 2)) for _ in range(rank)],
            "base": draw(1, 3, 0.6),
            "dilation": draw(1, 3, 0.6),
        }
        if min(out_shape(case)) > 0:
            return case


def out_shape(case):
    zero = [np.zeros(case["shape"])]
    keys = ("window", "stride", "padding", "base", "dilation")
    return loop(zero, [0.0], lambda a, b: a, *(case[k] for k in keys))[0].shape


def ours(case, op, **options):
    keys = ("window", "stride", "padding", "base", "dilation")
    return lambda x, init: reduce_window(x, init, op, *(case[k] for k in keys), **options)


def reference(case, op):
    keys = ("window", "stride", "padding", "base", "dilation")
    return lambda x, init: loop([x], [init], single(op), *(case[k] for k in keys))[0]


def check(f, plain, x, init, rng, compare_second=True):
    """Value, jvp, vjp, forward-over-reverse and reverse-over-reverse, all in one program."""
    dx, ex = rng.normal(size=(2, *x.shape))
    di, ei = rng.normal(size=2)
    ct = rng.normal(size=plain(x, init).shape)
    scalar = lambda x, init: jnp.vdot(ct, f(x, init))
    gradient = jax.grad(scalar, argnums=(0, 1))
    along = lambda g: jnp.vdot(g[0], dx) + g[1] * di

    @jax.jit
    def everything(x, init):
        value, tangent = jax.jvp(f, (x, init), (dx, di))
        over = jax.jvp(lambda *p: along(gradient(*p)), (x, init), (ex, ei))
        rev = jax.grad(lambda *p: along(gradient(*p)), argnums=(0, 1))(x, init)
        return value, tangent, over, jnp.vdot(rev[0], ex) + rev[1] * ei

    value, tangent, (slope, over), rev = everything(x, init)
    np.testing.assert_allclose(value, plain(x, init), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(f(x, init), value, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(tangent, first(plain, (x, init), (dx, di)), rtol=1e-6, atol=1e-7)
    plain_scalar = lambda x, init: np.vdot(ct, plain(x, init))
    expected = first(plain_scalar, (x, init), (dx, di))
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-7)
    if compare_second:
        expected = second(plain_scalar, (x, init), (dx, di), (ex, ei))
        np.testing.assert_allclose(over, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rev, over, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", list(OURS))
def test_any_geometry(name, seed):
    rng = np.random.default_rng([seed, len(name)])
    case = geometry(rng)
    x, init = rng.normal(size=case["shape"]), rng.normal()
    check(ours(case, OURS[name]), reference(case, REDUCERS[name]), x, init, rng)


@pytest.mark.parametrize("ties", ["first", "split"])
@pytest.mark.parametrize("name", list(OURS))
@pytest.mark.parametrize(
    "case",
    [
        {"shape": [70], "window": [37], "stride": [1], "padding": [(0, 0)], "base": [1]},
        {"shape": [30], "window": [40], "stride": [3], "padding": [(20, 36)], "base": [1]},
        {"shape": [9], "window": [36], "stride": [2], "padding": [(12, 30)], "base": [3]},
        {"shape": [7, 8], "window": [6, 6], "stride": [1, 2], "padding": [(2, 0), (0, 9)]},
        {"shape": [40], "window": [35], "stride": [9], "padding": [(30, 1)], "dilation": [2]},
        {"shape": [3], "window": [34], "stride": [16], "padding": [(80, 50)], "base": [2]},
    ],
    ids=str,
)
def test_long_windows(name, case, ties):
    """Windows beyond the unrolled ones: doubling, or for a user's reducer the loop."""
    if ties == "split" and name not in ("max", "min"):
        pytest.skip("ties are those of max and min")
    rng = np.random.default_rng(len(str(case)))
    case = {"base": [1] * len(case["shape"]), "dilation": [1] * len(case["shape"]), **case}
    x, init = rng.normal(size=case["shape"]), rng.normal()
    if name in ("mul", "user"):
        x, init = 0.3 * x + 1.0, 0.2
    options = {"ties": ties} if ties == "split" else {}
    check(ours(case, OURS[name], **options), reference(case, REDUCERS[name]), x, init, rng)


@pytest.mark.parametrize(("rank", "name"), [(0, "max"), (0, "user"), (0, "add"), (4, "user")])
def test_ranks(rank, name):
    rng = np.random.default_rng(0)
    case = high_rank(rank)
    x, init = rng.normal(size=case["shape"]), rng.normal()
    check(ours(case, OURS[name]), reference(case, REDUCERS[name]), x, init, rng)


@pytest.mark.parametrize("name", ["max", "add", "user"])
def test_rank_6(name):
    rng = np.random.default_rng(0)
    case = high_rank(6)
    x, init, dx = rng.normal(size=case["shape"]), 0.3, rng.normal(size=case["shape"])
    f, plain = ours(case, OURS[name]), reference(case, REDUCERS[name])
    value, gradient = jax.jit(jax.value_and_grad(lambda x: f(x, init).sum()))(x)
    np.testing.assert_allclose(value, plain(x, init).sum(), rtol=1e-12)
    expected = first(lambda x: plain(x, init).sum(), [x], [dx])
    np.testing.assert_allclose(np.vdot(gradient, dx), expected, rtol=1e-6)


def high_rank(rank):
    return {
        "shape": [2, 3, 2, 2, 1, 2][:rank],
        "window": [1, 2, 2, 1, 1, 2][:rank],
        "stride": [1, 1, 2, 1, 1, 1][:rank],
        "padding": [(0, 0), (1, 0), (0, 0), (0, 1), (0, 0), (1, 1)][:rank],
        "base": [1] * rank,
        "dilation": [1] * rank,
    }


@pytest.mark.parametrize("name", list(OURS))
def test_windows_without_a_cell_return_init(name):
    x = jnp.arange(3.0)
    f = lambda x, init: reduce_window(x, init, OURS[name], (2,), (2,), [(4, 5)])
    value, pullback = jax.vjp(f, x, 7.0)
    assert value[0] == value[1] == value[-1] == 7.0
    dx, dinit = pullback(jnp.zeros_like(value).at[0].set(2.0))
    np.testing.assert_array_equal(dx, 0.0)
    assert dinit == 2.0


@pytest.mark.parametrize("name", list(OURS))
@pytest.mark.parametrize(
    ("shape", "window", "padding"),
    [((3,), (5,), [(0, 0)]), ((0,), (1,), [(0, 0)]), ((0, 3), (1, 2), [(0, 0), (0, 0)])],
)
def test_empty_results(name, shape, window, padding):
    f = lambda x, init: reduce_window(x, init, OURS[name], window, None, padding)
    x = jnp.zeros(shape)
    assert f(x, 1.0).shape == lax.reduce_window(x, 1.0, lax.add, window, None, padding).shape
    dx, dinit = jax.grad(lambda x, i: f(x, i).sum(), argnums=(0, 1))(x, 1.0)
    assert dx.shape == shape
    assert dinit == 0.0


def test_an_empty_operand_with_padding_is_all_init():
    got = reduce_window(jnp.zeros((0,)), 3.0, lax.max, (2,), None, [(2, 2)])
    np.testing.assert_array_equal(got, [3.0, 3.0, 3.0])


def test_order_is_the_written_one():
    """Concatenation of digits: neither commutative nor associative as computed here."""
    digits = lambda a, b: 10 * a + b
    x = jnp.arange(1, 7).reshape(2, 3)
    got = reduce_window(x, 9, digits, (2, 2))
    np.testing.assert_array_equal(got, [[91245, 92356]])


@pytest.mark.parametrize("n", [32, 64, 128, 512])
def test_left_fold_of_sub(n):
    x = jnp.asarray(np.random.default_rng(0).normal(size=n))
    got = reduce_window(x, 0.0, lax.sub, (n,))
    np.testing.assert_allclose(got, [-np.sum(x)], rtol=1e-12)


@pytest.mark.parametrize("n", [16, 17, 64, 512])
def test_init_is_used_once(n):
    got = reduce_window(jnp.zeros(n), 1.0, lax.add, (n,), None, [(n - 1, 0)])
    np.testing.assert_array_equal(got, np.ones(n))


def test_associative_reducer_that_does_not_commute():
    """Affine maps (a, b): x -> a x + b, composed left to right; long windows by doubling."""
    then = lambda f, g: (g[0] * f[0], g[0] * f[1] + g[1])
    rng = np.random.default_rng(1)
    xs = [1 + 0.1 * rng.normal(size=60), rng.normal(size=60)]
    inits = [1.0, 0.0]
    args = ((40,), (3,), [(7, 12)])
    run = lambda associative: (
        lambda a, b: reduce_window((a, b), (1.0, 0.0), then, *args, associative=associative)
    )
    plain = loop(xs, inits, lambda f, g: list(then(f, g)), *args)
    for associative in (True, False, None):
        got = run(associative)(*xs)
        np.testing.assert_allclose(got[0], plain[0], rtol=1e-12)
        np.testing.assert_allclose(got[1], plain[1], rtol=1e-12)
    gradient = lambda flag: jax.grad(lambda *p: jnp.sin(run(flag)(*p)[1]).sum(), (0, 1))(*xs)
    for fast, slow in zip(gradient(True), gradient(False)):
        np.testing.assert_allclose(fast, slow, rtol=1e-10, atol=1e-12)


# What a reducer may be


def test_recognised_by_what_it_computes():
    """Any spelling of max follows the one tie rule."""
    x = jnp.array([2.0, 2.0])
    for op in (lax.max, jnp.maximum, lambda a, b: jnp.maximum(a, b), lambda a, b: lax.max(b, a)):
        gradient = jax.grad(lambda x, op=op: reduce_window(x, -jnp.inf, op, (2,))[0])(x)
        np.testing.assert_array_equal(gradient, [1.0, 0.0])


def test_scalar_code_in_a_reducer():
    op = lambda a, b: lax.cond(a > b, lambda: a, lambda: jnp.stack([a, b]).max() + 0 * a)
    x = jnp.array([1.0, 3.0, 2.0, 5.0])
    np.testing.assert_array_equal(reduce_window(x, 0.0, op, (2,)), [3.0, 3.0, 5.0])
    jitted = jax.jit(jax.grad(lambda x: reduce_window(x, 0.0, op, (2,)).sum()))
    np.testing.assert_array_equal(jitted(x), [0.0, 2.0, 0.0, 1.0])


@pytest.mark.parametrize("window", [3, 40])
@pytest.mark.parametrize("jit", [False, True])
def test_captures_have_gradients(window, jit):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=45), rng.normal(size=3)

    def f(x, weights, init):
        table = jnp.sin(weights)
        op = lambda a, b: table[0] * a + table[1] * b + weights[2] * jnp.tanh(b)
        return jnp.sin(reduce_window(x, init, op, (window,), (2,), [(1, 2)])).sum()

    def plain(x, weights, init):
        table = np.sin(weights)
        op = lambda a, b: table[0] * a + table[1] * b + weights[2] * np.tanh(b)
        return np.sin(loop([x], [init], single(op), (window,), (2,), [(1, 2)])[0]).sum()

    transform = jax.jit if jit else lambda g: g
    gradient = transform(jax.grad(f, argnums=(0, 1, 2)))(x, weights, 0.3)
    direction = [rng.normal(size=45), rng.normal(size=3), rng.normal()]
    got = sum(np.vdot(g, d) for g, d in zip(gradient, direction))
    np.testing.assert_allclose(got, first(plain, (x, weights, 0.3), direction), rtol=1e-6)


def test_captures_batched_by_vmap():
    x = jnp.arange(5.0)
    f = lambda w: reduce_window(x, 0.0, lambda a, b: a + w * b, (2,))
    ws = jnp.array([1.0, 2.0, -1.0])
    np.testing.assert_allclose(jax.vmap(f)(ws), jnp.stack([f(w) for w in ws]))


def test_no_nan_from_padding_reaches_anything():
    """A reducer that is singular on padding: division by the cell, with a capture."""
    x = jnp.array([1.0, 2.0, 4.0])

    def f(x, c, init):
        op = lambda a, b: a + jnp.sqrt(c * b) + jnp.log(b) / b
        return reduce_window(x, init, op, (2,), None, [(1, 1)]).sum()

    @jax.jit
    def everything(*p):
        gradient = jax.grad(f, argnums=(0, 1, 2))
        over = jax.jvp(gradient, p, (jnp.ones(3), 1.0, 1.0))[1]
        return f(*p), gradient(*p), over

    for leaf in jax.tree.leaves(everything(x, 2.0, 0.5)):
        assert jnp.isfinite(leaf).all()


def test_hypot_is_associative_and_singular_at_padding():
    x = jnp.arange(1.0, 41.0)
    op = lambda a, b: jnp.sqrt(a * a + b * b)
    f = lambda x, fast: reduce_window(x, 1.0, op, (36,), (5,), [(20, 9)], associative=fast).sum()
    np.testing.assert_allclose(f(x, True), f(x, False), rtol=1e-12)
    fast, slow = jax.grad(f)(x, True), jax.grad(f)(x, False)
    np.testing.assert_allclose(fast, slow, rtol=1e-10)


# Several operands


def test_argmax_with_an_integer_operand():
    x = jnp.array([1.0, 3.0, 2.0, -1.0, 4.0, 0.5])
    index = jnp.arange(6)

    def larger(a, b):
        take = b[0] > a[0]
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    f = lambda x: reduce_window((x, index), (-jnp.inf, -1), larger, (3,))
    value, where = f(x)
    np.testing.assert_array_equal(where, [1, 1, 4, 4])
    np.testing.assert_array_equal(value, [3.0, 3.0, 4.0, 4.0])
    for transform in (lambda g: g, jax.jit):
        gradient = transform(jax.grad(lambda x: f(x)[0].sum()))(x)
        np.testing.assert_array_equal(gradient, [0, 2, 0, 0, 2, 0])
    tangents = jax.jvp(f, (x,), (jnp.arange(6.0),))[1]
    np.testing.assert_array_equal(tangents[0], [1.0, 1.0, 4.0, 4.0])
    assert tangents[1].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(jax.hessian(lambda x: (f(x)[0] ** 2).sum())(x)[1, 1], 4.0)


@pytest.mark.parametrize("window", [3, 34])
def test_sum_and_product(window):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 40))
    op = lambda a, b: {"sum": a["sum"] + b["sum"], "product": a["product"] * b["product"]}

    def f(x, y, i, j):
        tree = {"sum": x, "product": y}
        out = reduce_window(tree, {"sum": i, "product": j}, op, (window,), (2,), "SAME")
        return (out["sum"] * jnp.sin(out["product"])).sum()

    def plain(x, y, i, j):
        pads = [tuple(lax.padtype_to_pads((40,), (window,), (2,), "SAME")[0])]
        op = lambda a, b: [a[0] + b[0], a[1] * b[1]]
        total, product = loop([x, y], [i, j], op, (window,), (2,), pads)
        return (total * np.sin(product)).sum()

    point = (x, y, 0.5, 1.5)
    np.testing.assert_allclose(f(*point), plain(*point), rtol=1e-12)
    direction = [rng.normal(size=40), rng.normal(size=40), 0.3, -0.7]
    got = jax.jvp(jax.jit(f), point, tuple(direction))[1]
    np.testing.assert_allclose(got, first(plain, point, direction), rtol=1e-6)
    gradient = jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*point)
    np.testing.assert_allclose(sum(np.vdot(g, d) for g, d in zip(gradient, direction)), got)


def test_online_softmax():
    x = jnp.asarray(np.random.default_rng(0).normal(size=12))

    def op(a, b):
        m = jnp.maximum(a[0], b[0])
        return m, a[1] * jnp.exp(a[0] - m) + b[1] * jnp.exp(b[0] - m)

    def log_sum(x):
        m, s = reduce_window((x, jnp.ones_like(x)), (-1e30, 0.0), op, (4,), (2,))
        return m + jnp.log(s)

    windows = lambda x: jnp.stack([x[i : i + 4] for i in range(0, 9, 2)])
    plain = lambda x: jax.nn.logsumexp(windows(x), axis=1)
    np.testing.assert_allclose(log_sum(x), plain(x), rtol=1e-12)
    gradient = jax.jit(jax.jacobian(log_sum))(x)
    np.testing.assert_allclose(gradient, jax.jacobian(plain)(x), atol=1e-12)


# Ties, NaN, identities


@pytest.mark.parametrize(
    ("cells", "init", "split"),
    [
        ([2, 1, 2, 2], "identity", [1 / 3, 0, 1 / 3, 1 / 3, 0]),
        ([2, 1, 2, 2], 2, [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]),
        ([2, 1, 2, 2], 1, [1 / 3, 0, 1 / 3, 1 / 3, 0]),
        ([2, 1, 2, 2], 3, [0, 0, 0, 0, 1]),
        ([-np.inf] * 4, "identity", [1 / 4] * 4 + [0]),
        ([1, np.nan, 5, np.nan], 1, [0, 1 / 2, 0, 1 / 2, 0]),
        ([1, 2, 5, 3], np.nan, [0, 0, 0, 0, 1]),
        ([1, np.nan, 5, 3], np.nan, [0, 1 / 2, 0, 0, 1 / 2]),
    ],
)
@pytest.mark.parametrize("ties", ["first", "split"])
@pytest.mark.parametrize(
    ("name", "window", "traced"),
    [("max", 4, True), ("max", 4, False), ("max", 40, True), ("min", 4, True)],
)
def test_ties(name, window, traced, ties, cells, init, split):
    """One rule in jvp, vjp, and under a second derivative, with padding before the cells."""
    sign = 1.0 if name == "max" else -1.0
    x = sign * jnp.array(cells, float)
    init = -sign * np.inf if init == "identity" else sign * init
    expected = np.array(split)
    if ties == "first":
        expected = np.eye(5)[next(i for i in (4, 0, 1, 2, 3) if expected[i] > 0)]

    def f(x, init):
        pads = [(window - 4, 0)]
        return reduce_window(x, init, OURS[name], (window,), None, pads, ties=ties)[0]

    argnums = (0, 1) if traced else (0,)

    @jax.jit
    def derivatives(x, traced_init):
        g = f if traced else lambda x, _: f(x, init)
        gradient = jax.grad(g, argnums)
        # Two directions of the second derivative: zero, since the selection is locally constant.
        bend = jax.jvp(gradient, (x, traced_init), (jnp.ones(4), 1.0))[1]
        return gradient(x, traced_init), jax.jacfwd(g, argnums)(x, traced_init), bend

    *orders, bend = derivatives(x, init)
    for found in orders:
        np.testing.assert_allclose(found[0], expected[:4])
        if traced:
            np.testing.assert_allclose(found[1], expected[4])
    assert all((leaf == 0).all() for leaf in bend)


def test_nan_propagates_and_takes_the_cotangent():
    x = jnp.array([1.0, jnp.nan, 3.0, 2.0])
    for window, init in ((2, -jnp.inf), (2, 0.0), (4, -jnp.inf)):
        f = lambda x, w=window, i=init: reduce_window(x, i, lax.max, (w,))
        value = f(x)
        assert jnp.isnan(value[0])
        _, pullback = jax.vjp(f, x)
        assert pullback(jnp.ones_like(value))[0][1] == (2 if window == 2 else 1)


def test_logaddexp_with_minus_infinity():
    x = jnp.array([-jnp.inf, -jnp.inf, 1.0, 2.0])
    f = lambda x: reduce_window(x, -jnp.inf, jnp.logaddexp, (4,))[0]
    np.testing.assert_allclose(jax.grad(f)(x), [0, 0, *jax.nn.softmax(x[2:])], rtol=1e-12)
    assert jnp.isfinite(jax.hessian(f)(x)).all()


def test_second_derivative_of_logaddexp_where_elements_are_equal():
    """JAX drops custom_jvp rules inside a scan: with one, this Hessian was not even symmetric."""
    x = jnp.array([1.0, 1.0, 0.0])
    for op in (jnp.logaddexp, lambda a, b: jnp.logaddexp(a, b), lambda a, b: jnp.logaddexp(b, a)):
        f = jax.jit(jax.hessian(lambda x, op=op: reduce_window(x, 1.0, op, (3,))[0]))
        want = jax.hessian(lambda x: jax.nn.logsumexp(jnp.append(x, 1.0)))(x)
        np.testing.assert_allclose(f(x), want, rtol=1e-12)


def test_custom_rules_of_a_reducer_hold_at_second_order():
    @jax.custom_jvp
    def double(b):
        return 2 * b

    double.defjvp(lambda p, t: (double(*p), 3 * p[0] * t[0]))  # on purpose not its derivative
    f = lambda x: jnp.sin(reduce_window(x, 0.0, lambda a, b: a + double(b), (2,)))[0]
    x = jnp.array([0.3, 0.4])
    inner = 2 * (x[0] + x[1])
    want = -jnp.sin(inner) * jnp.outer(3 * x, 3 * x) + jnp.cos(inner) * 3 * jnp.eye(2)
    np.testing.assert_allclose(jax.jit(jax.hessian(f))(x), want, rtol=1e-12)


@pytest.mark.parametrize("ties", ["first", "split"])
@pytest.mark.parametrize("window", [3, 40])
def test_ties_at_second_order_inside_a_scan(ties, window):
    x = jnp.array([2.0, 1.0, 2.0])
    share = jnp.array([1.0, 0.0, 0.0]) if ties == "first" else jnp.array([0.5, 0.0, 0.5])
    pool = lambda x: reduce_window(
        x, -jnp.inf, lax.max, (window,), None, [(window - 3, 0)], ties=ties
    )

    def f(x):
        return lax.scan(lambda c, _: (c * pool(x)[0], None), 1.0, None, 3)[0]

    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), 12 * share)
    for derivative in (jax.jacfwd(jax.grad(f)), jax.jacrev(jax.grad(f))):
        np.testing.assert_allclose(jax.jit(derivative)(x), 12 * jnp.outer(share, share))


def test_third_derivative_of_a_product():
    x = jnp.array([2.0, 3.0, 5.0])
    f = lambda x: reduce_window(x, 1.0, lax.mul, (3,))[0]
    third = jax.jit(jax.jacfwd(jax.jacrev(jax.grad(f))))(x)
    assert third[0, 1, 2] == 1.0
    assert third[0, 0, 1] == 0.0


# Dtypes


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("op", [lax.add, lambda a, b: a + b * 1, lambda a, b: a + jnp.abs(b)])
def test_sixteen_bits_accumulate_in_float32(dtype, op):
    got = reduce_window(jnp.ones(1000, dtype), 0, op, (1000,))
    assert got.dtype == dtype
    assert got[0] == 1000
    gradient = jax.grad(lambda x: reduce_window(x, 0, op, (1000,))[0])(jnp.ones(1000, dtype))
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, 1)


def test_a_reducer_that_takes_bfloat16_only():
    two = jnp.asarray(2, jnp.bfloat16)
    op = lambda a, b: lax.add(a, lax.mul(b, two))
    got = reduce_window(jnp.ones(4, jnp.bfloat16), 0.0, op, (2,))
    np.testing.assert_array_equal(got, 4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64, jnp.complex128])
def test_complex_and_float32(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=6), dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x += 1j * jnp.asarray(rng.normal(size=6), x.real.dtype)
    for op, plain in ((lax.add, np.add), (lax.mul, np.multiply)):
        f = lambda x, i, op=op: reduce_window(x, i, op, (3,), (1,), "SAME")
        init = jnp.asarray(1.5, dtype)
        got = f(x, init)
        assert got.dtype == dtype
        want = loop([np.asarray(x)], [np.asarray(init)[()]], single(plain), (3,), (1,), [(1, 1)])[0]
        np.testing.assert_allclose(got, want, rtol=1e-5)
        tangent = jax.jvp(f, (x, init), (x, init))[1]
        h = 1e-3
        want = (np.asarray(f(x * (1 + h), init * (1 + h))) - f(x * (1 - h), init * (1 - h))) / h / 2
        np.testing.assert_allclose(tangent, want, rtol=2e-3, atol=1e-3)
        _, pullback = jax.vjp(f, x, init)
        back = pullback(jnp.ones_like(got))
        # vjp is the transpose, without conjugation
        np.testing.assert_allclose(
            jnp.sum(back[0] * x) + back[1] * init, jnp.sum(tangent), rtol=1e-4
        )


def test_complex_maximum_is_lexicographic_as_in_xla():
    x = jnp.array([1 + 2j, 1 + 3j, 0 + 9j])
    f = lambda x: reduce_window(x, complex(-jnp.inf, -jnp.inf), lax.max, (2,))
    np.testing.assert_array_equal(f(x), [1 + 3j, 1 + 3j])
    np.testing.assert_array_equal(jax.jvp(f, (x,), (jnp.arange(3) + 0j,))[1], [1, 1])


@pytest.mark.parametrize(
    ("op", "dtype", "init"),
    [
        (lax.bitwise_and, jnp.int32, -1),
        (lax.bitwise_or, jnp.uint8, 0),
        (lax.bitwise_xor, jnp.int32, 0),
        (jnp.logical_and, jnp.bool_, True),
        (jnp.logical_or, jnp.bool_, False),
        (lax.max, jnp.bool_, False),
        (lax.max, jnp.int32, 3),
        (lax.min, jnp.uint8, 255),
        (lax.add, jnp.int32, 7),
        (lax.mul, jnp.int64, 1),
    ],
)
@pytest.mark.parametrize("window", [3, 40])
def test_integers_and_booleans(op, dtype, init, window):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 9, 50)).astype(dtype)
    pads = [(2, 1)]
    got = jax.jit(lambda x: reduce_window(x, init, op, (window,), (2,), pads))(x)
    assert got.dtype == dtype
    plain = lambda a, b: np.asarray(op(a, b))
    want = loop([np.asarray(x)], [np.asarray(init, dtype)], single(plain), (window,), (2,), pads)
    np.testing.assert_array_equal(got, want[0])


def test_init_of_a_python_number_or_a_made_array():
    x = jnp.arange(4, dtype=jnp.float32)
    for init in (0, 0.0, True - 1, np.zeros((), np.float32), jnp.zeros((), jnp.float32)):
        assert reduce_window(x, init, lax.add, (2,)).dtype == jnp.float32
    inside = lambda x: reduce_window(x, jnp.zeros((), x.dtype), lax.add, (2,)).sum()
    np.testing.assert_array_equal(jax.jit(jax.grad(inside))(x), [1, 2, 2, 1])
    np.testing.assert_array_equal(jax.grad(jax.jit(inside))(x), [1, 2, 2, 1])


# Transformations


@pytest.mark.parametrize("name", list(OURS))
@pytest.mark.parametrize("window", [(2, 2), (6, 7)])
def test_vmap_in_every_nesting(name, window):
    rng = np.random.default_rng(0)
    xs, inits = rng.normal(size=(3, 8, 9)), rng.normal(size=3)
    f = lambda x, i: jnp.sin(
        reduce_window(x, i, OURS[name], window, (2, 1), [(1, 0), (0, 1)])
    ).sum()
    gradient = jax.grad(f, argnums=(0, 1))
    want = [gradient(x, i) for x, i in zip(xs, inits)]
    for program in (jax.vmap(gradient), jax.jit(jax.vmap(jax.jit(gradient)))):
        got = program(xs, inits)
        np.testing.assert_allclose(got[0], np.stack([w[0] for w in want]), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(got[1], np.stack([w[1] for w in want]), rtol=1e-9, atol=1e-12)
    over = jax.grad(lambda xs, inits: jax.vmap(f)(xs, inits).sum(), argnums=(0, 1))(xs, inits)
    np.testing.assert_allclose(over[0], got[0], rtol=1e-9, atol=1e-12)
    one = jax.vmap(f, in_axes=(None, 0))(xs[0], inits)
    np.testing.assert_allclose(one, [f(xs[0], i) for i in inits], rtol=1e-12)
    last = jax.vmap(f, in_axes=(2, None))(np.moveaxis(xs, 0, 2), inits[0])
    np.testing.assert_allclose(last, [f(x, inits[0]) for x in xs], rtol=1e-12)


@pytest.mark.parametrize("name", ["max", "user", "add"])
def test_vmap_adds_no_loop(name):
    """The number of equations and loop trips does not depend on the batch."""

    def trips(jaxpr):
        counts = []
        for eqn in jaxpr.eqns:
            counts.append((eqn.primitive.name, eqn.params.get("length")))
            for sub in jaxprs_in_params(eqn.params):
                counts += trips(sub)
        return [c for c in counts if c[0] in ("scan", "while")]

    f = lambda x, i: reduce_window(x, i, OURS[name], (2, 3)).sum()
    gradient = jax.grad(f, argnums=(0, 1))
    one = jax.make_jaxpr(gradient)(jnp.ones((5, 6)), 0.5)
    many = jax.make_jaxpr(jax.vmap(gradient))(jnp.ones((100, 5, 6)), jnp.ones(100))
    assert trips(one.jaxpr) == trips(many.jaxpr)


def test_linearize_checkpoint_scan_and_custom_rules_around_it():
    x = jnp.array([1.0, 3.0, 2.0, 5.0])
    f = lambda x: reduce_window(x, 0.0, lax.max, (2,))
    want = jax.jacobian(f)(x)
    _, linear = jax.linearize(f, x)
    np.testing.assert_array_equal(jax.vmap(linear, out_axes=1)(jnp.eye(4)), want)
    np.testing.assert_array_equal(jax.jacrev(jax.checkpoint(f))(x), want)
    np.testing.assert_array_equal(jax.jacfwd(jax.checkpoint(f))(x), want)
    scanned = lambda x: lax.scan(lambda c, _: (c + f(x).sum(), None), 0.0, None, 3)[0]
    np.testing.assert_array_equal(jax.grad(scanned)(x), 3 * want.sum(0))


@pytest.mark.parametrize("window", [2, 40])
@pytest.mark.parametrize("name", list(OURS))
def test_inside_shard_map(name, window):
    """Loops carry what varies over the mesh; with check_vma, which is shard_map's default."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec
    x = jnp.arange(12.0).reshape(3, 4) / 10
    pool = lambda x, i: reduce_window(x, i, OURS[name], (1, window), None, "SAME")
    sharded = jax.shard_map(pool, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d"))
    gradient = lambda f: jax.jit(jax.grad(lambda x, i: f(x, i).sum(), (0, 1)))(x, 0.5)
    for got, want in zip(gradient(sharded), gradient(pool)):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_strict_promotion_of_dtypes():
    x = jnp.arange(6, dtype=jnp.float32)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for name in ("max", "add", "logaddexp"):
            for window in (2, 40):
                f = lambda x, i, name=name, w=window: reduce_window(
                    x, i, OURS[name], (w,), None, "SAME"
                ).sum()
                jax.grad(f, (0, 1))(x, jnp.float32(0.5))
        split = lambda x, i: reduce_window(x, i, lax.max, (2,), ties="split").sum()
        jax.grad(split, (0, 1))(x, jnp.float32(0.5))


def test_hessian_and_reverse_over_reverse_of_pooling():
    x = jnp.array([1.0, 3.0, 2.0, 5.0])
    f = lambda x: (reduce_window(x, 0.5, lax.max, (2,)) ** 3).sum()
    want = np.diag([0, 2 * 6 * 3.0, 0, 6 * 5.0])
    for hessian in (jax.hessian(f), jax.jacrev(jax.jacrev(f)), jax.jacfwd(jax.jacfwd(f))):
        np.testing.assert_allclose(jax.jit(hessian)(x), want)
    np.testing.assert_allclose(jax.hessian(f)(x), want)


def test_cost_of_long_windows_is_logarithmic():
    """Operations in the program of a running sum, not time: ten times the window, a few more."""
    count = lambda w, op: len(
        jax.jit(lambda x, i: reduce_window(x, i, op, (w,)))
        .lower(jnp.ones(5000), 0.0)
        .as_text()
        .splitlines()
    )
    for op in (lax.add, lax.max, lax.mul, jnp.logaddexp):
        assert count(4000, op) < 2 * count(256, op)


def test_the_reducer_is_traced_once():
    calls = []

    def op(a, b):
        calls.append((jnp.shape(a), jnp.shape(b)))
        return a + jnp.sin(b)

    jax.jit(jax.grad(lambda x: reduce_window(x, 0.0, op, (3, 3)).sum()))(jnp.ones((8, 8)))
    assert calls == [((), ())]
