"""The crosscheck: the JAX side against differences and against recorded Julia values everywhere, the
two engines against each other where there is a Julia."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from pybridge import crosscheck
from pybridge.crosscheck import functions, live

RECORDED = pathlib.Path(__file__).parent / "recorded"


def assert_ok(rows):
    assert rows
    bad = [row for row in rows if not row.ok]
    assert not bad, bad


def test_there_are_enough_cases():
    assert len(functions.CASES) >= 15
    assert len({case.name for case in functions.CASES}) == len(functions.CASES)


@pytest.mark.parametrize("case", functions.CASES, ids=lambda case: case.name)
def test_jax_against_central_differences(case):
    assert_ok(functions.run(None, [case]))


def test_jax_against_values_recorded_from_julia():
    rows = functions.compare_recorded(RECORDED / "functions.json")
    assert len(rows) == len(functions.CASES) * len(functions.QUANTITIES)
    assert_ok(rows)


@pytest.mark.parametrize("case", functions.CASES, ids=lambda case: case.name)
def test_both_engines(case, julia):
    rows = functions.run(live.live_julia()[0], [case])
    assert {row.tolerance for row in rows} == set(functions.TOLERANCE.values())
    assert_ok(rows)


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0], [2.0], 0.5),
        ([np.nan], [1.0], np.nan),
        ([1.0], [1.0, 2.0], np.inf),
        ([np.ones(2)], [np.ones(3)], np.inf),
    ],
)
def test_relative_error(got, want, error):
    np.testing.assert_equal(crosscheck.relative_error(got, want), error)
    assert not crosscheck.Row("a", "b", np.nan, 1.0).ok


def test_a_wrong_derivative_is_found(x64):
    """The comparison can fail: a Julia side that is off by one per cent is over every tolerance."""

    class Wrong:
        def function(self, code, **_):
            return lambda x, ps: 1.01 * case.python(x, ps)

    case = functions.Case("square", lambda x, ps: jnp.sum(ps * x**2), "", np.ones(2), 2.0)
    rows = functions.run(Wrong(), [case])
    assert all(row.ok for row in rows if row.quantity.endswith("(jax, differences)"))
    assert not any(row.ok for row in rows if not row.quantity.endswith("(jax, differences)"))


def test_unknown_suite_is_named():
    with pytest.raises(ValueError, match=r"only='poems'.*functions, windows, loops"):
        crosscheck.run("poems")
