"""reduce_window against jax.lax.reduce_window: ratios of medians of interleaved runs.

    python benchmarks/windows.py [--quick] [--only NAME]

Both sides are timed in one run, turn by turn, so that whatever else the machine does falls on both.
A ratio below 1 means that pybridge is ahead.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from pybridge import reduce_window

SHAPES = [
    ((256, 256), (3, 3), (1, 1)),
    *(
        ((batch, channels, side, side), (1, 1, w, w), (1, 1, s, s))
        for batch, channels, side in ((8, 256, 28), (32, 64, 112))
        for w in (2, 3)
        for s in (1, 2)
    ),
]
IDENTITY = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min), "add": (0.0, lax.add)}
SMOOTH = lambda a, b: jnp.sqrt(a * a + b * b + 1.0)
LARGER = lambda a, b: jnp.where(b > a, b, a)


def medians(programs, args, seconds):
    """The median time of each program in milliseconds, run in turns for about ``seconds``."""
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in programs.items()}
    times = {name: [] for name in compiled}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(next(iter(times.values()))) < 5:
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(t[1:]) for name, t in times.items()}


def gradient(f, argnums=0):
    return jax.grad(lambda *args: jnp.sin(f(*args)).sum(), argnums)


def pooling(seconds, shapes):
    """The identity-init cases, a traced init, and user-defined reducers, on pooling shapes."""
    print("operand, window, stride            case                 lax ms   ours ms   ratio")
    for shape, window, strides in shapes:
        x = jax.random.normal(jax.random.PRNGKey(0), shape)
        init = jnp.float32(0.1)
        label = f"{'x'.join(map(str, shape)):16s} {max(window)}, {max(strides)}"
        for name, (identity, op) in IDENTITY.items():
            native = lambda x, init: lax.reduce_window(x, identity, op, window, strides, "VALID")
            ours = lambda x, init: reduce_window(x, identity, op, window, strides)
            _row(label, f"{name} value", native, ours, (x, init), seconds)
            _row(label, f"{name} gradient", gradient(native), gradient(ours), (x, init), seconds)
            if name != "max":
                continue
            base = gradient(native)
            for case, reducer in (
                ("max, traced init", op),
                ("user: where", LARGER),
                ("user: sqrt", SMOOTH),
            ):
                both = gradient(
                    lambda x, i, reducer=reducer: reduce_window(x, i, reducer, window, strides),
                    (0, 1),
                )
                _row(label, f"{case}, gradient", base, both, (x, init), seconds)


def _row(label, case, native, ours, args, seconds):
    t = medians({"lax": native, "ours": ours}, args, seconds)
    ratio = t["ours"] / t["lax"]
    print(f"{label:32s} {case:24s} {t['lax']:9.3f} {t['ours']:9.3f} {ratio:7.2f}", flush=True)


def running_sum(seconds):
    """A running sum with a traced init, n = 1e6: window 1,000 against window 10."""
    x, init = jnp.ones(1_000_000), jnp.float32(0.1)
    for name, op in (("add", lax.add), ("max", lax.max), ("logaddexp", jnp.logaddexp)):
        for kind, make in (("value", lambda f: f), ("gradient", lambda f: gradient(f, (0, 1)))):
            programs = {
                w: make(lambda x, i, w=w, op=op: reduce_window(x, i, op, (w,))) for w in (10, 1000)
            }
            t = medians(programs, (x, init), seconds)
            ratio = t[1000] / t[10]
            print(
                f"running {name}, {kind:9s} window 10: {t[10]:8.2f} ms, 1000: {t[1000]:8.2f} ms, "
                f"ratio {ratio:.2f}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small shapes only, short runs")
    parser.add_argument("--only", choices=("pooling", "running"))
    options = parser.parse_args()
    seconds = 0.3 if options.quick else 1.5
    shapes = SHAPES[:5] if options.quick else SHAPES
    if options.only != "running":
        pooling(seconds, shapes)
    if options.only != "pooling":
        running_sum(seconds)


if __name__ == "__main__":
    main()
