"""The command ``pybridge``: a thin face over functions that Python users can call too."""

import contextlib
import dataclasses
import json
import pathlib
import runpy
import sys
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Nested derivatives across JAX and Julia.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root():
    pass


@app.command()
def demo(
    engine: Annotated[
        Literal["jax", "julia"],
        typer.Option(help="jax trains both models; julia compares the engines step by step."),
    ] = "jax",
    out: Annotated[pathlib.Path, typer.Option(help="Where the figure goes.")] = pathlib.Path(
        "pybridge-demo.png"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Models to average over.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Training steps a model.")] = 1000,
    strength: Annotated[float, typer.Option(min=0.0, help="Weight of the penalty.")] = 1.0,
):
    """Train on real images with double backpropagation, print a table, write a figure."""
    try:
        import matplotlib  # noqa: F401
        import optax  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        typer.echo(f"The demo needs {error.name}: pip install 'pybridge-julia[demo]'", err=True)
        raise typer.Exit(1) from None
    from pybridge import demo as module

    if not out.absolute().parent.is_dir():
        typer.echo(f"--out {out}: the folder {out.parent} does not exist.", err=True)
        raise typer.Exit(2)
    with _julia_errors():
        module.run(engine=engine, out=str(out), seeds=seeds, steps=steps, strength=strength)


@app.command()
def doctor(
    engine: Annotated[
        Literal["jax", "julia"], typer.Option(help="The engine that has to be well.")
    ] = "jax",
):
    """Say what is there, where it was found, and what is wrong with it."""
    from pybridge.doctor import doctor as run

    raise typer.Exit(run(engine=engine))


@app.command()
def setup(
    julia: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="A Julia executable of yours. Without --project the packages are downloaded into a "
            "project of pybridge's own."
        ),
    ] = None,
    project: Annotated[
        pathlib.Path | None,
        typer.Option(help="A Julia environment with the packages, to record with it."),
    ] = None,
):
    """Install what the Julia engine needs, or record a Julia that is there."""
    from pybridge.setup import setup as run

    raise typer.Exit(run(julia=julia, project=project))


@app.command()
def crosscheck(
    only: Annotated[
        Literal["functions", "windows", "loops"] | None, typer.Option(help="One suite alone.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON.")] = False,
):
    """Compute the same on both sides and compare; exit code 1 where they differ."""
    from rich.console import Console

    from pybridge import crosscheck as module
    from pybridge.crosscheck.live import live_julia

    julia, why = live_julia()
    rows = module.run(only, julia)
    bad = [row for row in rows if not row.ok]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "julia": why if julia is None else julia.version,
                    "rows": [{**dataclasses.asdict(row), "ok": row.ok} for row in rows],
                }
            )
        )
    else:
        module.print_table(rows, Console())
        side = f"Julia {julia.version}" if julia is not None else f"no Julia side: {why}"
        typer.echo(f"{len(rows) - len(bad)} of {len(rows)} comparisons within tolerance ({side})")
    raise typer.Exit(1 if bad else 0)


@app.command()
def bench(name: Annotated[str | None, typer.Argument(help="Which one; none lists them.")] = None):
    """Run one of the repository's benchmarks: ratios, both sides in one run."""
    folder = pathlib.Path(__file__).parent.parent / "benchmarks"
    scripts = {script.stem: script for script in sorted(folder.glob("*.py"))}
    if not scripts:
        typer.echo("The benchmarks are in the repository, not in the installed package.", err=True)
        raise typer.Exit(1)
    if name is None:
        typer.echo("\n".join(scripts))
        return
    if name not in scripts:
        typer.echo(f"no benchmark {name!r}; there are: {', '.join(scripts)}", err=True)
        raise typer.Exit(2)
    sys.argv = [str(scripts[name])]
    runpy.run_path(str(scripts[name]), run_name="__main__")


@contextlib.contextmanager
def _julia_errors():
    from pybridge.julia.errors import JuliaError, JuliaNotFoundError

    try:
        yield
    except (JuliaError, JuliaNotFoundError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def main():
    app()


if __name__ == "__main__":
    main()
