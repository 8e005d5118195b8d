"""The command line, run as users run it."""

import json
import subprocess
import sys

import pytest


def pybridge(*args, cwd=None, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-m", "pybridge.cli", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def test_the_demo_trains_prints_a_table_and_writes_a_figure(tmp_path):
    done = pybridge("demo", "--seeds", "1", "--steps", "300", "--out", "figure.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (plain,) = [line for line in done.stdout.splitlines() if "plain" in line]
    (regularised,) = [line for line in done.stdout.splitlines() if "regularised" in line]
    clean, _, attacked = [float(cell.strip(" %")) for cell in plain.split("│")[2:5]]
    clean_r, _, attacked_r = [float(cell.strip(" %")) for cell in regularised.split("│")[2:5]]
    assert min(clean, clean_r) > 90
    assert attacked_r > attacked + 10  # what the penalty is for
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_refuses_a_folder_that_is_not_there():
    done = pybridge("demo", "--out", "nowhere/figure.png")
    assert done.returncode == 2
    assert "nowhere does not exist" in done.stderr


def test_crosscheck_prints_json_and_exits_by_its_rows():
    done = pybridge("crosscheck", "--only", "functions", "--json", PYBRIDGE_CROSSCHECK="jax")
    report = json.loads(done.stdout)
    assert done.returncode == (0 if all(row["ok"] for row in report["rows"]) else 1)
    assert len({row["name"] for row in report["rows"]}) >= 15


@pytest.mark.parametrize("args", [("crosscheck", "--only", "poems"), ("demo", "--engine", "torch")])
def test_unknown_words_are_named(args):
    done = pybridge(*args)
    assert done.returncode == 2
    assert args[-1] in done.stderr


def test_importing_pybridge_starts_no_julia():
    code = "import pybridge, sys; dir(pybridge); print('juliacall' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
