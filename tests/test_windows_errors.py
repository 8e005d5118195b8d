"""Bad input to reduce_window: an error at once that names the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pybridge import reduce_window

X = jnp.ones((4, 5))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: reduce_window(X, 0.0, lax.add, (2, 2, 2)), ValueError, "window_dimensions has 3"),
        (lambda: reduce_window(X, 0.0, lax.add, (2,)), ValueError, "window_dimensions has 1"),
        (lambda: reduce_window(X, 0.0, lax.add, (0, 2)), ValueError, "window_dimensions must be"),
        (lambda: reduce_window(X, 0.0, lax.add, 2), TypeError, "window_dimensions must be a seq"),
        (lambda: reduce_window(X, 0.0, lax.add, (2.0, 2)), TypeError, "window_dimensions must"),
        (lambda: reduce_window(X, 0.0, lax.add, (2, 2), (0, 1)), ValueError, "window_strides must"),
        (lambda: reduce_window(X, 0.0, lax.add, (2, 2), (-1, 1)), ValueError, "window_strides"),
        (lambda: reduce_window(X, 0.0, lax.add, (2, 2), (1,)), ValueError, "window_strides has 1"),
        (
            lambda: reduce_window(X, 0.0, lax.add, (2, 2), None, "VALID", (0, 1)),
            ValueError,
            "base_dilation must be positive",
        ),
        (
            lambda: reduce_window(X, 0.0, lax.add, (2, 2), None, "VALID", None, (1, 0)),
            ValueError,
            "window_dilation must be positive",
        ),
        (
            lambda: reduce_window(X, 0.0, lax.add, (2, 2), None, [(0, 0)]),
            ValueError,
            "padding has 1 pairs",
        ),
        (
            lambda: reduce_window(X, 0.0, lax.add, (2, 2), None, [1, 1]),
            TypeError,
            "padding must be a string or one pair",
        ),
        (lambda: reduce_window(X, 0.0, lax.add, (2, 2), None, "FULL"), ValueError, "'FULL'"),
        (
            lambda: reduce_window(X, jnp.int32(1), lax.add, (2, 2)),
            TypeError,
            r"init_value has dtype int32 and operand has dtype float32.*jnp.asarray\(init_value",
        ),
        (
            lambda: reduce_window(jnp.arange(4), 0.5, lax.max, (2,)),
            TypeError,
            "init_value has dtype float32 and operand has dtype int32",
        ),
        (lambda: reduce_window(X, 1j, lax.add, (2, 2)), TypeError, "init_value has dtype complex"),
        (
            lambda: reduce_window(jnp.arange(4, dtype=jnp.uint8), 300, lax.add, (2,)),
            TypeError,
            "init_value 300 does not fit",
        ),
        (
            lambda: reduce_window(X, jnp.zeros(5), lax.add, (2, 2)),
            ValueError,
            r"init_value must be a scalar, got shape \(5,\)",
        ),
        (lambda: reduce_window((X, X), 0.0, lax.add, (2, 2)), TypeError, "init_value has the tree"),
        (
            lambda: reduce_window((X, X[1:]), (0.0, 0.0), lambda a, b: a, (2, 2)),
            ValueError,
            "operand has arrays of different shapes",
        ),
        (lambda: reduce_window((), (), lax.add, ()), ValueError, "operand has no arrays"),
        (lambda: reduce_window("abc", 0.0, lax.add, (1,)), TypeError, "operand must consist of"),
        (lambda: reduce_window(X, 0.0, None, (2, 2)), TypeError, "computation must be callable"),
        (
            lambda: reduce_window(X, 0.0, lambda a, b: (a, b), (2, 2)),
            TypeError,
            "computation returns the tree",
        ),
        (
            lambda: reduce_window(X, 0.0, lambda a, b: jnp.stack([a, b]), (2, 2)),
            TypeError,
            r"computation returns an array of shape \(2,\)",
        ),
        (
            lambda: reduce_window(X, 0.0, lambda a, b: a > b, (2, 2)),
            TypeError,
            "computation returns bool for two scalars of float32",
        ),
        (
            lambda: reduce_window(X, 0.0, lax.max, (2, 2), ties="last"),
            ValueError,
            "ties must be 'first' or 'split', got 'last'",
        ),
        (
            lambda: reduce_window(X, 0.0, lax.add, (2, 2), ties="split"),
            ValueError,
            "ties='split' applies to max and min only",
        ),
        (
            lambda: reduce_window(X, 0.0, lax.add, (2, 2), associative="yes"),
            ValueError,
            "associative must be",
        ),
    ],
)
def test_bad_input(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_dtypes_that_differ_under_x64(x64):
    x = jnp.ones(4, jnp.float32)
    with pytest.raises(TypeError, match="init_value has dtype float64 and operand has dtype"):
        reduce_window(x, np.ones(()), lax.add, (2,))
    with pytest.raises(TypeError, match=r"operand.astype\('float64'\)"):
        jax.jit(lambda i: reduce_window(x, i, lax.add, (2,)))(jnp.float64(0))
    assert jax.jit(lambda i: reduce_window(x, i, lax.add, (2,)))(0.0).dtype == jnp.float32


def test_errors_come_under_transformations_too():
    f = lambda x: reduce_window(x, jnp.int32(1), lax.add, (2,)).sum()
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TypeError, match="init_value has dtype int32"):
            transform(f)(jnp.ones((3, 4)) if transform is jax.vmap else jnp.ones(4))
