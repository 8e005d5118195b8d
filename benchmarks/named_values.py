"""What a library gives of a named value, as a row of a table: each cell is found out by running it.

    python benchmarks/named_values.py [pybridge | oryx | tesseract]

Each library runs in an environment where it imports (oryx 0.2.9 needs jax 0.4.36, so not beside
pybridge); only that and jax are needed. The function is f(x) = sin(x^3) with x^3 named. A cell says
what came out right of what was asked, and of the rest what happened.
"""

import argparse
import importlib.metadata
import math

import jax
import jax.numpy as jnp
from jax import lax

X = 2.0
V = X**3
COT, DCOT = math.cos(V), -math.sin(V)  # dy/dv, and its derivative in v


class Pybridge:
    def __init__(self):
        from pybridge import harvest

        self.lib, self.sow, self.grad, self.vmap = harvest, harvest.sow, harvest.grad, harvest.vmap

    def version(self):
        import pybridge

        return f"pybridge {pybridge.__version__}"

    def values(self, f, x):
        return self.lib.reap(f)(x)[1]["x3"].value

    def cotangent(self, f, x):
        return self.lib.reap(self.grad(f))(x)[1]["x3"].cotangent

    def tangent(self, f, x):
        push = lambda x: self.lib.jvp(f, (x,), (jnp.ones_like(x),))
        return self.lib.reap(push)(x)[1]["x3"].tangent

    def nested(self, f, x):
        e = self.lib.reap(self.grad(self.grad(f)))(x)[1]["x3"]
        return e.value.value, e.cotangent.value, e.value.cotangent, e.cotangent.cotangent


class Oryx:
    def __init__(self):
        import oryx

        self.lib, self.grad, self.vmap = oryx, jax.grad, jax.vmap
        self.reap = lambda f: oryx.core.reap(f, tag="t")

    def sow(self, x, name):
        return self.lib.core.sow(x, tag="t", name=name, mode="clobber")

    def version(self):
        return f"oryx {importlib.metadata.version('oryx')} (jax {jax.__version__})"

    def values(self, f, x):
        return self.reap(f)(x)["x3"]

    def cotangent(self, f, x):
        return self.reap(jax.grad(f))(x)["x3"]

    def tangent(self, f, x):
        return self.reap(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)))(x)["x3"]

    def nested(self, f, x):
        found = self.reap(jax.grad(jax.grad(f)))(x)
        return found["x3"], None, None, None


class Tesseract:
    def __init__(self):
        import tesseract_jax

        self.lib, self.sow, self.grad, self.vmap = (
            tesseract_jax,
            tesseract_jax.sow,
            jax.grad,
            jax.vmap,
        )

    def version(self):
        return (
            f"tesseract-jax {importlib.metadata.version('tesseract-jax')} (jax {jax.__version__})"
        )

    def named(self, f, x):
        return self.lib.save_intermediates(f)(x)[1]["x3"]

    def values(self, f, x):
        return self.named(f, x)["primal"]

    def cotangent(self, f, x):
        return self.named(jax.grad(f), x)["cotangent"]

    def tangent(self, f, x):
        return self.named(lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)), x)["tangent"]

    def nested(self, f, x):
        found = self.named(jax.grad(jax.grad(f)), x)
        return found["primal"], found["cotangent"], None, None


LIBRARIES = {"pybridge": Pybridge, "oryx": Oryx, "tesseract": Tesseract}


def right(got, want):
    got, want = jnp.asarray(jnp.nan if got is None else got), jnp.asarray(want)
    return got.shape == want.shape and jnp.allclose(got, want, rtol=1e-4)


def asked(call, *wants):
    """ "yes", a count of what came out right, or what was raised."""
    try:
        got = call()
    except Exception as error:  # any failure of a library is its answer
        return f"{type(error).__name__}: {str(error).splitlines()[0][:40]}"
    got = got if isinstance(got, tuple) else (got,)
    good = sum(bool(right(g, w)) for g, w in zip(got, wants))
    return "yes" if good == len(wants) else f"{good} of {len(wants)}" if good else "no"


def constructs(lib):
    """Each holds the named value x^3 once, whatever is around it."""
    name = lambda x: lib.sow(x**3, "x3")

    @jax.custom_jvp
    def with_jvp(x):
        return name(x)

    with_jvp.defjvp(lambda p, t: (with_jvp(*p), 3 * p[0] ** 2 * t[0]))

    @jax.custom_vjp
    def with_vjp(x):
        return name(x)

    with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, ct: (3 * x**2 * ct,))
    once = lambda c: (c[0] + 1, name(c[1]))
    return {
        "jit": jax.jit(name),
        "scan": lambda x: lax.scan(lambda c, _: (name(c), None), x, None, length=1)[0],
        "while": lambda x: lax.while_loop(lambda c: c[0] < 1, once, (0, x))[1],
        "cond": lambda x: lax.cond(x > 0, name, lambda x: x, x),
        "checkpoint": jax.checkpoint(name),
        "custom_jvp": with_jvp,
        "custom_vjp": with_vjp,
    }


def row(lib):
    f = lambda x: jnp.sin(lib.sow(x**3, "x3"))
    flow = {k: asked(lambda g=g: jnp.sum(lib.values(g, X)), V) for k, g in constructs(lib).items()}
    differentiated = {
        k: asked(lambda g=g: jnp.sum(lib.values(lib.grad(g), X)), V)
        for k, g in constructs(lib).items()
        if k != "while"
    }
    m, n = 3, 7
    x = jnp.arange(1.0 * m * n).reshape(m, n)
    mapped = lib.vmap(lambda x: lib.sow(x**3, "x3") + 1, in_axes=0, out_axes=-1)
    say = lambda cells: ", ".join(
        ["yes: " + " ".join(k for k, c in cells.items() if c == "yes")]
        + [f"{k}: {c}" for k, c in cells.items() if c != "yes"]
    )
    return {
        "": lib.version(),
        "value": asked(lambda: lib.values(f, X), V),
        "cotangent": asked(lambda: lib.cotangent(f, X), COT),
        "tangent": asked(lambda: lib.tangent(f, X), 3 * X**2),
        "grad of grad (v, dy/dv, and the cotangents of both)": asked(
            lambda: lib.nested(f, X), V, COT, DCOT * 3 * X**2, 3 * X**2
        ),
        "value in": say(flow),
        "value in grad of": say(differentiated),
        "vmap out_axes=-1": asked(lambda: lib.values(mapped, x), (x**3).T),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="?", default="pybridge", choices=LIBRARIES)
    cells = row(LIBRARIES[parser.parse_args().library]())
    print(" | ".join(("", *cells, "")).strip())
    print("|" + "---|" * len(cells))
    print(" | ".join(("", *cells.values(), "")).strip())


if __name__ == "__main__":
    main()
