"""Bounded loops in Python and in Julia on the loops people write, and a plain loop.

A case is a function of parameters to an array and the number of steps taken, written in both
languages on one of the three loops, which it gets as ``loop``. Compared are the value, the
gradient of a weighted sum, with all states kept and with three of them, the second derivative along
a direction (forward over reverse), and the number of steps.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from pybridge.loops import bounded_fori_loop, bounded_scan_until, bounded_while_loop

QUANTITIES = ("value", "gradient", "gradient, 3 checkpoints", "second derivative", "steps")
TOLERANCE = 1e-10
# Of central differences, where there is no Julia.
DIFFERENCES = {
    "value": 1e-12,
    "gradient": 1e-7,
    "gradient, 3 checkpoints": 1e-7,
    "second derivative": 1e-6,
    "steps": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """``python(p, loop) -> (array, steps)``, and the Julia function of the same name."""

    name: str
    loop: str
    python: object
    p: np.ndarray
    dp: np.ndarray
    weights: np.ndarray


def newton(p, loop):
    """The real root of x^3 + a x - b, to the last digits; the stop depends on a and b."""
    a, b = p
    far = lambda x: jnp.abs(x**3 + a * x - b) > 1e-13
    x, n = loop(far, lambda x: x - (x**3 + a * x - b) / (3 * x**2 + a), b / a, 50)
    return jnp.array([x, x * x]), n


def fixed_point(p, loop):
    """x = tanh(W x + b), until a step moves x by less than 1e-12."""
    w, b = p[:9].reshape(3, 3), p[9:]

    def step(state):
        x = jnp.tanh(w @ state[0] + b)
        return x, jnp.sum((x - state[0]) ** 2)

    far = lambda state: state[1] > 1e-24
    (x, _), n = loop(far, step, (jnp.zeros(3), jnp.array(1.0)), 500)
    return x, n


def adaptive_ode(p, loop):
    """van der Pol's equation from 0 to 1 by Heun's method, whose steps follow the local error."""
    mu, y0, v0 = p
    field = lambda y: jnp.array([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    def step(state):
        t, y, h = state
        k1 = field(y)
        k2 = field(y + h * k1)
        error = jnp.sqrt(jnp.sum((h / 2 * (k2 - k1)) ** 2) + 1e-30)
        accept = error < 1e-4
        y = jnp.where(accept, y + h / 2 * (k1 + k2), y)
        t = jnp.where(accept, t + h, t)
        h = h * jnp.clip(0.9 * jnp.sqrt(1e-4 / error), 0.3, 2.0)
        return t, y, jnp.minimum(h, 1 - t)

    going = lambda state: state[0] < 1 - 1e-12
    (_, y, _), n = loop(going, step, (jnp.array(0.0), jnp.array([y0, v0]), jnp.array(0.1)), 400)
    return y, n


def power_iteration(p, loop):
    """The largest eigenvalue of a symmetric matrix, and its vector."""
    m = p.reshape(3, 3)
    a = m + m.T + 4 * jnp.eye(3)

    def step(state):
        y = a @ state[0]
        y = y / jnp.sqrt(jnp.sum(y**2))
        return y, jnp.sum((y - state[0]) ** 2)

    start = (jnp.array([1.0, 0.5, -0.2]), jnp.array(1.0))
    (x, _), n = loop(lambda state: state[1] > 1e-22, step, start, 1000)
    return jnp.append(x, x @ (a @ x) / (x @ x)), n


def descent(p, loop):
    """Hyper-gradients: ridge regression with a quartic term by gradient descent, differentiated in
    the rate, the penalty and the data."""
    rate, penalty, y = p[0], p[1], p[2:]
    design = jnp.array([[1.0, 0.2], [0.5, -1.0], [-0.3, 0.8], [0.9, 0.4]])

    def objective(w):
        fit = jnp.sum((design @ w - y) ** 2)
        return fit / 2 + penalty / 2 * jnp.sum(w**2) + jnp.sum(w**4) / 4

    slope = jax.grad(objective)
    far = lambda w: jnp.sum(slope(w) ** 2) > 1e-18
    return loop(far, lambda w: w - rate * slope(w), jnp.zeros(2), 2000)


def recurrence(p, loop):
    """X <- tanh(A X B) + X / 2, a number of times: the Jacobians do not commute."""
    a, b = p[:9].reshape(3, 3), p[9:].reshape(2, 2)
    step = lambda state: (jnp.tanh(a @ state[0] @ b) + state[0] / 2, state[1] + 1)
    start = (jnp.array([[0.3, -0.5], [0.8, 0.1], [-0.4, 0.9]]), jnp.array(0))
    (x, _), n = loop(lambda state: state[1] < 12, step, start, 64)
    return jnp.ravel(x), n


def continued_fraction(p, loop):
    """A continued fraction of given depth, from the inside out, whose terms the index counts."""
    a, b = p
    term = lambda i, x: a * (i + 1) / (b + jnp.sin(x) + x**2)
    x, n = loop(-3, 9, term, b, 40)
    return jnp.array([x, x * a]), n


def pendulum(p, loop):
    """A pendulum's swing until it turns: angles and speeds of every step."""
    length, y0, v0 = p

    def step(state):
        y, v = state
        v = v - 0.05 / length * jnp.sin(y)
        return (y + 0.05 * v, v), jnp.array([y, v * y])

    ((y, _), rows), n = loop(lambda state: state[1] > 0, step, (y0, v0), 24)
    return jnp.append(jnp.ravel(rows), y), n


