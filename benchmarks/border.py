"""What the border costs, both sides in one run: ``python benchmarks/border.py``.

Every row interleaves its two sides round by round, on the same data, and reports medians and their
ratio or difference, so that other load on the machine falls on both alike. Processor time, of all
threads, stands beside the time on the clock: other load hardly changes it.
"""

import argparse
import json
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pybridge import LuxModel, julia_function, nested_grad
from pybridge.julia.runtime import lock, runtime
from pybridge.julia.structure import ELEMENT, tuple_of

STEPS = 2000


def interleaved(rounds, **sides):
    """The medians over ``rounds`` rounds of each side's seconds: (on the clock, of the processor)."""
    seconds = {name: [] for name in sides}
    for side in sides.values():
        side()
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(side())
    return {name: tuple(map(statistics.median, zip(*values))) for name, values in seconds.items()}


def timed(call, repeat=1):
    def side():
        clock, processor = time.perf_counter(), time.process_time()
        for _ in range(repeat):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - clock) / repeat, (time.process_time() - processor) / repeat

    return side


def in_julia(julia, code, repeat=1):
    """Julia's own time for its own code, a function of no arguments."""
    name = f"bench_{abs(hash(code))}"
    julia.ask(f"({name} = {code}; {name}(); {name}_many() = for _ in 1:{repeat}; {name}(); end; 0)")
    question = f"({name}_many(); 0)"

    def side():
        clock, processor = timed(lambda: julia.ask(question))()
        return clock / repeat, processor / repeat

    julia.ask(question)
    return side


def given(julia, name, x):
    """Give Julia a copy of an array under a name, in index order."""
    x = np.asarray(x, order="F")
    place = f"({ELEMENT[x.dtype.name]}, {tuple_of(x.shape)}, {x.ctypes.data})"
    julia.ask(f"({name} = copied({place}); 0)")
    return name


def against(ours, julia, unit=1e3, name="ms"):
    """The figure of a row that has Julia alone as its other side, and the ratio."""
    ratio, processors = (a / b for a, b in zip(ours, julia))
    figure = (
        f"{ours[0] * unit:.2f} {name}, Julia alone {julia[0] * unit:.2f}: {ratio:.2f} x "
        f"(processor {processors:.2f} x)"
    )
    return figure, ratio


# ---- rows: each yields (what, a figure with its unit, the bar, whether it holds) --------------------


