"""reduce_window on every kind of geometry: value and derivatives against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from windows_reference import OURS, REDUCERS, first, loop, second, single

from pybridge import reduce_window

pytestmark = pytest.mark.usefixtures("x64", "unoptimized")


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


def check(f, plain, x, init, rng, reverse_twice=True):
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
        if not reverse_twice:
            return value, tangent, over, over[1]
        rev = jax.grad(lambda *p: along(gradient(*p)), argnums=(0, 1))(x, init)
        return value, tangent, over, jnp.vdot(rev[0], ex) + rev[1] * ei

    value, tangent, (slope, over), rev = everything(x, init)
    np.testing.assert_allclose(value, plain(x, init), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(f(x, init), value, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(tangent, first(plain, (x, init), (dx, di)), rtol=1e-6, atol=1e-7)
    plain_scalar = lambda x, init: np.vdot(ct, plain(x, init))
    expected = first(plain_scalar, (x, init), (dx, di))
    np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-7)
    expected = second(plain_scalar, (x, init), (dx, di), (ex, ei))
    np.testing.assert_allclose(over, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rev, over, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", list(OURS))
def test_any_geometry(name, seed):
    rng = np.random.default_rng([seed, len(name)])
    case = geometry(rng)
    x, init = rng.normal(size=case["shape"]), rng.normal()
    check(ours(case, OURS[name]), reference(case, REDUCERS[name]), x, init, rng)


LONG = [
    {"shape": [70], "window": [37], "stride": [1], "padding": [(0, 0)], "base": [1]},
    {"shape": [30], "window": [40], "stride": [3], "padding": [(20, 36)], "base": [1]},
    {"shape": [9], "window": [36], "stride": [2], "padding": [(12, 30)], "base": [3]},
    {"shape": [7, 8], "window": [6, 6], "stride": [1, 2], "padding": [(2, 0), (0, 9)]},
    {"shape": [40], "window": [35], "stride": [9], "padding": [(30, 1)], "dilation": [2]},
    {"shape": [3], "window": [34], "stride": [16], "padding": [(80, 50)], "base": [2]},
]


@pytest.mark.parametrize(
    ("name", "case", "ties"),
    [
        *(("max", case, "first") for case in LONG),
        *(("logaddexp", case, "first") for case in LONG[::2]),
        *(("user", case, "first") for case in LONG[2:5]),
        *((name, case, "first") for name in ("add", "mul", "min") for case in LONG[2:4]),
        *(("max", case, "split") for case in LONG[2:5]),
        ("min", LONG[1], "split"),
    ],
    ids=str,
)
def test_long_windows(name, case, ties):
    """Windows beyond the unrolled ones: doubling, or for a user's reducer the loop."""
    rng = np.random.default_rng(len(str(case)))
    case = {"base": [1] * len(case["shape"]), "dilation": [1] * len(case["shape"]), **case}
    x, init = rng.normal(size=case["shape"]), rng.normal()
    if name in ("mul", "user"):
        x, init = 0.3 * x + 1.0, 0.2
    options = {"ties": ties} if ties == "split" else {}
    check(
        ours(case, OURS[name], **options),
        reference(case, REDUCERS[name]),
        x,
        init,
        rng,
        name == "max",
    )


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