def _cases():
    draw = np.random.default_rng(5)
    case = lambda fun, p, size, loop="while": Case(
        fun.__name__, loop, fun, np.asarray(p), draw.normal(size=len(p)), draw.normal(size=size)
    )
    return (
        case(newton, [1.3, 2.7], 2),
        case(fixed_point, 0.5 * draw.normal(size=12), 3),
        case(adaptive_ode, [1.2, 1.5, -0.4], 2),
        case(power_iteration, 0.5 * draw.normal(size=9), 4),
        case(descent, [0.15, 0.3, 1.0, -0.5, 0.8, 0.2], 2),
        case(recurrence, 0.6 * draw.normal(size=13), 6),
        case(continued_fraction, [0.4, 1.7], 2, "fori"),
        case(pendulum, [1.3, 0.2, 0.12], 49, "scan"),
    )


CASES = _cases()


# ---- the sides ----

LOOPS = {"while": bounded_while_loop, "fori": bounded_fori_loop, "scan": bounded_scan_until}


def python_side(case):
    """Five arrays, as ``QUANTITIES``, compiled as one program."""

    def loop(checkpoints):
        options = {"checkpoints": checkpoints, "return_steps": True}
        return lambda *args: LOOPS[case.loop](*args, **options)

    weighted = lambda checkpoints: lambda p: case.weights @ case.python(p, loop(checkpoints))[0]

    def program(p):
        value, steps = case.python(p, loop("auto"))
        slope, bend = jax.jvp(jax.grad(weighted("auto")), (p,), (case.dp,))
        return value, slope, jax.grad(weighted(3))(p), bend, jnp.atleast_1d(steps)

    with jax.enable_x64(True):
        return tuple(map(np.asarray, jax.jit(program)(case.p)))


def plain_while(cond, body, init, max_steps):
    """The written semantic."""
    val, steps = init, 0
    while steps < max_steps and cond(val):
        val, steps = body(val), steps + 1
    return val, steps


def plain_fori(lower, upper, body, init, max_steps):
    val, indices = init, range(lower, min(upper, lower + max_steps))
    for i in indices:
        val = body(i, val)
    return val, len(indices)


def plain_scan(cond, body, init, max_steps):
    val, rows = init, []
    while len(rows) < max_steps and cond(val):
        val, row = body(val)
        rows.append(row)
    zeros = [jnp.zeros_like(rows[0])] * (max_steps - len(rows))
    return (val, jnp.stack(rows + zeros)), len(rows)


PLAIN = {"while": plain_while, "fori": plain_fori, "scan": plain_scan}


def loop_side(case):
    """The same by the plain loop, and central differences of the gradient and of the value. Both
    follow the number of steps of the point itself, where the derivative is."""
    with jax.enable_x64(True):
        value, steps = case.python(jnp.asarray(case.p), PLAIN[case.loop])
        fixed = jax.jit(lambda p: case.weights @ case.python(p, _taking(case.loop, int(steps)))[0])
        slope = jax.jit(jax.grad(fixed))
        central = lambda f, v, h: (f(case.p + h * v) - f(case.p - h * v)) / (2 * h)
        gradient = np.array([central(fixed, v, 1e-6) for v in np.eye(len(case.p))])
        bend = np.asarray(central(slope, case.dp, 1e-6))
        return np.asarray(value), gradient, gradient, bend, np.array([steps])


