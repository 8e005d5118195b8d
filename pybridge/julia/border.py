"""How a compiled program reaches Julia: XLA's typed FFI, or ``jax.pure_callback`` where it cannot."""

import ctypes
import functools
import os
import re
import warnings
from pathlib import Path

import jax
import jax.extend.backend
import numpy as np

from pybridge.julia.runtime import runtime

TARGET = "pybridge_julia"
#: Major version of ``xla/ffi/api/c_api.h`` that julia/ext/border/frame.jl is written for.
API_MAJOR = 0


def path() -> str:
    """``"ffi"`` or ``"callback"``: which way programs compiled from now on take.

    ``PYBRIDGE_BORDER=callback`` forces the callback.
    """
    wanted = os.environ.get("PYBRIDGE_BORDER", "ffi")
    if wanted not in ("ffi", "callback"):
        raise ValueError(f"PYBRIDGE_BORDER is {wanted!r}; accepted are 'ffi' and 'callback'")
    if wanted == "callback" or jax.default_backend() != "cpu" or not _registered():
        return "callback"
    return "ffi"


@functools.cache
def _registered() -> bool:
    major = _header_major()
    try:
        if major not in (None, API_MAJOR):
            raise RuntimeError(f"jaxlib's FFI has major version {major}")
        capsule = jax.ffi.pycapsule(runtime().handler)
        jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
    except Exception as error:
        warnings.warn(
            f"jaxlib's FFI does not take Julia's handler, written for version {API_MAJOR} "
            f"({error}). Calls go through jax.pure_callback, at about a hundred times the cost each.",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _outlive_forks():
    os.register_at_fork(after_in_child=_keep_clients)


def _keep_clients():
    # The end of a forked child destroys JAX's clients, which wait for threads that the child does
    # not have: a segmentation fault, with or without Julia. A reference more, and they stay.
    for client in jax.extend.backend.backends().values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


def _header_major() -> int | None:
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        found = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", header.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def call(plan: int, operands, ranks, structs, result_ranks, axes: str):
    """Run a plan inside a traced program.

    Args:
      plan: its number in Julia.
      operands: traced arrays, batched axes first.
      ranks: the rank of one sample of each.
      structs: a ShapeDtypeStruct a result.
      result_ranks: the rank of one sample of each.
      axes: ``"index"``: Julia gets each sample column-major, so that ``x[i, j]`` here is
        ``x[i + 1, j + 1]`` there; ``"reversed"``: the same memory, with reversed dimensions.
    """
    if not structs:
        return []
    _outlive_forks()
    layouts = [_layout(x.ndim, rank, axes) for x, rank in zip(operands, ranks)]
    result_layouts = [_layout(len(s.shape), rank, axes) for s, rank in zip(structs, result_ranks)]
    if path() == "ffi":
        call = jax.ffi.ffi_call(
            TARGET, structs, input_layouts=layouts, output_layouts=result_layouts
        )
        return call(*operands, plan=np.int64(plan))
    host = functools.partial(_host, plan, layouts, structs, result_layouts)
    return jax.pure_callback(host, structs, *operands, vmap_method="sequential")


def _layout(rank, sample, axes):
    # Major to minor: levels slowest, then the sample's own axes.
    own = range(rank - sample, rank)
    return (*range(rank - sample), *(own if axes == "reversed" else reversed(own)))


class _Report(Exception):
    """Carries Julia's report through JAX's traceback text, where errors.py finds it again."""


def _host(plan, layouts, structs, result_layouts, *operands):
    inputs = [
        np.ascontiguousarray(np.asarray(x).transpose(layout))
        for x, layout in zip(operands, layouts)
    ]
    outputs = [
        np.empty([s.shape[axis] for axis in layout], s.dtype)
        for s, layout in zip(structs, result_layouts)
    ]
    report = runtime().run(plan, inputs, outputs)
    if report:
        raise _Report(report)
    return [out.transpose(np.argsort(layout)) for out, layout in zip(outputs, result_layouts)]
