"""The ``julia`` fixture: tests that ask for it run where a Julia is found, and say why not elsewhere."""

import os
import subprocess
import sys

import pytest


def why_no_julia():
    """One line, or None where there is a Julia."""
    from pybridge.julia import find
    from pybridge.julia.errors import JuliaNotFoundError

    try:
        find.find()
    except JuliaNotFoundError as error:
        return str(error).splitlines()[0].rstrip(".")
    return None


@pytest.fixture(scope="session")
def julia():
    """The running Julia."""
    reason = why_no_julia()
    if reason:
        pytest.skip(f"needs Julia: {reason}")
    from pybridge.julia.runtime import runtime

    return runtime()


@pytest.fixture(scope="session")
def julia_there():
    """There is a Julia for the processes that the test starts; this one does not start it."""
    reason = why_no_julia()
    if reason:
        pytest.skip(f"needs Julia: {reason}")


@pytest.fixture(params=["ffi", "callback"])
def border(request, monkeypatch, julia):
    """Both ways in: XLA's FFI and ``jax.pure_callback``."""
    monkeypatch.setenv("PYBRIDGE_BORDER", request.param)
    return request.param


def run_python(code, *, env=None, timeout=120, check=True):
    """Run ``code`` in a fresh Python; the completed process, its output as text."""
    # A test run in the background ignores SIGINT, and its children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    done = subprocess.run(
        [sys.executable, "-c", heard + code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check and done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
