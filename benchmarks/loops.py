"""Bounded loops against fori_loop, lax.while_loop and equinox: ratios of interleaved runs.

    python benchmarks/loops.py [--quick] [--only NAME]

NAME is one of: bounds, states, value, lanes, long, memory, rows, compile, peers. All programs of a
table are timed in one run, turn by turn, so that whatever else the machine does falls on all. A
ratio is the median over turns of ours to the reference in the same turn. The work of most tables is
an MLP 1-1024-1024-1 applied a number of times, the example of jax#8239.
"""

import argparse
import random
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from pybridge import bounded_fori_loop, bounded_while_loop

KEYS = jax.random.split(jax.random.PRNGKey(0), 3)
WEIGHTS = (
    jax.random.normal(KEYS[0], (1024, 1)) * 0.3,
    jax.random.normal(KEYS[1], (1024, 1024)) / 32,
    jax.random.normal(KEYS[2], (1, 1024)) / 32,
)
X = jnp.ones(1)


def net(weights, x):
    a, b, c = weights
    return c @ jnp.tanh(b @ jnp.tanh(a @ x))


def bounded(weights, x, steps, max_steps, body=net, **options):
    step = lambda c: (body(weights, c[0]), c[1] + 1)
    return bounded_while_loop(lambda c: c[1] < steps, step, (x, 0), max_steps, **options)[0]


def fori(weights, x, steps, body=net):
    return lax.fori_loop(0, steps, lambda _, x: body(weights, x), x)


def equinox_loop(kind, weights, x, steps, max_steps):
    from equinox.internal import while_loop

    step = lambda c: (net(weights, c[0]), c[1] + 1)
    init = (x, jnp.array(0))
    return while_loop(lambda c: c[1] < steps, step, init, max_steps=max_steps, kind=kind)[0]


def gradient(fun):
    total = lambda *args: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(fun(*args)))
    return jax.grad(total, (0, 1))


def compare(title, programs, args, seconds):
    """Print the median time of each program, and its ratio to the first."""
    compiled = {}
    for name, program in programs.items():
        began = time.process_time()
        compiled[name] = jax.jit(program).lower(*args).compile(), time.process_time() - began
    for run, _ in compiled.values():
        jax.block_until_ready(run(*args))
    times = {name: [] for name in compiled}
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(next(iter(times.values()))) < 5:
        # In a new order each turn: a program is a little slower after one that empties the caches.
        for name in random.sample(list(compiled), len(compiled)):
            run, _ = compiled[name]
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            times[name].append(1e3 * (time.perf_counter() - start))
    reference = next(iter(times.values()))
    ratio = lambda t: statistics.median(a / b for a, b in zip(t, reference))
    print(f"\n{title}")
    print("                                     ms   ratio  temporary MiB  compile s")
    for name, t in times.items():
        memory = compiled[name][0].memory_analysis().temp_size_in_bytes / 2**20
        print(
            f"  {name:30s} {statistics.median(t):8.2f} {ratio(t):7.2f} {memory:14.1f} "
            f"{compiled[name][1]:10.2f}",
            flush=True,
        )


def bounds(seconds):
    programs = {"fori_loop, static 8": gradient(lambda w, x: fori(w, x, 8))}
    for m in (8, 16, 64, 512, 4096):
        programs[f"bounded, max_steps {m}"] = gradient(lambda w, x, m=m: bounded(w, x, 8, m))
    compare("gradient, 8 steps taken", programs, (WEIGHTS, X), seconds)


def states(seconds):
    def body(weights, state):
        x, y = state
        return net(weights, x), jnp.sin(y) * 0.9 + 0.01 * x[0]

    y = jnp.linspace(0, 1, 100_000)
    programs = {"fori_loop, static 8": gradient(lambda w, s: fori(w, s, 8, body))}
    for m in (8, 64, 256, 4096):
        run = lambda w, s, m=m: bounded(w, s, 8, m, body)
        programs[f"bounded, max_steps {m}"] = gradient(run)
    compare("the same with a state of 1e5 floats", programs, (WEIGHTS, (X, y)), seconds)


def value(seconds):
    def while_loop(w, x):
        step = lambda c: (net(w, c[0]), c[1] + 1)
        return lax.while_loop(lambda c: c[1] < 8, step, (x, 0))[0]

    programs = {
        "lax.while_loop": while_loop,
        "bounded, max_steps 4096": lambda w, x: bounded(w, x, 8, 4096),
    }
    compare("forward value, 8 steps", programs, (WEIGHTS, X), seconds)


