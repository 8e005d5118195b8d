"""The worked examples, executed; each ends in numbers, and here is why they are what they are."""

import functools
import importlib.util
import pathlib

import pytest

for needed in ("jupytext", "nbclient", "ipykernel", "ase", "optax", "matplotlib"):
    pytest.importorskip(needed, reason=f"pip install 'pybridge-julia[notebooks]' ({needed})")

ROOT = pathlib.Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)

execute = functools.cache(notebooks.execute)


def engines():
    """Every notebook runs on JAX, and once more on Julia where there is one."""
    from pybridge.julia import find
    from pybridge.julia.errors import JuliaNotFoundError

    try:
        find.find()
    except JuliaNotFoundError:
        return ["jax"]
    return ["jax", "julia"]


on_every_engine = pytest.mark.parametrize("engine", engines())


def check_forces(numbers):
    # A model that knows nothing (no force at all) has 1. The potential is a function of sums over
    # neighbours' distances, as the model is, so little is left but the size of the data.
    assert numbers["force_error"] < 0.08
    # Never trained on: it follows from the forces alone, or the wrong thing was differentiated.
    assert numbers["energy_error"] < 0.03
    # Forces that are the gradient of the energy keep it up to the integrator's error, which for
    # velocity Verlet is of second order: half the time step, a quarter of the fluctuation. A force
    # that is not the gradient drifts, and no time step helps.
    assert numbers["fluctuation_over_exchanged"] < 1e-3
    for quotient in numbers["fluctuation_at_half_step"]:
        assert 3.3 < quotient < 4.7


@on_every_engine
def test_forces_from_energies(engine):
    check_forces(execute("forces", engine).numbers)


def check_burgers(numbers):
    # Network and exact solution know nothing of each other: only a network that satisfies the
    # equation, all its derivatives right, can come near Cole and Hopf's integral. The initial
    # condition alone, held for all times, is off by 58 %.
    assert numbers["error"] < 0.01
    # The same network in Lux, from the same parameters: two float64 programs of one computation,
    # whose rounding training has magnified for 50 steps.
    assert numbers.get("difference", 0) < 1e-4


@on_every_engine
def test_burgers_equation(engine):
    check_burgers(execute("burgers", engine).numbers)


def check_solver(numbers):
    # A converged solution forgets its path, so the gradient through the loop is the adjoint
    # method's, up to the tolerance of 1e-13 times the condition number (some hundreds).
    assert numbers["adjoint_difference"] < 1e-9
    # Chebyshev's cycle of eight takes a third of the best constant step's time on the linear part.
    # The cubic term lifts the smallest eigenvalues, which a learned cycle can use and Chebyshev's
    # does not know of; a wrong hyper-gradient gets nowhere near, or diverges up to the bound.
    steps = numbers["mean_steps"]
    assert steps["learned"] < steps["Chebyshev"] < steps["constant"] / 2


@on_every_engine
def test_learned_solver(engine):
    check_solver(execute("solver", engine).numbers)


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_rendered_figures_are_there_and_small(name):
    picture = ROOT / "docs" / "figures" / f"{name}.png"
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 100_000


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_notebooks_are_text_without_output(name):
    assert sorted(path.suffix for path in (ROOT / "notebooks").glob(f"{name}.*")) == [".py"]
