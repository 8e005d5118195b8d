"""Pooling layers against loops that spell out torch's documented rules."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from windows_reference import first

from pybridge import (
    adaptive_avg_pool,
    adaptive_max_pool,
    avg_pool,
    logsumexp_pool,
    lp_pool,
    max_pool,
    min_pool,
    sum_pool,
)

pytestmark = pytest.mark.usefixtures("x64", "unoptimized")


def windows(n, kernel, stride, pad, dilation, ceil):
    """Each window's (real positions, count with padding) along one axis: torch's rule."""
    span = dilation * (kernel - 1) + 1
    numerator = n + 2 * pad - span
    out = (math.ceil(numerator / stride) if ceil else numerator // stride) + 1
    if ceil and (out - 1) * stride >= n + pad:
        out -= 1
    found = []
    for o in range(out):
        positions = [o * stride - pad + k * dilation for k in range(kernel)]
        found.append(([p for p in positions if 0 <= p < n], sum(p < n + pad for p in positions)))
    return found


def pooled(x, kernel, stride, pad, dilation, ceil, reduce):
    """``reduce(cells, flat indices, count with padding)`` of each window of x (channels, a, b)."""
    axes = [windows(n, kernel, stride, pad, dilation, ceil) for n in x.shape[1:]]
    out = np.zeros((x.shape[0], *map(len, axes)))
    for c, i, j in itertools.product(*map(range, out.shape)):
        (rows, count_rows), (columns, count_columns) = axes[0][i], axes[1][j]
        at = list(itertools.product(rows, columns))
        cells = np.array([x[(c, *a)] for a in at])
        flat = [a[0] * x.shape[2] + a[1] for a in at]
        out[c, i, j] = reduce(cells, flat, count_rows * count_columns)
    return out


LAYERS = {
    "max": (max_pool, {}, lambda cells, flat, count: cells.max()),
    "min": (min_pool, {}, lambda cells, flat, count: cells.min()),
    "sum": (sum_pool, {}, lambda cells, flat, count: cells.sum()),
    "avg": (avg_pool, {}, lambda cells, flat, count: cells.sum() / count),
    "avg without padding": (
        avg_pool,
        {"count_include_pad": False},
        lambda cells, flat, count: cells.mean(),
    ),
    "avg by a divisor": (
        avg_pool,
        {"divisor_override": 7},
        lambda cells, flat, count: cells.sum() / 7,
    ),
    "lp": (lp_pool, {"norm_type": 2}, lambda cells, flat, count: np.sqrt((cells**2).sum())),
    "lp 4": (lp_pool, {"norm_type": 4}, lambda cells, flat, count: (cells**4).sum() ** 0.25),
    "logsumexp": (logsumexp_pool, {}, lambda cells, flat, count: np.log(np.exp(cells).sum())),
}
GEOMETRIES = [
    # kernel, stride, pad, dilation
    (2, None, 0, 1),
    (3, 2, 1, 1),
    (3, 1, 1, 2),
    (2, 3, 0, 1),
    (1, 2, 0, 1),
    (4, 3, 2, 1),
]


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("ceil", [False, True])
def test_layers_follow_torchs_rule(name, ceil):
    layer, options, reduce = LAYERS[name]
    rng = np.random.default_rng(0)
    for (kernel, stride, pad, dilation), shape in zip(
        GEOMETRIES, [(2, 6, 7), (1, 5, 8), (2, 7, 6), (1, 4, 6), (2, 6, 7), (1, 7, 9)]
    ):
        x = rng.normal(size=shape)
        args = {"kernel_size": (kernel, kernel), "stride": stride and (stride, stride)}
        args |= {"padding": pad, "dilation": dilation, "ceil_mode": ceil, **options}
        f = lambda x, args=args: layer(x, **args)
        plain = lambda x, g=(kernel, stride or kernel, pad, dilation): pooled(x, *g, ceil, reduce)
        want = plain(x)
        np.testing.assert_allclose(f(x), want, rtol=1e-12)
    last = layer(np.moveaxis(x, 0, -1), channels="last", **args)
    np.testing.assert_allclose(np.moveaxis(last, -1, 0), want, rtol=1e-12)
    batch = layer(np.stack([x, 2 * x]), **args)
    np.testing.assert_allclose(batch[0], want, rtol=1e-12)
    dx, ct = rng.normal(size=x.shape), rng.normal(size=want.shape)
    gradient = jax.jit(jax.grad(lambda x: jnp.vdot(ct, f(x))))(x)
    expected = np.vdot(ct, first(lambda x: plain(x), [x], [dx]))
    np.testing.assert_allclose(np.vdot(gradient, dx), expected, rtol=1e-6)


@pytest.mark.parametrize(("layer", "pick"), [(max_pool, np.argmax), (min_pool, np.argmin)])
def test_indices(layer, pick):
    """The flat index in the plane, the first of equal elements."""
    x = np.random.default_rng(0).integers(0, 4, (2, 6, 7)).astype(float)
    for kernel, stride, pad, dilation in GEOMETRIES:
        stride = stride or kernel
        values, indices = layer(x, (kernel,) * 2, stride, pad, dilation, return_indices=True)
        want = pooled(
            x, kernel, stride, pad, dilation, False, lambda cells, flat, _: flat[pick(cells)]
        )
        np.testing.assert_array_equal(indices, want)
        flat = x.reshape(2, -1)
        taken = np.take_along_axis(flat, np.asarray(indices).reshape(2, -1), 1)
        np.testing.assert_array_equal(taken.reshape(values.shape), values)
    gradient = jax.grad(lambda x: layer(x, (2, 2), return_indices=True)[0].sum())(x)
    np.testing.assert_array_equal(gradient, jax.grad(lambda x: layer(x, (2, 2)).sum())(x))


def test_indices_with_nan_and_minus_infinity():
    x = jnp.array([[1.0, jnp.nan, 3.0, -jnp.inf, -jnp.inf, jnp.nan]])
    values, indices = max_pool(x, (2,), return_indices=True)
    np.testing.assert_array_equal(indices, [[1, 2, 5]])
    np.testing.assert_array_equal(jnp.isnan(values), [[True, False, True]])
    assert max_pool(x[:, 3:5], (2,), return_indices=True)[1][0, 0] == 0


@pytest.mark.parametrize(
    ("sizes", "outputs"), [((5, 7), (2, 3)), ((6, 4), (3, 2)), ((3, 5), (5, 7))]
)
def test_adaptive(sizes, outputs):
    x = np.random.default_rng(0).normal(size=(2, *sizes))
    bounds = [
        [(i * n // m, -(-(i + 1) * n // m)) for i in range(m)] for n, m in zip(sizes, outputs)
    ]
    slices = lambda c, i, j: x[(c, slice(*bounds[0][i]), slice(*bounds[1][j]))]
    grid = list(itertools.product(range(2), range(outputs[0]), range(outputs[1])))
    shape = (2, *outputs)
    want_max = np.array([slices(*g).max() for g in grid]).reshape(shape)
    want_avg = np.array([slices(*g).mean() for g in grid]).reshape(shape)
    values, indices = adaptive_max_pool(x, outputs, return_indices=True)
    np.testing.assert_array_equal(values, want_max)
    np.testing.assert_array_equal(
        np.take_along_axis(x.reshape(2, -1), indices.reshape(2, -1), 1).reshape(shape), want_max
    )
    np.testing.assert_allclose(adaptive_avg_pool(x, outputs), want_avg, rtol=1e-12)
    last = adaptive_avg_pool(np.moveaxis(x, 0, -1), outputs, channels="last")
    np.testing.assert_allclose(np.moveaxis(last, -1, 0), want_avg, rtol=1e-12)
    total = jax.jit(jax.grad(lambda x: adaptive_max_pool(x, outputs).sum()))(x)
    assert total.sum() == np.prod(shape)
    mean = jax.jit(jax.grad(lambda x: adaptive_avg_pool(x, outputs).sum()))(x)
    np.testing.assert_allclose(mean.sum(), np.prod(shape), rtol=1e-12)


def test_adaptive_keeps_an_axis_and_infinities_apart():
    x = jnp.array([[[1.0, jnp.inf, 2.0], [3.0, 4.0, 5.0]]])
    got = adaptive_avg_pool(x, (1, None))
    np.testing.assert_array_equal(got, [[[2.0, jnp.inf, 3.5]]])
    all_low = jnp.full((1, 5), -jnp.inf)
    gradient = jax.grad(lambda x: adaptive_max_pool(x, (2,))[0, 0])(all_low)
    np.testing.assert_array_equal(gradient, [[1, 0, 0, 0, 0]])


def test_second_derivatives_and_ties():
    x = jnp.array([[2.0, 2.0, 1.0]])
    f = lambda ties: lambda x: (max_pool(x, (2,), 1, ties=ties) ** 2).sum()
    np.testing.assert_array_equal(jax.grad(f("first"))(x), [[4.0, 4.0, 0.0]])
    np.testing.assert_array_equal(jax.grad(f("split"))(x), [[2.0, 6.0, 0.0]])
    np.testing.assert_array_equal(
        jax.hessian(f("split"))(x)[0, :, 0], [[0.5, 0.5, 0.0], [0.5, 2.5, 0.0], [0.0, 0.0, 0.0]]
    )


def test_lp_pool_has_derivative_zero_at_zero():
    f = lambda x: lp_pool(x, 2, (2,)).sum()
    for derivative in (jax.grad(f), jax.hessian(f)):
        np.testing.assert_array_equal(derivative(jnp.zeros((1, 4))), 0.0)
    x = jnp.array([[1.0, -2.0, 3.0, 4.0]])
    np.testing.assert_array_equal(lp_pool(x, 1, (2,)), sum_pool(x, (2,)))
    np.testing.assert_array_equal(lp_pool(x, math.inf, (2,)), max_pool(x, (2,)))
    np.testing.assert_allclose(lp_pool(x, 2.5, (2,))[0, 1], (3**2.5 + 4**2.5) ** 0.4)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_averages_of_sixteen_bit_numbers(dtype):
    """The sum of 1,024 times 300 is beyond float16; its mean is not."""
    x = jnp.full((1, 1024), 300, dtype)
    got = avg_pool(x, (1024,))
    assert got.dtype == dtype
    assert got[0, 0] == 300
    assert adaptive_avg_pool(x, (1,))[0, 0] == 300
    assert lp_pool(x, 2, (4,)).dtype == dtype


def test_integers():
    x = jnp.array([[3, 1, 2, 7]], jnp.int8)
    np.testing.assert_array_equal(max_pool(x, (2,)), [[3, 7]])
    np.testing.assert_array_equal(min_pool(x, (2,), return_indices=True)[1], [[1, 2]])
    np.testing.assert_array_equal(sum_pool(x, (2,)), [[4, 9]])
    with pytest.raises(TypeError, match="avg_pool: x must be of a floating dtype, got int8"):
        avg_pool(x, (2,))


def test_an_integer_kernel_means_all_axes_but_batch_and_channels():
    x = jnp.arange(64.0).reshape(1, 1, 8, 8)
    assert max_pool(x, 2).shape == (1, 1, 4, 4)
    assert max_pool(x[0], 2).shape == (1, 8, 4)
    np.testing.assert_array_equal(max_pool(x, 2), max_pool(x[0], (2, 2))[None])


@pytest.mark.parametrize("padding", ["VALID", "SAME", "SAME_LOWER"])
def test_padding_by_name_is_that_of_lax(padding):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 6)))
    want = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 3), (1, 2, 2), padding)
    np.testing.assert_array_equal(max_pool(x, (2, 3), 2, padding), want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: max_pool(x, (0, 2)), "max_pool: kernel_size must be positive"),
        (lambda x: max_pool(x, (2, 2, 2)), "max_pool: x of shape .* has 3 axes"),
        (lambda x: max_pool(x, (2, 2), (1,)), "max_pool: stride has 1 entries"),
        (lambda x: max_pool(x, (2.5, 2)), "max_pool: kernel_size must be an integer"),
        (lambda x: sum_pool(x, (9, 2)), "sum_pool: kernel_size .* spans more than"),
        (lambda x: sum_pool(x, (2, 2), padding=2), "sum_pool: padding .* leaves a window without"),
        (lambda x: sum_pool(x, (2, 2), padding=-1), "sum_pool: padding must not be negative"),
        (lambda x: sum_pool(x, (2, 2), padding="EVEN"), "sum_pool: padding 'EVEN' is unknown"),
        (lambda x: sum_pool(x, (2, 2), padding=((1, 1),)), "sum_pool: padding has 1 entries"),
        (lambda x: sum_pool(x, (2, 2), channels="NCHW"), "sum_pool: channels must be"),
        (lambda x: lp_pool(x, 0.5, (2, 2)), "lp_pool: norm_type must be"),
        (lambda x: avg_pool(x, (2, 2), divisor_override=0), "avg_pool: divisor_override"),
        (lambda x: adaptive_avg_pool(x, (0, 2)), "adaptive_avg_pool: output_size"),
        (lambda x: max_pool(x + 0j, (2, 2)), "real numbers, got complex128"),
        (lambda x: max_pool(x, (2, 2), ties="last"), "ties must be"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(jnp.ones((1, 5, 6)))