def crossing(julia, rounds):
    x = jnp.linspace(0.0, 1.0, 10)
    f = julia_function("x -> x .* 0.999f0 .+ 0.001f0", name="step", result=lambda x: x)
    native = lambda x: x * 0.999 + 0.001
    g = julia.juliacall.Main.seval("x -> x .* 0.999f0 .+ 0.001f0")

    def host(x):
        with lock:
            return np.asarray(g(np.asarray(x)), np.float32)

    callback = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((10,), "float32"), x)

    def loop(body, steps):
        run = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda _, x: body(x), x))
        side = timed(lambda: run(x))
        return lambda: tuple(seconds / steps for seconds in side())

    step = interleaved(
        rounds, ffi=loop(f, STEPS), native=loop(native, STEPS), callback=loop(callback, STEPS // 20)
    )
    extra = (step["ffi"][0] - step["native"][0]) * 1e6
    yield "crossing in a jitted loop, 10 floats", f"{extra:.2f} us over native", 1.5, extra <= 1.5
    cheaper = step["callback"][0] / step["ffi"][0]
    yield "pure_callback into juliacall over ours", f"{cheaper:.0f} x", 50, cheaper >= 50

    ours, theirs = jax.jit(f), jax.jit(native)
    call = interleaved(
        rounds,
        ffi=timed(lambda: ours(x).block_until_ready(), 500),
        native=timed(lambda: theirs(x).block_until_ready(), 500),
    )
    extra, processor = ((a - b) * 1e6 for a, b in zip(call["ffi"], call["native"]))
    figure = f"{extra:.2f} us over native (processor {processor:.2f})"
    yield "one jitted call, 10 floats", figure, 3, extra <= 3


def large(julia, rounds):
    n = 2_500_000
    wide = (500, n // 500)
    for what, shape, options in (
        ("rank 1", (n,), {}),
        ("rank 2, axes reversed", wide, {"axes": "reversed"}),
        ("rank 2, index order", wide, {}),
        ("rank 1, borrow=False", (n,), {"borrow": False}),
        ("rank 2, axes reversed, borrow=False", wide, {"axes": "reversed", "borrow": False}),
        ("rank 2, index order, borrow=False", wide, {"borrow": False}),
    ):
        x = jnp.asarray(np.random.default_rng(0).random(shape, np.float32))
        f = julia_function("x -> 2 .* x .+ 1", name="large", result=lambda x: x, **options)
        call = jax.jit(f)
        own = f"(let f = function_of({f.id}).call, x = {given(julia, 'large', x)}; () -> f(x) end)"
        turn = jax.jit(lambda x: jax.lax.optimization_barrier(x.T.copy()))
        median = interleaved(
            rounds,
            ours=timed(lambda: call(x).block_until_ready(), 3),
            julia=in_julia(julia, own, 3),
            turn=timed(lambda: turn(x).block_until_ready(), 3),
        )
        figure, ratio = against(median["ours"], median["julia"])
        what = f"10 MB in and out, {what}"
        if "index" in what:
            bar = median["julia"][0] + 2 * median["turn"][0]
            figure += f"; Julia and two transposes {bar * 1e3:.2f} ms"
            yield what, figure, "Julia + 2 transposes", median["ours"][0] <= bar
        else:
            yield what, figure, 1.3, ratio <= 1.3


def second_order(julia, rounds):
    model = LuxModel("Chain(Dense(2 => 64, tanh), Dense(64 => 64, tanh), Dense(64 => 1))")
    loss = model.loss("(m, x, ps) -> sum(abs2, m(x, ps))", result=jax.ShapeDtypeStruct((), "f"))
    ps, _ = model.setup(0)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1024)), "float32")
    v = jnp.ones_like(x)

    def pullback(x, ps):
        # The step's part in Julia: one first-order form, and one second-order form.
        g, back = jax.vjp(lambda x, ps: nested_grad(loss, x, ps), x, ps)
        return g, back(v)

    call = jax.jit(pullback)
    call(x, ps)
    layers = ", ".join(
        f"{layer} = (weight = {given(julia, layer + '_weight', p['weight'])}, "
        f"bias = {given(julia, layer + '_bias', p['bias'])})"
        for layer, p in ps.items()
    )
    own = f"""(let h = function_of({loss.id}).call, x = {given(julia, "second", x)}, v = one.(x), ps = (; {layers})
        () -> (form(BACKEND, h, (x, ps), (1f0, nothing), Val(1); wanted=(true, false)),
               form(BACKEND, h, (x, ps), (1f0, nothing, (v, nothing)), Val(1)))
    end)"""
    median = interleaved(
        2 * rounds, ours=timed(lambda: call(x, ps), 5), julia=in_julia(julia, own, 5)
    )
    figure, ratio = against(median["ours"], median["julia"])
    yield "second-order step, MLP 2-64-64-1, batch 1,024", figure, 1.1, ratio <= 1.1


def batch(julia, rounds):
    f = julia_function(
        "(x, w) -> sum(sin.(x .* w))", name="small", result=jax.ShapeDtypeStruct((), "float32")
    )
    X = jnp.asarray(np.random.default_rng(0).normal(size=(1024, 8)), "float32")
    w = jnp.linspace(0.5, 2.0, 8)
    call = jax.jit(jax.vmap(f, (0, None)))
    own = f"""(let f = function_of({f.id}).call, X = {given(julia, "batch", X.T)}, w = {given(julia, "shared", w)}
        function ()
            y = zeros(Float32, 1024)
            for i in 1:1024
                y[i] = f(X[:, i], w)
            end
            y
        end
    end)"""
    median = interleaved(
        2 * rounds,
        ours=timed(lambda: call(X, w).block_until_ready(), 20),
        julia=in_julia(julia, own, 20),
    )
    figure, ratio = against(median["ours"], median["julia"], 1e6, "us")
    yield "vmap of 1,024, small function, over a hand-written loop", figure, 1.2, ratio <= 1.2


ROWS = {"crossing": crossing, "large": large, "second": second_order, "batch": batch}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], default=[])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    julia = runtime()
    results = []
    for name in arguments.rows or ROWS:
        for what, figure, bar, holds in ROWS[name](julia, arguments.rounds):
            results.append({"what": what, "figure": figure, "bar": bar, "holds": bool(holds)})
            if not arguments.json:
                print(f"{what:<58} {figure:<60} bar {bar}  {'holds' if holds else 'FALLS SHORT'}")
    if arguments.json:
        json.dump(
            {"cores": os.cpu_count(), "julia": julia.ask("VERSION"), "rows": results}, sys.stdout
        )


if __name__ == "__main__":
    main()
