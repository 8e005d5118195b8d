"""``pybridge doctor``: what is there, where it was found, and what is wrong."""

import dataclasses
import faulthandler
import importlib.metadata
import os
import platform
import sys
import time
import tomllib
from pathlib import Path

from pybridge.julia import find
from pybridge.julia.errors import JuliaNotFoundError
from pybridge.setup import julia_package


@dataclasses.dataclass
class Report:
    """``facts``: (what, value) pairs. ``problems``: (what is wrong, remedy) pairs. ``julia``: whether
    a fit Julia was found."""

    facts: list = dataclasses.field(default_factory=list)
    problems: list = dataclasses.field(default_factory=list)
    julia: bool = False

    def fact(self, what, value):
        self.facts.append((what, str(value)))

    def problem(self, what, remedy):
        self.problems.append((what, remedy))


def doctor(engine="jax", console=None) -> int:
    """Print versions, where each came from, a round trip and its time, and remedies.

    Args:
      engine: ``"jax"`` or ``"julia"``: what must work for exit code 0. With ``"jax"`` a Julia is
        looked for but not started.
      console: a ``rich.console.Console``.

    Returns:
      0 if all is well for that engine, else 1.
    """
    if engine not in ("jax", "julia"):
        raise ValueError(f"engine is {engine!r}; accepted are 'jax' and 'julia'")
    if console is None:
        from rich.console import Console

        console = Console()
    report = examine(engine)
    width = max(len(what) for what, _ in report.facts)
    for what, value in report.facts:
        console.print(f"{what:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)
    for what, remedy in report.problems:
        console.print(f"PROBLEM {what}: {remedy}", markup=False, highlight=False, soft_wrap=True)
    if not report.problems:
        console.print(f"all is well for the {engine} engine", markup=False, highlight=False)
    if engine == "jax":
        hint = "`pybridge doctor --engine julia` tries the Julia engine, which is found but was not started"
        if not report.julia:
            hint = "the Julia engine is not set up: `pybridge setup`; all but Julia functions works without"
        console.print(hint, markup=False, highlight=False, soft_wrap=True)
    return 1 if report.problems else 0


def examine(engine="jax") -> Report:
    """What ``doctor`` prints, as data."""
    report = Report()
    report.fact("Python", f"{platform.python_version()} at {sys.executable}")
    for name in ("jax", "jaxlib", "juliacall"):
        try:
            report.fact(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            report.fact(name, "not installed")
            if name != "juliacall" or engine == "julia":
                report.problem(f"{name} is not installed", f"pip install {name}")
    _round_trip(report, "jax engine", _try_jax)
    found = _look_for_julia(report, engine)
    report.julia = found is not None
    _threads_and_signals(report, engine)
    if engine == "julia" and found:
        _round_trip(report, "julia engine", _try_julia)
        _border(report)
    return report


def _look_for_julia(report, engine):
    try:
        found = find.find()
    except JuliaNotFoundError as error:
        first = str(error).splitlines()[0].rstrip(".")
        report.fact("Julia", first if not error.tried else "none")
        for reason in error.tried:
            report.fact("", reason)
        if engine == "julia":
            report.problem(first, "pybridge setup, or pybridge setup --julia EXE --project DIR")
        return None
    report.fact("Julia", f"{found.version} at {found.exe}, by {found.rule}")
    report.fact("Julia project", found.project)
    versions = package_versions(found.project)
    for name in ("PythonCall", "Zygote", "ForwardDiff", "Lux", "NestedGradients"):
        report.fact(f"  {name}", versions.get(name, "not installed"))
        if name in find.NEEDED and name not in versions and engine == "julia":
            report.problem(
                f"{found.project} lacks {name}",
                f"pybridge setup --julia {found.exe} --project {found.project} says how to add it",
            )
    _same_package(report, engine, versions.get("NestedGradients"))
    return found


def _same_package(report, engine, there):
    """The two halves of pybridge belong together: the project's Julia package is ours."""
    folder = julia_package()
    ours = tomllib.loads((folder / "Project.toml").read_text())["version"]
    if there is None:
        return
    version, _, path = there.partition(" from ")
    if version != ours and engine == "julia":
        report.problem(
            f"the project has NestedGradients {version}; this pybridge belongs to {ours}",
            f"in that project: using Pkg; Pkg.develop(path={str(folder)!r})".replace("'", '"'),
        )
    elif path and Path(path).resolve() != folder.resolve():
        report.fact("", f"a copy of its own; this pybridge's is at {folder}")


def package_versions(project) -> dict[str, str]:
    """Versions by the project's manifest."""
    for name in ("JuliaManifest.toml", "Manifest.toml"):
        path = Path(project) / name
        if path.is_file():
            manifest = tomllib.loads(path.read_text())
            return {
                package: entry[0].get("version", "no version")
                + (
                    f" from {(path.parent / entry[0]['path']).resolve()}"
                    if "path" in entry[0]
                    else ""
                )
                for package, entry in manifest.get("deps", manifest).items()
                if isinstance(entry, list)
            }
    return {}


def _threads_and_signals(report, engine):
    report.fact("Julia threads", f"{find.threads()} (JULIA_NUM_THREADS, two at least)")
    signals = find.option("handle-signals")
    report.fact("Julia's signal handlers", signals or "yes (set at start)")
    if signals == "no" and engine == "julia":
        report.problem(
            "PYTHON_JULIACALL_HANDLE_SIGNALS=no: only one thread may be in Julia at a time",
            "unset it",
        )
    report.fact("faulthandler", "on" if faulthandler.is_enabled() else "off")
    juliacall = sys.modules.get("juliacall")
    config = getattr(juliacall, "CONFIG", {})
    if config.get("inited") and config.get("opt_handle_signals") not in (True, "yes"):
        report.problem(
            "juliacall was started before pybridge, without Julia's signal handlers",
            "import pybridge and use a Julia function first, or set "
            "PYTHON_JULIACALL_HANDLE_SIGNALS=yes before Python starts",
        )
    if "torch" in sys.modules and juliacall is None:
        report.problem(
            "torch was imported before Julia started, which can crash (juliacall says so too)",
            "call a Julia function before importing torch",
        )


def _round_trip(report, what, attempt):
    try:
        start = time.perf_counter()
        again = attempt()
        first = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(100):
            again()
        each = (time.perf_counter() - start) / 100
        report.fact(what, f"works; first call {first:.1f} s, then {each * 1e6:.0f} us a call")
    except Exception as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        report.fact(what, "does not work")
        report.problem(f"{what}: {lines[0]}", lines[-1] if len(lines) > 1 else "see above")


def _try_jax():
    import jax
    import jax.numpy as jnp

    from pybridge import nested_grad

    loss = lambda x, ps: jnp.sum(jnp.tanh(ps * x))
    f = jax.jit(jax.grad(lambda ps: jnp.sum(nested_grad(loss, jnp.ones(3), ps) ** 2)))
    return _checked(f)


def _try_julia():
    import jax
    import jax.numpy as jnp

    from pybridge import julia_function, nested_grad

    loss = julia_function("(x, ps) -> sum(tanh.(ps .* x))", name="doctor")
    f = jax.jit(jax.grad(lambda ps: jnp.sum(nested_grad(loss, jnp.ones(3), ps) ** 2)))
    return _checked(f)


def _checked(f):
    import numpy as np

    # loss = sum(tanh(p x)): its gradient in x is p (1 - tanh^2 p) at x = 1, three times over.
    p = 0.5
    t = np.tanh(p)
    g, dg = p * (1 - t**2), (1 - t**2) * (1 - 2 * p * t)
    got = float(f(p))
    if not np.isclose(got, 3 * 2 * g * dg, rtol=1e-4):
        raise ArithmeticError(f"a mixed second derivative is {got}; right is {3 * 2 * g * dg}")
    return lambda: f(p).block_until_ready()


def _border(report):
    from pybridge.julia import border
    from pybridge.julia.runtime import runtime

    report.fact("border", border.path())
    if border.path() == "callback" and os.environ.get("PYBRIDGE_BORDER") != "callback":
        report.problem(
            "compiled programs reach Julia through jax.pure_callback",
            "use a jaxlib whose FFI has major version 0, on the CPU",
        )
    report.fact("Julia threads, running", runtime().ask("Threads.nthreads()"))
