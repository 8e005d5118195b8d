"""The dtypes of operand and init."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from windows_reference import OURS, loop, single

from pybridge import reduce_window

pytestmark = pytest.mark.usefixtures("x64", "unoptimized")


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


@pytest.mark.parametrize(
    ("op", "init", "want"),
    [
        (lax.max, -jnp.inf, [1, 1, 2]),
        (lax.max, np.float64(-np.inf), [1, 1, 2]),
        (lax.min, jnp.float16(jnp.inf), [0, 1, 1]),
        (lax.add, 0.0, [1, 2, 3]),
        (lax.add, False, [1, 2, 3]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.float32])
def test_identity_of_another_dtype_as_in_lax(op, init, want, dtype):
    """lax takes a known identity in any dtype: -inf for integers, a float64 zero for float32."""
    x = jnp.array([0, 1, 1, 2], dtype)
    got = reduce_window(x, init, op, (2,))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got, lax.reduce_window(x, init, op, (2,)))


@pytest.mark.parametrize("ties", ["first", "split"])
@pytest.mark.parametrize("window", [30, 1000])
def test_cotangents_of_a_maximum_accumulate_in_float32(window, ties):
    """Every window has the same maximum: summed in bfloat16 its gradient would stop at 256."""
    x = jnp.zeros(2 * window - 1, jnp.bfloat16).at[window - 1].set(1)
    weight = jnp.bfloat16(1 + 1 / 128)

    def f(x):
        return (weight * reduce_window(x, 0, lax.max, (window,), ties=ties)).sum()

    gradient = jax.grad(f)(x)
    assert gradient.dtype == jnp.bfloat16
    assert gradient[window - 1] == jnp.bfloat16(window * (1 + 1 / 128))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("associative", [None, True])
@pytest.mark.parametrize(
    "op",
    [
        lambda c: lambda a, b: a + b * c,
        lambda c: lambda a, b: a + b * c[None][0],
        lambda c: lambda a, b: lax.add(a, lax.mul(b, c)),  # of this dtype only
    ],
)
def test_cotangents_of_a_capture_accumulate_in_float32(op, associative, dtype):
    """At c = 1 the reducers sum, and d/dc is each cell's number of c's: counted by a plain loop."""
    cells, window, weight = 1200, 500, 2.0**-6

    def f(c):
        x, init = jnp.ones(cells, dtype), jnp.asarray(0, dtype)
        y = reduce_window(x, init, op(c), (window,), associative=associative)
        return (weight * y.astype(jnp.float32)).sum()

    def pair(left, right):  # a sum and its derivative in c
        return left[0] + right[0], left[1] + right[0] + right[1]

    def doubled(n):
        half = n.bit_length() - 1
        run, result = (1, 0), None
        for j in range(half + 1):
            if n >> j & 1:
                result = run if result is None else pair(result, run)
            run = pair(run, run)
        return pair((0, 0), result)[1]

    one = doubled(window) if associative else window
    want = weight * one * (cells - window + 1)
    got = jax.grad(f)(jnp.asarray(1, dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(float(got), want, rtol=2 * float(jnp.finfo(dtype).eps))