def lanes(seconds):
    xs = jnp.linspace(0.5, 1.5, 16)[:, None]
    over = lambda fun: lambda w, xs: jax.vmap(lambda x: fun(w, x))(xs)
    stops = jnp.full(16, 8)
    differ = lambda w, xs: jax.vmap(lambda x, n: bounded(w, x, n, 64))(xs, stops)
    programs = {
        "fori_loop, static 8": gradient(over(lambda w, x: fori(w, x, 8))),
        "bounded, one stop": gradient(over(lambda w, x: bounded(w, x, 8, 64))),
        "bounded, a stop each lane": gradient(differ),
        "equinox checkpointed": gradient(
            over(lambda w, x: equinox_loop("checkpointed", w, x, 8, 64))
        ),
    }
    compare("gradient, vmap over 16 lanes, shared weights", programs, (WEIGHTS, xs), seconds)


def long(seconds):
    for n in (512, 2048):
        programs = {
            f"fori_loop, static {n}": gradient(lambda w, x, n=n: fori(w, x, n)),
            "bounded, max_steps 4096": gradient(lambda w, x, n=n: bounded(w, x, n, 4096)),
            "equinox checkpointed": gradient(
                lambda w, x, n=n: equinox_loop("checkpointed", w, x, n, 4096)
            ),
        }
        compare(f"gradient, {n} steps taken of 4096", programs, (WEIGHTS, X), 4 * seconds)


def memory(seconds):
    y = jnp.linspace(0, 1, 2**18)  # 1 MiB
    step = lambda _, y: jnp.sin(y) * 0.999
    for n in (100, 1000, 10_000):
        run = lambda w, y, n=n: bounded(w, y, n, 10_000, step)
        programs = {"value": run, "gradient": gradient(run)}
        few = seconds if n < 10_000 else 0
        compare(f"{n} steps of 10,000, a state of 1 MiB", programs, (jnp.ones(()), y), few)


def rows(seconds):
    n, d = 100_000, 32
    buffer, x = jnp.zeros((n, d)), jnp.linspace(0, 1, d)

    def write(steps, read):
        def run(buffer, x):
            def body(i, c):
                buffer, x = c
                x = jnp.sin(x) * 1.1 + (0.1 * buffer[i - 1] if read else 0.0)
                return buffer.at[i].set(x), x

            return bounded_fori_loop(0, steps, body, (buffer, x), max_steps=n)[0][:5]

        return run

    for kind, wrap in (("value", lambda f: f), ("gradient", gradient)):
        programs = {"no write": wrap(lambda buffer, x: buffer[:5] * x[0])}
        for steps in (2, 200, 2000):
            programs[f"{steps} rows written"] = wrap(write(steps, False))
        programs["200 rows read and written"] = wrap(write(200, True))
        compare(f"{kind}, one row a step of a buffer of (1e5, 32)", programs, (buffer, x), seconds)


def compile_time(seconds):
    del seconds
    print("\ncompile time of the gradient, CPU seconds (trace and compile), least of 3")

    def least(make):
        times = []
        for _ in range(3):
            jax.clear_caches()
            began = time.process_time()
            jax.jit(gradient(make)).lower(WEIGHTS, X).compile()
            times.append(time.process_time() - began)
        return min(times)

    reference = least(lambda w, x: fori(w, x, 8))
    print(f"  fori_loop, static 8            {reference:8.2f}")
    for m in (8, 64, 4096, 1_000_000):
        took = least(lambda w, x, m=m: bounded(w, x, 8, m))
        print(
            f"  bounded, max_steps {m:<10d}  {took:8.2f}   ratio {took / reference:.2f}", flush=True
        )


def peers(seconds):
    programs = {
        "fori_loop, static 8": gradient(lambda w, x: fori(w, x, 8)),
        "bounded": gradient(lambda w, x: bounded(w, x, 8, 256)),
        "equinox checkpointed": gradient(lambda w, x: equinox_loop("checkpointed", w, x, 8, 256)),
        "equinox bounded": gradient(lambda w, x: equinox_loop("bounded", w, x, 8, 256)),
    }
    compare("gradient, 8 steps taken of 256, beside equinox", programs, (WEIGHTS, X), seconds)


TABLES = {
    "bounds": bounds,
    "states": states,
    "value": value,
    "lanes": lanes,
    "long": long,
    "memory": memory,
    "rows": rows,
    "compile": compile_time,
    "peers": peers,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the time a table")
    parser.add_argument("--only", choices=TABLES)
    given = parser.parse_args()
    for name, table in TABLES.items():
        if given.only in (None, name):
            table(1.0 if given.quick else 5.0)


if __name__ == "__main__":
    main()
