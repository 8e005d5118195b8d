"""Fixtures that more than one test file needs."""

import jax
import pytest

pytest_plugins = ["julia_fixture"]


@pytest.fixture
def unoptimized():
    """Compile without LLVM's optimizations: for tests whose programs run once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def x64():
    """Run the test with jax's 64-bit types on."""
    with jax.enable_x64(True):
        yield
