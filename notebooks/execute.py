"""Execute the notebooks: the tests' way to run them, and how the documentation's figures are made.

    python notebooks/execute.py [--engine julia] [NAME ...]     writes docs/figures/NAME.png

A notebook is a jupytext file in the percent format. Its last output is a dict of numbers, and it
draws one figure. ``engine`` is set in the cell that is tagged "parameters".
"""

import argparse
import ast
import base64
import dataclasses
import pathlib
import time

import jupytext
import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).resolve().parent
FIGURES = FOLDER.parent / "docs" / "figures"
NAMES = ("forces", "burgers", "solver")


@dataclasses.dataclass(frozen=True)
class Executed:
    """``numbers``: the last cell's dict. ``figure``: PNG. ``text``: what was printed."""

    numbers: dict
    figure: bytes
    text: str
    seconds: float


def execute(name, engine="jax") -> Executed:
    """Run the notebook in a kernel of its own; an error in a cell is raised with its traceback."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    at = [i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", ())]
    notebook.cells.insert(at[0] + 1, nbformat.v4.new_code_cell(f"engine = {engine!r}"))
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    start = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - start
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    pictures = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
    if len(pictures) != 1:
        raise ValueError(f"{name}: one figure is expected; it drew {len(pictures)}")
    numbers = ast.literal_eval(notebook.cells[-1].outputs[-1].data["text/plain"])
    text = "".join(out.text for out in outputs if out.output_type == "stream")
    return Executed(numbers, base64.b64decode(pictures[0]), text, seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["jax", "julia"], default="jax")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    given = parser.parse_args()
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name in given.names or NAMES:
        done = execute(name, given.engine)
        (FIGURES / f"{name}.png").write_bytes(done.figure)
        print(f"== {name}: {done.seconds:.0f} s\n{done.text}{done.numbers}")


if __name__ == "__main__":
    main()
