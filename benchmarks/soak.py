"""Everything at once, for a minute: ``python benchmarks/soak.py --threads 16 --seconds 60``.

Python threads call jitted functions whose Julia code allocates, differentiate, call juliacall
itself and ``jax.pure_callback``, while Julia collects from both sides. Then memory: many small calls
and some large ones. Exit code 0 when nothing hung, nothing was wrong and memory did not grow.
"""

import argparse
import os
import statistics
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from pybridge import julia_function
from pybridge.julia.runtime import lock, runtime


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(threads, seconds):
    julia = runtime()
    jl = julia.juliacall.Main
    plain = jl.seval("x -> sum([x + i for i in 1:100])")
    f = jax.jit(
        julia_function(
            "x -> (y = [sum(x .+ i) for i in 1:50]; sum(y) / 50)",
            result=jax.ShapeDtypeStruct((), "float32"),
        )
    )
    g = jax.jit(jax.grad(julia_function("(x, w) -> sum(tanh.(w * x))"), 1))
    host = jax.jit(
        lambda x: jax.pure_callback(
            lambda y: np.float32(np.asarray(y).sum()), jax.ShapeDtypeStruct((), "float32"), x
        )
    )
    x, w = jnp.arange(1000.0), jnp.eye(8)
    right = float(f(x)), np.asarray(g(jnp.ones(8), w))
    until, wrong, calls = time.time() + seconds, [], [0] * threads

    def work(n):
        while time.time() < until and not wrong:
            if n % 4 == 3:
                with lock:
                    y = plain(1.0)
                if y != 5150.0:
                    wrong.append(f"juliacall: {y}")
            if n % 4 == 2 and float(host(x[:10])) != 45:
                wrong.append("pure_callback")
            if n % 2 and not np.array_equal(g(jnp.ones(8), w), right[1]):
                wrong.append("gradient")
            if float(f(x)) != right[0]:
                wrong.append("value")
            calls[n] += 1

    def guarded(n):
        try:
            work(n)
        except BaseException as error:
            wrong.append(repr(error))

    workers = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    collections = 0
    while time.time() < until and not wrong:
        julia.ask("GC.gc()")
        with lock:
            jl.GC.gc(False)
        collections += 2
        time.sleep(0.02)
    for worker in workers:
        worker.join(60)
    if any(worker.is_alive() for worker in workers):
        wrong.append("hangs")
    print(
        f"{threads} threads, {seconds} s: {sum(calls)} rounds of calls, {collections} collections, "
        f"{'no fault' if not wrong else wrong[:3]}"
    )
    return not wrong


def memory(small, large):
    f = jax.jit(julia_function("x -> 2 .* x", result=lambda x: x))
    tiny, big = jnp.ones(10), jnp.ones(1_000_000)
    good = True
    for what, x, count in (("small", tiny, small), ("large", big, large)):
        # One round finds the heap its size. What grows from the first three of the other rounds to
        # the last three, each after a collection, is a leak.
        after = []
        for _ in range(11):
            for _ in range(count // 10):
                f(x).block_until_ready()
            runtime().ask("GC.gc()")
            after.append(resident())
        growth = statistics.median(after[-3:]) / statistics.median(after[1:4]) - 1
        print(f"{count} {what} calls: resident set {after[-1] >> 20} MB, growth {growth:+.1%}")
        good = good and growth < 0.05
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=1_000)
    arguments = parser.parse_args()
    good = [soak(threads, arguments.seconds) for threads in arguments.threads]
    good.append(memory(arguments.small, arguments.large))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