def _taking(loop, steps):
    """The loop with its number of steps given, which jax differentiates as a scan or a plain loop."""
    if loop == "fori":
        return plain_fori
    if loop == "scan":
        # The first steps are those that cond allows.
        return lambda _, body, init, max_steps: _scanned(body, init, max_steps, steps)
    fixed = lambda _, body, init, __: jax.lax.fori_loop(0, steps, lambda _, val: body(val), init)
    return lambda *args: (fixed(*args), steps)


def _scanned(body, init, max_steps, steps):
    val, rows = jax.lax.scan(lambda val, _: body(val), init, None, length=steps)
    return (val, jnp.pad(rows, ((0, max_steps - steps), (0, 0)))), steps


JULIA = r"""
module CrosscheckLoops
import NestedGradients, ForwardDiff, Zygote

function newton(p, loop)
    a, b = p[1], p[2]
    x, n = loop(x -> abs(x^3 + a * x - b) > 1e-13, x -> x - (x^3 + a * x - b) / (3x^2 + a), b / a, 50)
    return [x, x * x], n
end

# Parameters come in row-major order.
matrix(v, m, n) = permutedims(reshape(v, n, m))

function fixed_point(p, loop)
    w, b = matrix(p[1:9], 3, 3), p[10:12]
    step(state) = (x = tanh.(w * state[1] .+ b); (x, sum(abs2, x .- state[1])))
    state, n = loop(state -> state[2] > 1e-24, step, (zeros(3), 1.0), 500)
    return state[1], n
end

function adaptive_ode(p, loop)
    mu = p[1]
    field(y) = [y[2], mu * (1 - y[1]^2) * y[2] - y[1]]
    function step((t, y, h))
        k1 = field(y)
        k2 = field(y .+ h .* k1)
        error = sqrt(sum(abs2, h / 2 .* (k2 .- k1)) + 1e-30)
        accept = error < 1e-4
        y = accept ? y .+ h / 2 .* (k1 .+ k2) : y
        t = accept ? t + h : t
        h = h * clamp(0.9 * sqrt(1e-4 / error), 0.3, 2.0)
        return (t, y, min(h, 1 - t))
    end
    state, n = loop(state -> state[1] < 1 - 1e-12, step, (0.0, p[2:3], 0.1), 400)
    return state[2], n
end

function power_iteration(p, loop)
    m = matrix(p, 3, 3)
    a = m .+ permutedims(m) .+ [4.0 0 0; 0 4 0; 0 0 4]
    function step(state)
        y = a * state[1]
        y = y ./ sqrt(sum(abs2, y))
        return y, sum(abs2, y .- state[1])
    end
    (x, _), n = loop(state -> state[2] > 1e-22, step, ([1.0, 0.5, -0.2], 1.0), 1000)
    return vcat(x, sum(x .* (a * x)) / sum(abs2, x)), n
end

const DESIGN = [1.0 0.2; 0.5 -1.0; -0.3 0.8; 0.9 0.4]

function descent(p, loop)
    rate, penalty, y = p[1], p[2], p[3:6]
    slope(w) = permutedims(DESIGN) * (DESIGN * w .- y) .+ penalty .* w .+ w .^ 3
    return loop(w -> sum(abs2, slope(w)) > 1e-18, w -> w .- rate .* slope(w), zeros(2), 2000)
end

function recurrence(p, loop)
    a, b = matrix(p[1:9], 3, 3), matrix(p[10:13], 2, 2)
    step(state) = (tanh.(a * state[1] * b) .+ state[1] ./ 2, state[2] + 1)
    (x, _), n = loop(state -> state[2] < 12, step, ([0.3 -0.5; 0.8 0.1; -0.4 0.9], 0), 64)
    return vec(permutedims(x)), n
end

function continued_fraction(p, loop)
    a, b = p[1], p[2]
    x, n = loop(-3, 9, (i, x) -> a * (i + 1) / (b + sin(x) + x^2), b, 40)
    return [x, x * a], n
end

function pendulum(p, loop)
    function step((y, v))
        v = v - 0.05 / p[1] * sin(y)
        return (y + 0.05 * v, v), [y, v * y]
    end
    ((y, _), rows), n = loop(state -> state[2] > 0, step, (p[2], p[3]), 24)
    return vcat(vec(permutedims(rows)), y), n
end

function loop_of(case)
    case === continued_fraction && return NestedGradients.bounded_fori_loop
    case === pendulum && return NestedGradients.bounded_scan_until
    return NestedGradients.bounded_while_loop
end

function run(case, p, dp, weights)
    loop(checkpoints) = (args...) -> loop_of(case)(
        args[1:(end - 1)]...; max_steps = args[end], checkpoints, return_steps = true
    )
    gradient(p, checkpoints) = Zygote.gradient(p -> sum(weights .* case(p, loop(checkpoints))[1]), p)[1]
    value, steps = case(p, loop(:auto))
    bend = ForwardDiff.derivative(t -> gradient(p .+ t .* dp, :auto), 0.0)
    quantities = (value, gradient(p, :auto), gradient(p, 3), bend, [steps])
    return join([join(q, ' ') for q in quantities], ';')
end
end
"""


