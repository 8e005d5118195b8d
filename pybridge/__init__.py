"""pybridge: nested derivatives across JAX and Julia.

The public names, and nothing else. Each is imported from the module that holds it on first use, so
``import pybridge`` costs little more than ``import jax`` and starts no Julia.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "nested": (
        "nested_grad",
        "nested_value_and_grad",
        "hvp",
        "mixed_vjp",
        "nested_jacobian",
        "laplacian",
        "custom_vjp",
    ),
    "closures": ("unwrap",),
    "engines.julia": ("julia_function",),
    "julia.errors": ("JuliaError", "JuliaNotFoundError", "julia_errors"),
    "lux": ("LuxModel",),
    "windows": ("reduce_window",),
    "pooling": (
        "adaptive_avg_pool",
        "adaptive_max_pool",
        "avg_pool",
        "logsumexp_pool",
        "lp_pool",
        "max_pool",
        "min_pool",
        "sum_pool",
    ),
    "loops": ("bounded_fori_loop", "bounded_scan_until", "bounded_while_loop"),
    "harvest": ("nest", "plant", "reap", "sow"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
_SUBMODULES = ("closures", "crosscheck", "engines", "harvest", "jets", "loops", "nested", "windows")

__all__ = sorted(_MODULE)


def __getattr__(name):
    if name in _MODULE:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_MODULE, *_SUBMODULES})
