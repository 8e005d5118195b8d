"""``reduce_window`` in Python and in Julia on random geometries, and both against a plain loop.

Each case is a geometry (rank 1 to 4, all options) with one operand, init and directions; each of six
reducers is run on it: value, gradient with respect to operand and init, jvp, and the second
derivative, forward over reverse. In every fourth case the operand is rounded, so that there are ties.
"""

import concurrent.futures
import dataclasses
import itertools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pybridge.windows import reduce_window

QUANTITIES = ("value", "gradient", "jvp", "second derivative")
TOLERANCE = 1e-12
# Of central differences, where there is no Julia: slow, so on the first cases only.
DIFFERENCED = 24
DIFFERENCES = {"value": 1e-12, "gradient": 1e-7, "jvp": 1e-7, "second derivative": 1e-4}


@dataclasses.dataclass(frozen=True)
class Reducer:
    """One reducer in the three languages of the comparison."""

    python: object
    julia: str
    numpy: object


REDUCERS = {
    "add": Reducer(lax.add, "+", np.add),
    "mul": Reducer(lax.mul, "*", np.multiply),
    "max": Reducer(lax.max, "max", np.maximum),
    "min": Reducer(lax.min, "min", np.minimum),
    "logaddexp": Reducer(jnp.logaddexp, "NestedGradients.logaddexp", np.logaddexp),
    "user": Reducer(
        lambda a, b: jnp.sin(a) * b + a / 2,
        "CrosscheckWindows.user",
        lambda a, b: np.sin(a) * b + a / 2,
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A geometry and what is computed on it."""

    window: tuple
    stride: tuple
    padding: tuple
    base: tuple
    dilation: tuple
    ties: str
    x: np.ndarray
    init: float
    dx: np.ndarray
    dinit: float
    cotangent: np.ndarray

    @property
    def geometry(self):
        return self.window, self.stride, self.padding, self.base, self.dilation

    @property
    def tied(self):
        return bool((self.x == np.round(self.x)).all())


def cases(count, seed):
    """``count`` random cases."""
    return [_case(np.random.default_rng([seed, i]), i) for i in range(count)]


def _case(rng, i):
    rank = int(rng.integers(1, 5))
    largest = (10, 6, 5, 4)[rank - 1]

    def draw(high, p_one):
        return tuple(1 if rng.random() < p_one else int(v) for v in rng.integers(1, high + 1, rank))

    while True:
        shape = draw(largest, 0.0)
        padding = tuple((int(a), int(b)) for a, b in rng.integers(-1, 4, (rank, 2)))
        geometry = (draw(4, 0.2), draw(3, 0.4), padding, draw(3, 0.6), draw(3, 0.6))
        out = out_shape(shape, *geometry)
        if math.prod(out) > 0 and math.prod(out) * math.prod(geometry[0]) < 1500:
            break
    x, dx = rng.normal(size=(2, *shape))
    init, dinit = rng.normal(size=2)
    if i % 4 == 3:
        x, init = np.round(x), np.round(init)
    ties = "split" if i % 8 == 7 else "first"
    return Case(*geometry, ties, x, float(init), dx, float(dinit), rng.normal(size=out))


def out_shape(shape, window, stride, padding, base, dilation):
    """The shape of a reduction, by counting the places where the window fits."""
    out = []
    for n, w, s, (low, high), b, d in zip(shape, window, stride, padding, base, dilation):
        padded = (n - 1) * b + 1 + low + high
        out.append(len(range(0, padded - (w - 1) * d, s)))
    return tuple(out)


def loop(x, init, op, window, stride, padding, base, dilation):
    """The written semantic as a plain loop."""
    out = np.empty(out_shape(x.shape, window, stride, padding, base, dilation))
    for o in np.ndindex(out.shape):
        value = init
        for k in itertools.product(*map(range, window)):
            at = [a * s + j * d - p[0] for a, s, j, d, p in zip(o, stride, k, dilation, padding)]
            if all(p >= 0 and p % b == 0 and p // b < n for p, b, n in zip(at, base, x.shape)):
                value = op(value, x[tuple(p // b for p, b in zip(at, base))])
        out[o] = value
    return out


def python_side(case):
    """{reducer: four arrays, as ``QUANTITIES``}, compiled as one program."""

    def one(name, point, direction, cotangent):
        options = {"ties": case.ties} if name in ("max", "min") else {}
        op = REDUCERS[name].python
        f = lambda x, init: reduce_window(x, init, op, *case.geometry, **options)
        gradient = jax.grad(lambda *p: jnp.vdot(cotangent, f(*p)), argnums=(0, 1))
        value, jvp = jax.jvp(f, point, direction)
        slopes, bends = jax.jvp(gradient, point, direction)
        flat = lambda pair: jnp.append(jnp.ravel(pair[0]), pair[1])
        return jnp.ravel(value), flat(slopes), jnp.ravel(jvp), flat(bends)

    # Each program runs once, so it is not worth LLVM's optimizations; XLA's own passes all run.
    options = {"xla_backend_optimization_level": 0}
    program = jax.jit(
        lambda *args: {name: one(name, *args) for name in REDUCERS}, compiler_options=options
    )
    with jax.enable_x64(True):
        args = (case.x, case.init), (case.dx, case.dinit), case.cotangent
        return jax.tree.map(np.asarray, program(*args))


def loop_side(case, name):
    """The four quantities by the loop and its central differences."""
    op = REDUCERS[name].numpy
    value = lambda t, x, init: loop(x + t * case.dx, init + t * case.dinit, op, *case.geometry)
    scalar = lambda x, init: np.vdot(case.cotangent, loop(x, init, op, *case.geometry))
    central = lambda f, h: (f(h) - f(-h)) / (2 * h)

    def gradient(x, init, h):
        slopes = []
        for i in np.ndindex(x.shape):
            unit = np.zeros(x.shape)
            unit[i] = 1.0
            slopes.append(central(lambda t, u=unit: scalar(x + t * u, init), h))
        return np.array([*slopes, central(lambda t: scalar(x, init + t), h)])

    h = 1e-4
    bend = central(lambda t: gradient(case.x + t * case.dx, case.init + t * case.dinit, h), h)
    return (
        np.ravel(value(0.0, case.x, case.init)),
        gradient(case.x, case.init, 1e-6),
        np.ravel(central(lambda t: value(t, case.x, case.init), 1e-6)),
        bend,
    )


JULIA = r"""
module CrosscheckWindows
import NestedGradients, ForwardDiff, Zygote

user(a, b) = sin(a) * b + a / 2

function run(op, x, init, dx, dinit, cotangent, window, stride, padding, base_dilation, window_dilation, ties)
    kw = (; window, stride, padding, base_dilation, window_dilation, ties)
    f(x, init) = NestedGradients.reduce_window(op, init, x; kw...)
    pair(x, init) = Zygote.gradient((x, init) -> sum(cotangent .* f(x, init)), x, init)
    # Row-major, as on the Python side.
    ravel(a) = vec(permutedims(a, ndims(a):-1:1))
    flat((a, b)) = vcat(ravel(a), b)
    along(g) = ForwardDiff.derivative(t -> g(x .+ t .* dx, init + t * dinit), 0.0)
    quantities = (ravel(f(x, init)), flat(pair(x, init)), ravel(along(f)), along(flat ∘ pair))
    return join([join(q, ' ') for q in quantities], ';')
end

# An array of the shape from its numbers in row-major order.
array(shape, numbers...) =
    permutedims(reshape(collect(Float64, numbers), reverse(shape)), length(shape):-1:1)
end
"""


def julia_side(julia, case, name):
    """The four quantities of the Julia twin."""
    from pybridge.julia.runtime import runtime

    def array(a):
        numbers = ", ".join(repr(float(v)) for v in a.ravel())
        return f"CrosscheckWindows.array({_tuple(a.shape)}, {numbers})"

    ask = runtime().ask
    ask(
        "(isdefined(Main, :CrosscheckWindows) || "
        f'Base.include_string(Main, raw"""{JULIA}""", "crosscheck_windows.jl"); "")'
    )
    ties = case.ties if name in ("max", "min") else "first"
    padding = "(" + ", ".join(_tuple(p) for p in case.padding) + ",)"
    parts = [
        f"CrosscheckWindows.run({REDUCERS[name].julia}",
        array(case.x),
        repr(case.init),
        array(case.dx),
        repr(case.dinit),
        array(case.cotangent),
        _tuple(case.window),
        _tuple(case.stride),
        padding,
        _tuple(case.base),
        _tuple(case.dilation),
        f":{ties})",
    ]
    answer = ask(f"Base.include_string(Main, {_quoted(', '.join(parts))})", f"crosscheck {name}")
    return tuple(np.array([float(v) for v in q.split()]) for q in answer.split(";"))


def _tuple(values):
    return "(" + ", ".join(map(str, values)) + ",)"


def _quoted(code):
    return 'raw"' + code + '"'


def run(julia, *, cases=200, seed=0):
    """Rows (name, quantity, error, tolerance): the greatest error of each reducer and quantity.

    Args:
      julia: anything but None asks the Julia twin; None compares with central differences of the
        loop instead, on the first few cases and where there are no ties.
      cases: how many geometries.
    """
    worst, drawn = {}, _cases(cases, seed)
    # Compiling is what takes the time: while it does, other threads compile or ask Julia.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for i, (case, ours) in enumerate(zip(drawn, pool.map(python_side, drawn))):
            for name in REDUCERS:
                if julia is not None:
                    theirs, source = julia_side(julia, case, name), "Python and Julia"
                    _note(worst, name, source, case, ours[name], theirs)
                elif not case.tied and i < DIFFERENCED:
                    theirs, source = loop_side(case, name), "central differences"
                    _note(worst, name, source, case, ours[name], theirs)
                value = np.ravel(loop(case.x, case.init, REDUCERS[name].numpy, *case.geometry))
                _note(worst, name, "the loop", case, ours[name][:1], (value,))
    rows = []
    for (name, source, quantity), (error, case) in worst.items():
        tolerance = DIFFERENCES[quantity] if source == "central differences" else TOLERANCE
        label = f"reduce_window {name}, {source}, {cases} geometries"
        if not error <= tolerance:
            label += f", worst at shape {case.x.shape}, geometry {case.geometry}"
        rows.append({"name": label, "quantity": quantity, "error": error, "tolerance": tolerance})
    return rows


_cases = cases


def _note(worst, name, source, case, got, want):
    for quantity, a, b in zip(QUANTITIES, got, want):
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
        error = (
            float(np.max(np.abs(a - b), initial=0.0)) / scale if a.shape == b.shape else math.inf
        )
        key = (name, source, quantity)
        if key not in worst or not error <= worst[key][0]:
            worst[key] = (error, case)
