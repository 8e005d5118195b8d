"""Write what Julia computes to the JSON files beside this script, with the versions of everything.

    python tests/recorded/record.py functions

Run it on a machine with a Julia (``pybridge doctor --engine julia``); machines without one test the
JAX side against these values.
"""

import json
import pathlib
import platform
import sys

import jax
import jaxlib

from pybridge.crosscheck import functions, live

HERE = pathlib.Path(__file__).parent


def provenance(julia):
    """The versions that the values came from."""
    packages = julia.packages("NestedGradients", "Zygote", "ForwardDiff", "Lux", "PythonCall")
    return {
        "julia": julia.version,
        "packages": packages,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "machine": platform.machine(),
    }


def main(names):
    if names != ["functions"]:
        sys.exit("usage: record.py functions")
    julia, why = live.live_julia()
    if julia is None:
        sys.exit(why)
    cases = functions.record(julia)
    path = HERE / "functions.json"
    path.write_text(json.dumps({"from": provenance(julia), "cases": cases}, indent=1) + "\n")
    print(f"{path.name}: {len(cases)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
