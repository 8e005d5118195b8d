"""Bounded loops on both sides: against a plain loop and values recorded from Julia everywhere, and
against Julia itself where there is one."""

import pathlib

import numpy as np
import pytest

from pybridge.crosscheck import live, loops

RECORDED = pathlib.Path(__file__).parent / "recorded" / "loops.json"


def assert_ok(rows):
    bad = [row for row in rows if not row["error"] <= row["tolerance"]]
    assert len(rows) % len(loops.QUANTITIES) == 0
    assert rows
    assert not bad, bad


@pytest.mark.parametrize("case", loops.CASES, ids=lambda case: case.name)
def test_against_a_plain_loop_and_differences(case):
    assert_ok(loops.run(None, cases=[case]))


def test_against_values_recorded_from_julia():
    rows = loops.compare_recorded(RECORDED)
    assert len(rows) == len(loops.CASES) * len(loops.QUANTITIES)
    assert_ok(rows)


@pytest.mark.parametrize("case", loops.CASES, ids=lambda case: case.name)
def test_against_julia(case, julia):
    assert_ok(loops.run(live.live_julia()[0], cases=[case]))


def test_a_wrong_twin_is_found():
    class Wrong:
        def call(self, name, *args):
            del args
            case = next(c for c in loops.CASES if c.name == name)
            return [1.01 * np.asarray(v) for v in loops.python_side(case)]

    rows = loops.run(Wrong(), cases=loops.CASES[:1])
    assert all(row["error"] > row["tolerance"] for row in rows)
