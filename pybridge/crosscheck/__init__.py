"""The same work on both sides, compared and reported.

Three suites, each a module with its cases as data: ``functions`` (values and derivatives of first,
second and third order through ``nested_grad``), ``windows`` and ``loops`` (the two primitives and
their Julia twins). A suite's ``run(julia, ...)`` gives rows; ``julia`` is None where there is no
Julia, and then the Python side is held against plain loops and central differences alone.
"""

import dataclasses
import importlib

SUITES = ("functions", "windows", "loops")


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: ``error`` is the greatest relative difference, to be at most ``tolerance``."""

    name: str
    quantity: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def run(only=None, julia=None, **options) -> list[Row]:
    """The rows of every suite, or of the one named by ``only``.

    Args:
      only: "functions", "windows", "loops" or None for all.
      julia: a ``pybridge.crosscheck.Julia``, or None to leave the Julia side out.
      options: passed to the suite.

    Raises:
      ValueError: there is no such suite.
    """
    if only not in (None, *SUITES):
        raise ValueError(f"only={only!r}: the suites are {', '.join(SUITES)}.")
    rows = []
    for name in SUITES if only is None else (only,):
        suite = importlib.import_module(f"{__name__}.{name}")
        rows += [
            Row(**row) if isinstance(row, dict) else row for row in suite.run(julia, **options)
        ]
    return rows


def relative_error(got, want) -> float:
    """Greatest difference over the leaves, relative to the greatest magnitude wanted in the leaf."""
    import jax
    import numpy as np

    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    if len(got) != len(want) or any(np.shape(a) != np.shape(b) for a, b in zip(got, want)):
        return float("inf")
    errors = [
        np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0.0)
        / max(np.max(np.abs(np.asarray(b)), initial=0.0), 1e-3)
        for a, b in zip(got, want)
        if getattr(a, "dtype", None) != jax.dtypes.float0
    ]
    return float(np.max(errors, initial=0.0))


def print_table(rows, console) -> None:
    """One line a case: its greatest error a kind of quantity, red where one is over."""
    from rich.table import Table

    table = Table(title="crosscheck: greatest relative errors")
    for heading in ("case", "comparisons", "greatest error", "tolerance", ""):
        table.add_column(heading, justify="left" if heading in ("case", "") else "right")
    for (name, tolerance), group in _grouped(rows):
        worst = max(group, key=lambda row: (not row.ok, row.error))
        mark = "[green]ok[/]" if worst.ok else f"[red]{worst.quantity}[/]"
        table.add_row(name, str(len(group)), f"{worst.error:.1e}", f"{tolerance:.0e}", mark)
    console.print(table)


def _grouped(rows):
    groups = {}
    for row in rows:
        groups.setdefault((row.name, row.tolerance), []).append(row)
    return groups.items()