def julia_side(julia, case):
    """The five arrays of the Julia twin; ``julia.call`` does it where there is one."""
    if hasattr(julia, "call"):
        return tuple(map(np.asarray, julia.call(case.name, case.p, case.dp, case.weights)))
    from pybridge.julia.runtime import runtime

    ask = runtime().ask
    ask(
        "(isdefined(Main, :CrosscheckLoops) || "
        f'Base.include_string(Main, raw"""{JULIA}""", "crosscheck_loops.jl"); "")'
    )
    vector = lambda a: "[" + ", ".join(repr(float(v)) for v in a) + "]"
    arguments = ", ".join(map(vector, (case.p, case.dp, case.weights)))
    call = f"CrosscheckLoops.run(CrosscheckLoops.{case.name}, {arguments})"
    answer = ask(f'Base.include_string(Main, raw"{call}")', f"crosscheck {case.name}")
    return tuple(np.array([float(v) for v in q.split()]) for q in answer.split(";"))


# ---- the comparison ----


def compare(case, source, got, want, tolerances):
    """Rows (name, quantity, error, tolerance), errors relative to the largest number wanted."""
    rows = []
    for quantity, a, b in zip(QUANTITIES, got, want, strict=True):
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
        same = np.shape(a) == np.shape(b)
        error = float(np.max(np.abs(a - b), initial=0.0)) / scale if same else float("inf")
        rows.append(
            {
                "name": f"bounded {case.loop} loop, {case.name}, {source}",
                "quantity": quantity,
                "error": error,
                "tolerance": tolerances[quantity],
            }
        )
    return rows


def run(julia, *, cases=CASES):
    """Rows (name, quantity, error, tolerance) of every case.

    Args:
      julia: anything but None asks the Julia twin; None compares with a plain loop and its central
        differences instead.
      cases: the cases.
    """
    exact = dict.fromkeys(QUANTITIES, TOLERANCE) | {"steps": 0.0}
    rows = []
    for case in cases:
        ours = python_side(case)
        if julia is None:
            rows += compare(case, "central differences", ours, loop_side(case), DIFFERENCES)
        else:
            rows += compare(case, "Python and Julia", ours, julia_side(julia, case), exact)
    return rows


def record(julia, cases=CASES):
    """{case: {quantity: numbers}} as Julia computes them, for machines without one."""
    sides = {case.name: julia_side(julia, case) for case in cases}
    return {
        name: {q: np.asarray(v).tolist() for q, v in zip(QUANTITIES, side)}
        for name, side in sides.items()
    }


def compare_recorded(path, cases=CASES):
    """Rows of the Python side against what ``record`` wrote."""
    recorded = json.loads(pathlib.Path(path).read_text())["cases"]
    exact = dict.fromkeys(QUANTITIES, TOLERANCE) | {"steps": 0.0}
    rows = []
    for case in cases:
        want = tuple(np.array(recorded[case.name][q]) for q in QUANTITIES)
        rows += compare(case, "recorded from Julia", python_side(case), want, exact)
    return rows
