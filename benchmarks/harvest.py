"""What reaping costs, both sides in one run: a 12-layer MLP with every activation named.

    python benchmarks/harvest.py

Each row sets reap(jit(grad(f))) against the function one would write by hand, which returns the same
arrays as auxiliary outputs (cotangents as gradients with respect to added zeros). Time is the ratio
of medians of interleaved calls, round by round; memory is XLA's own account of the compiled programs
(arguments, results and temporaries), which no other load on the machine touches. The last row
compares optimised programs of the function with and without sow, where nobody reaps.
"""

import argparse
import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from pybridge import harvest
from pybridge.harvest import reap, sow

LAYERS, BAR = 12, 1.05


def model(width, batch):
    rng = np.random.default_rng(0)
    weights = [
        jnp.asarray(rng.normal(size=(width, width)) / np.sqrt(width), jnp.float32)
        for _ in range(LAYERS)
    ]
    return weights, jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)


def mlp(weights, x, name):
    for i, w in enumerate(weights):
        x = name(jnp.tanh(x @ w), f"h{i}")
    return jnp.mean(x**2)


def sown(weights, x):
    return mlp(weights, x, sow)


def bare(weights, x):
    return mlp(weights, x, lambda v, _: v)


def by_hand_values(weights, x):
    kept = {}

    def loss(weights):
        return mlp(weights, x, lambda v, n: kept.setdefault(n, v)), dict(kept)

    return jax.grad(loss, has_aux=True)(weights)


def by_hand_cotangents(weights, x):
    zeros = {f"h{i}": jnp.zeros_like(x) for i in range(LAYERS)}

    def loss(weights, eps):
        kept = {}
        out = mlp(weights, x, lambda v, n: kept.setdefault(n, v + eps[n]))
        return out, kept

    (gradient, cotangents), kept = jax.grad(loss, (0, 1), has_aux=True)(weights, zeros)
    return gradient, kept, cotangents


def interleaved(rounds, *calls):
    for call in calls:
        jax.block_until_ready(call())
    seconds = [[] for _ in calls]
    for i in range(rounds):
        order = range(len(calls)) if i % 2 else reversed(range(len(calls)))
        for k in order:
            start = time.perf_counter()
            jax.block_until_ready(calls[k]())
            seconds[k].append(time.perf_counter() - start)
    return [statistics.median(s) for s in seconds]


def memory(compiled):
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes


def bare_hlo(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    return text[text.index("\n%") :]


def row(what, time_ratio, memory_ratio, bar=BAR):
    holds = time_ratio <= bar and memory_ratio <= bar
    print(
        f"{what:58} time {time_ratio:6.3f}  memory {memory_ratio:6.3f}  "
        f"bar {bar}  {'holds' if holds else 'MISSED'}"
    )
    return holds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    weights, x = model(options.width, options.batch)
    g = jax.jit(harvest.grad(sown))
    good = True
    for what, attributes, hand in (
        ("values (attributes=('value',)) / hand-written aux", ("value",), by_hand_values),
        ("values and cotangents / hand-written aux and zeros", None, by_hand_cotangents),
    ):
        how = {} if attributes is None else {"attributes": attributes}
        reaped, hand = reap(g, **how), jax.jit(hand)
        ours, theirs = interleaved(
            options.rounds, lambda r=reaped: r(weights, x), lambda h=hand: h(weights, x)
        )
        # What the reaped function compiles is this; the arrays that later questions need are its
        # own arguments, and cost nothing.
        read = attributes or ("value", "cotangent")
        program = jax.jit(lambda w, x, how=how, read=read: _arrays(reap(g, **how)(w, x), read))
        good &= row(
            what,
            ours / theirs,
            memory(program.lower(weights, x).compile()) / memory(hand.lower(weights, x).compile()),
        )
        print(f"{'':58} {ours * 1e3:.2f} ms against {theirs * 1e3:.2f} ms")
    same = all(
        bare_hlo(t(sown), weights, x) == bare_hlo(t(bare), weights, x)
        for t in (lambda f: f, jax.grad, harvest.grad)
    )
    print(f"{'without reap: the optimised programs are the same':58} {same}")
    raise SystemExit(not (good and same))


def _arrays(pair, attributes):
    out, named = pair
    return out, [getattr(e, a) for e in named.values() for a in attributes]


if __name__ == "__main__":
    main()
