"""nested_grad's cost, both sides in one run: against jax.grad of jax.grad, and against Julia alone.

    python benchmarks/nested.py              the JAX engine
    python benchmarks/nested.py --julia      Lux chains on the Julia engine too

Ratios are medians of interleaved calls: each round times both sides, one after the other, so that
whatever else the machine does falls on both.
"""

import argparse
import functools
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import pybridge

CHAINS = {
    "2-64-64-1": ((2, 64, 64, 1), 1024),
    "64-256-256-1": ((64, 256, 256, 1), 512),
    "16-512-512-512-1": ((16, 512, 512, 512, 1), 256),
}


def interleaved(*calls, rounds=30):
    """Median seconds of each call over rounds that time all of them in turn."""
    for call in calls:
        jax.block_until_ready(call())
    times = [[] for _ in calls]
    for _ in range(rounds):
        for record, call in zip(times, calls):
            start = time.perf_counter()
            jax.block_until_ready(call())
            record.append(time.perf_counter() - start)
    return [statistics.median(record) for record in times]


def chain(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"layer_{i + 1}": {
            "weight": jnp.asarray(rng.normal(size=(n, m)) / np.sqrt(m), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=n), jnp.float32),
        }
        for i, (m, n) in enumerate(itertools.pairwise(sizes))
    }


def mlp(x, ps):
    """A sample, or a batch of samples as columns."""
    layers = list(ps.values())
    bias = (lambda b: b) if x.ndim == 1 else (lambda b: b[:, None])
    for layer in layers[:-1]:
        x = jnp.tanh(layer["weight"] @ x + bias(layer["bias"]))
    return jnp.sum(layers[-1]["weight"] @ x + bias(layers[-1]["bias"]))


def penalty(gradient, x, ps):
    return jnp.sum(gradient(mlp, x, ps) ** 2)


def penalty_vmapped(gradient, x, ps):
    return jnp.sum(jax.vmap(lambda x: gradient(mlp, x, ps), 1)(x) ** 2)


def temporary_bytes(f, *args):
    return f.lower(*args).compile().memory_analysis().temp_size_in_bytes


def jax_engine():
    plain = lambda f, x, ps: jax.grad(f)(x, ps)
    print("JAX engine: gradient of |grad_x f|^2 in (x, ps), nested_grad over jax.grad of jax.grad")
    print(f"{'chain':>20} {'form':>8} {'jax ms':>8} {'time ratio':>11} {'memory ratio':>13}")
    for name, (sizes, batch) in CHAINS.items():
        x = jnp.asarray(np.random.default_rng(1).normal(size=(sizes[0], batch)), jnp.float32)
        ps = chain(sizes)
        for form, loss in (("batch", penalty), ("vmapped", penalty_vmapped)):
            theirs, ours = (
                jax.jit(jax.grad(functools.partial(loss, g), (0, 1)))
                for g in (plain, pybridge.nested_grad)
            )
            a, b = interleaved(lambda: theirs(x, ps), lambda: ours(x, ps))
            memory = temporary_bytes(ours, x, ps) / max(1, temporary_bytes(theirs, x, ps))
            print(f"{name:>20} {form:>8} {1e3 * a:8.2f} {b / a:11.3f} {memory:13.3f}")


def julia_engine():
    print(
        "\nJulia engine, float32: the second-order pass (H_xx v, H_px v) over gradients in (x, ps)"
    )
    print(
        f"{'chain':>20} {'julia grad ms':>14} {'over julia':>11} {'jax grad ms':>12} {'over jax':>9}"
    )
    for name, (sizes, batch) in CHAINS.items():
        layers = ", ".join(
            f"Dense({m} => {n}{', tanh' if n != sizes[-1] else ''})"
            for m, n in itertools.pairwise(sizes)
        )
        code = f"""
        begin
            model = Chain({layers})
            st = Lux.initialstates(Random.default_rng(), model)
            (x, ps) -> sum(first(model(x, ps, st)))
        end
        """
        f = pybridge.julia_function(code, using=["Lux", "Random"], name=name)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(sizes[0], batch)), jnp.float32)
        v = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.float32)
        ps = chain(sizes)
        both = functools.partial(pybridge.nested_grad, argnums=(0, 1))
        gradient = jax.jit(lambda x, ps: both(f, x, ps))
        second = jax.jit(lambda x, ps: pybridge.mixed_vjp(f, x, v, ps))
        jax_gradient = jax.jit(lambda x, ps: both(mlp, x, ps))
        jax_second = jax.jit(lambda x, ps: pybridge.mixed_vjp(mlp, x, v, ps))
        got, want = second(x, ps), jax_second(x, ps)
        error = max(
            float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want))
        )
        g, s, jg, js = interleaved(
            *(
                functools.partial(call, x, ps)
                for call in (gradient, second, jax_gradient, jax_second)
            )
        )
        print(
            f"{name:>20} {1e3 * g:14.2f} {s / g:11.2f} {1e3 * jg:12.2f} {s / jg:9.2f}"
            f"   (jax's own second order: {js / jg:.2f}; greatest difference {error:.0e})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--julia", action="store_true")
    arguments = parser.parse_args()
    jax_engine()
    if arguments.julia:
        julia_engine()
