"""Fixtures that more than one test file needs."""

import jax
import pytest

pytest_plugins = ["julia_fixture"]


@pytest.fixture
def x64():
    """Run the test with jax's 64-bit types on."""
    with jax.enable_x64(True):
        yield
