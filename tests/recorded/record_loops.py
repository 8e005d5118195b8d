"""Write what Julia computes for the loops of the crosscheck to loops.json beside this script.

    python tests/recorded/record_loops.py

Run it on a machine with a Julia (``pybridge doctor --engine julia``); machines without one test the
Python side against these values.
"""

import json
import pathlib
import sys

from record import provenance

from pybridge.crosscheck import live, loops


def main():
    julia, why = live.live_julia()
    if julia is None:
        sys.exit(why)
    cases = loops.record(julia)
    path = pathlib.Path(__file__).parent / "loops.json"
    path.write_text(json.dumps({"from": provenance(julia), "cases": cases}, indent=1) + "\n")
    print(f"{path.name}: {len(cases)} cases")


if __name__ == "__main__":
    main()
