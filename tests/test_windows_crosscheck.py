"""The Python side of the crosscheck against the loop, and against values recorded from Julia."""

import json
import pathlib

import numpy as np
import pytest

from pybridge.crosscheck import windows

RECORDED = np.load(pathlib.Path(__file__).parent / "recorded" / "windows.npz")
ABOUT = json.loads(str(RECORDED["about"]))


# Every second of the recorded cases: `pybridge crosscheck` compares 200 with a live Julia.
@pytest.mark.parametrize("i", range(0, ABOUT["count"], 2))
def test_agrees_with_what_julia_computed(i):
    case = windows.cases(ABOUT["count"], ABOUT["seed"])[i]
    ours = windows.python_side(case)
    for name in windows.REDUCERS:
        for quantity, got in zip(windows.QUANTITIES, ours[name]):
            want = RECORDED[f"{i}/{name}/{quantity}"]
            np.testing.assert_allclose(
                got, want, rtol=1e-12, atol=1e-12, err_msg=f"{name} {quantity}"
            )


def test_the_record_says_where_it_comes_from():
    assert {"julia", "packages", "jax"} <= ABOUT["provenance"].keys()


def test_without_julia_the_loop_is_the_reference():
    rows = windows.run(None, cases=2, seed=1)
    assert {row["quantity"] for row in rows} == set(windows.QUANTITIES)
    assert {row["name"].split(",")[0] for row in rows} == {
        f"reduce_window {name}" for name in windows.REDUCERS
    }
    for row in rows:
        assert row["error"] <= row["tolerance"], row


def test_a_wrong_value_makes_a_row_fail(monkeypatch):
    wrong = windows.Reducer(windows.lax.add, "+", lambda a, b: a - b)
    monkeypatch.setattr(windows, "REDUCERS", {"add": wrong})
    rows = windows.run(None, cases=3)
    failed = [row for row in rows if not row["error"] <= row["tolerance"]]
    assert "value" in {row["quantity"] for row in failed}
    assert all("worst at shape" in row["name"] for row in failed)
