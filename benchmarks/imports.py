"""`import pybridge` over `import jax`: fresh processes in turn, medians of their own clocks."""

import statistics
import subprocess
import sys

CODE = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def seconds(module):
    command = [sys.executable, "-c", CODE.format(module)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    rounds = [(seconds("jax"), seconds("pybridge, jax")) for _ in range(9)]
    jax, ours = (statistics.median(times) for times in zip(*rounds))
    print(f"import jax {jax:.2f} s, import pybridge and jax {ours:.2f} s, ratio {ours / jax:.2f}")
