"""Write what Julia's ``reduce_window`` computes on the crosscheck's first cases to windows.npz.

    python tests/recorded/record_windows.py

Run it on a machine with a Julia (``pybridge doctor --engine julia``); machines without one test the
Python side against these values. Beside them stand the versions they came from.
"""

import json
import pathlib
import sys

import numpy as np
from record import provenance

from pybridge.crosscheck import live, windows

COUNT, SEED = 8, 0


def main():
    julia, why = live.live_julia()
    if julia is None:
        sys.exit(why)
    found = {}
    for i, case in enumerate(windows.cases(COUNT, SEED)):
        for name in windows.REDUCERS:
            for quantity, values in zip(windows.QUANTITIES, windows.julia_side(julia, case, name)):
                found[f"{i}/{name}/{quantity}"] = values
    about = {"count": COUNT, "seed": SEED, "provenance": provenance(julia)}
    target = pathlib.Path(__file__).parent / "windows.npz"
    np.savez_compressed(target, about=json.dumps(about), **found)
    print(f"{target.name}: {len(found)} arrays, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
