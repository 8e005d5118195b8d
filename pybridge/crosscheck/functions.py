"""Functions written in both languages, and their derivatives of every order up to the third.

Value, gradient, mixed second derivatives (H_xx v, H_px v) and the derivative of those along (v, w)
are computed on both engines through the public names, compared with each other, and each with
central differences of the order below.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pybridge.crosscheck import Row, relative_error
from pybridge.nested import mixed_vjp, nested_grad

TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "differences": 1e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """``python(x, ps)`` and its Julia text, at one point; ``ps`` may hold integers."""

    name: str
    python: Callable
    julia: str
    x: Any
    ps: Any
    using: tuple[str, ...] = ()


def _random(*shape, seed=0, scale=1.0):
    return scale * np.random.default_rng([seed, *shape]).normal(size=shape)


def _mlp(x, ps):
    h = jnp.tanh(ps["W1"] @ x + ps["b1"])
    return jnp.sum((ps["W2"] @ h + ps["b2"]) ** 2)


def _nested_mlp(x, ps):
    h = jax.nn.sigmoid(ps["first"]["W"] @ x + ps["first"]["b"])
    return jnp.sum(jnp.sin(ps["second"]["W"] @ h)) * ps["scale"]


def _cross_entropy(x, ps):
    z = ps["W"] @ x
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(z, axis=0), ps["labels"][None], 0))


def _convolution(x, ps):
    y = sum(ps["k"][i] * x[i : i + 8] for i in range(3))
    return jnp.sum(jnp.tanh(y + ps["b"]) ** 2)


def _convolution2(x, ps):
    y = sum(ps["k"][i, j] * x[i : i + 4, j : j + 3] for i in range(2) for j in range(3))
    return jnp.sum(jnp.exp(-(y**2)))


def _lennard_jones(x, ps):
    difference = x[:, None] - x[None, :]
    square = jnp.sum(difference**2, axis=-1) + jnp.eye(len(x))
    s6 = (ps["sigma"] ** 2 / square) ** 3
    return 2 * ps["epsilon"] * jnp.sum((s6**2 - s6) * (1 - jnp.eye(len(x))))


def _attention(x, ps):
    q, k, v = ps["Q"] @ x, ps["K"] @ x, ps["V"] @ x
    weights = jax.nn.softmax(k.T @ q, axis=0)
    return jnp.sum((v @ weights) ** 2)


def _layer_norm(x, ps):
    mean = jnp.mean(x, axis=0)
    variance = jnp.mean((x - mean) ** 2, axis=0)
    y = (x - mean) / jnp.sqrt(variance + 1e-5)
    return jnp.sum(jnp.sin(ps["gamma"][:, None] * y + ps["beta"][:, None]))


def _lux_twin(x, ps):
    h = jnp.tanh(ps["layer_1"]["weight"] @ x + ps["layer_1"]["bias"][:, None])
    return jnp.sum((ps["layer_2"]["weight"] @ h + ps["layer_2"]["bias"][:, None]) ** 2)


def _closure(A):
    return lambda x, ps: jnp.sum(jnp.cos(A @ x) * ps)


_POSITIONS = np.array([[0.0, 0.1, 0.0], [1.1, 0.0, 0.2], [0.3, 1.2, 0.1], [0.9, 1.0, 1.1]])

CASES = [
    Case(
        "polynomial",
        lambda x, ps: jnp.sum(ps["a"] * x**3 - ps["b"] * x**2 + ps["c"]),
        "(x, ps) -> sum(ps.a .* x .^ 3 .- ps.b .* x .^ 2 .+ ps.c)",
        _random(4),
        {"a": _random(4, seed=1), "b": 0.7, "c": _random(4, seed=2)},
    ),
    Case(
        "scalar",
        lambda x, ps: x**3 * jnp.exp(-ps * x),
        "(x, p) -> x^3 * exp(-p * x)",
        0.8,
        1.3,
    ),
    Case(
        "trigonometric product",
        lambda x, ps: jnp.sum(jnp.sin(ps["w"] * x)) * jnp.prod(jnp.cos(x)),
        "(x, ps) -> sum(sin.(ps.w .* x)) * prod(cos.(x))",
        _random(3),
        {"w": _random(3, seed=1)},
    ),
    Case(
        "norm and a product",
        lambda x, p: jnp.sum(p) ** 2 / jnp.sqrt(jnp.sum(x**2)) + p[0] * x[1],
        "(x, p) -> sum(p)^2 / sqrt(sum(abs2, x)) + p[1] * x[2]",
        _random(5),
        _random(4),
    ),
    Case(
        "mlp",
        _mlp,
        "(x, ps) -> sum(abs2, ps.W2 * tanh.(ps.W1 * x .+ ps.b1) .+ ps.b2)",
        _random(3),
        {"W1": _random(6, 3), "b1": _random(6), "W2": _random(2, 6), "b2": _random(2)},
    ),
    Case(
        "nested named tuples",
        _nested_mlp,
        """
        (x, ps) -> begin
            h = 1 ./ (1 .+ exp.(-(ps.first.W * x .+ ps.first.b)))
            sum(sin.(ps.second.W * h)) * ps.scale
        end
        """,
        _random(3),
        {
            "first": {"W": _random(5, 3), "b": _random(5)},
            "second": {"W": _random(2, 5)},
            "scale": 0.6,
        },
    ),
    Case(
        "softmax cross-entropy with labels",
        _cross_entropy,
        """
        (x, ps) -> begin
            z = ps.W * x
            s = z .- maximum(z; dims=1)
            -sum((s .- log.(sum(exp.(s); dims=1))) .* (ps.labels' .== 0:3))
        end
        """,
        _random(3, 5),
        {"W": _random(4, 3), "labels": np.array([0, 3, 1, 1, 2], np.int32)},
    ),
    Case(
        "logsumexp",
        lambda x, ps: jax.nn.logsumexp(ps["A"] @ x + ps["b"]),
        "(x, ps) -> (z = ps.A * x .+ ps.b; m = maximum(z); m + log(sum(exp.(z .- m))))",
        _random(3),
        {"A": _random(6, 3), "b": _random(6)},
    ),
    Case(
        "convolution",
        _convolution,
        """
        (x, ps) -> begin
            y = ps.k[1] .* x[1:8] .+ ps.k[2] .* x[2:9] .+ ps.k[3] .* x[3:10]
            sum(abs2, tanh.(y .+ ps.b))
        end
        """,
        _random(10),
        {"k": _random(3), "b": 0.2},
    ),
    Case(
        "convolution in two dimensions",
        _convolution2,
        """
        (x, ps) -> begin
            y = sum(ps.k[i, j] .* x[i:(i + 3), j:(j + 2)] for i in 1:2 for j in 1:3)
            sum(exp.(-(y .^ 2)))
        end
        """,
        _random(5, 5, scale=0.5),
        {"k": _random(2, 3)},
    ),
    Case(
        "closure",
        _closure(np.arange(6.0).reshape(2, 3) / 5),
        """
        let A = [0.0 0.2 0.4; 0.6 0.8 1.0]
            (x, ps) -> sum(cos.(eltype(x).(A) * x) .* ps)
        end
        """,
        _random(3),
        _random(2),
    ),
    Case(
        "quadratic form",
        lambda x, ps: x @ (ps["A"] @ x) * jnp.sum(jnp.exp(ps["b"] * x)),
        "(x, ps) -> x' * (ps.A * x) * sum(exp.(ps.b .* x))",
        _random(3),
        {"A": _random(3, 3), "b": _random(3)},
    ),
    Case(
        "matrix power",
        lambda x, ps: jnp.trace(jnp.linalg.matrix_power(ps + jnp.outer(x, x), 3)),
        "(x, p) -> (M = p .+ x * x'; sum((M * M) .* permutedims(M)))",
        _random(3, scale=0.7),
        _random(3, 3),
    ),
    Case(
        "linear solve",
        lambda x, ps: x @ jnp.linalg.solve(ps["A"].T @ ps["A"] + jnp.diag(x**2 + 1), ps["b"]),
        "(x, ps) -> x' * ((ps.A' * ps.A + Diagonal(x .^ 2 .+ 1)) \\ ps.b)",
        _random(3),
        {"A": _random(3, 3), "b": _random(3)},
        ("LinearAlgebra",),
    ),
    Case(
        "radial basis",
        lambda x, ps: (
            ps["w"] @ jnp.exp(-jnp.sum((ps["centres"] - x[:, None]) ** 2, axis=0) * ps["width"])
        ),
        "(x, ps) -> sum(ps.w .* vec(exp.(-sum(abs2, ps.centres .- x; dims=1) .* ps.width)))",
        _random(2),
        {"w": _random(5), "centres": _random(2, 5), "width": 0.4},
    ),
    Case(
        "Lennard-Jones",
        _lennard_jones,
        """
        (x, ps) -> begin
            n = size(x, 1)
            one = [i == j ? 1 : 0 for i in 1:n, j in 1:n]
            d(k) = x[:, k] .- x[:, k]'
            s6 = (ps.sigma^2 ./ (d(1) .^ 2 .+ d(2) .^ 2 .+ d(3) .^ 2 .+ one)) .^ 3
            2 * ps.epsilon * sum((s6 .^ 2 .- s6) .* (1 .- one))
        end
        """,
        _POSITIONS,
        {"sigma": 0.9, "epsilon": 1.1},
    ),
    Case(
        "attention",
        _attention,
        """
        (x, ps) -> begin
            s = (ps.K * x)' * (ps.Q * x)
            e = exp.(s .- maximum(s; dims=1))
            sum(abs2, (ps.V * x) * (e ./ sum(e; dims=1)))
        end
        """,
        _random(3, 4, scale=0.5),
        {"Q": _random(2, 3), "K": _random(2, 3, seed=1), "V": _random(2, 3, seed=2)},
    ),
    Case(
        "layer norm",
        _layer_norm,
        """
        (x, ps) -> begin
            d = x .- sum(x; dims=1) ./ size(x, 1)
            y = d ./ sqrt.(sum(abs2, d; dims=1) ./ size(x, 1) .+ eltype(x)(1e-5))
            sum(sin.(ps.gamma .* y .+ ps.beta))
        end
        """,
        _random(4, 3),
        {"gamma": _random(4), "beta": _random(4, seed=1)},
    ),
    Case(
        "tuples",
        lambda x, ps: jnp.sum(x[0] * ps[0]) * x[1] ** 2 + ps[1][0] * jnp.sum(jnp.exp(x[0])),
        "(x, ps) -> sum(x[1] .* ps[1]) * x[2]^2 + ps[2][1] * sum(exp.(x[1]))",
        (_random(3), 0.4),
        (_random(3, seed=1), [1.2]),
    ),
    Case(
        "Lux model",
        _lux_twin,
        """
        begin
            model = Chain(Dense(3 => 8, tanh), Dense(8 => 2))
            st = Lux.initialstates(Random.default_rng(), model)
            (x, ps) -> sum(abs2, first(model(x, ps, st)))
        end
        """,
        _random(3, 5),
        {
            "layer_1": {"weight": _random(8, 3), "bias": _random(8)},
            "layer_2": {"weight": _random(2, 8), "bias": _random(2)},
        },
        ("Lux", "Random"),
    ),
]

QUANTITIES = ("value", "gradient", "mixed second", "third")


def _cast(tree, dtype):
    def cast(leaf):
        leaf = jnp.asarray(leaf)
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def _direction(tree, seed):
    rng = np.random.default_rng(seed)

    def tangent(leaf):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
        return np.zeros(leaf.shape, jax.dtypes.float0)

    return jax.tree.map(tangent, tree)


def derivatives(f, x, ps):
    """The four quantities of ``f`` at (x, ps), along fixed random directions."""
    v, w = _direction(x, 1), _direction(ps, 2)
    mixed = lambda x, ps: mixed_vjp(f, x, v, ps)
    return dict(
        zip(
            QUANTITIES,
            (f(x, ps), nested_grad(f, x, ps), mixed(x, ps), jax.jvp(mixed, (x, ps), (v, w))[1]),
        )
    )


def differences(f, x, ps):
    """Central differences of the order below: of ``f``, of its gradient, of its mixed derivatives."""
    v, w = _direction(x, 1), _direction(ps, 2)

    def move(tree, tangent, h):
        return jax.tree.map(
            lambda a, t: a if t.dtype == jax.dtypes.float0 else a + h * t, tree, tangent
        )

    def central(g, dx, dps=None, h=1e-5):
        ahead = g(move(x, dx, h), ps if dps is None else move(ps, dps, h))
        behind = g(move(x, dx, -h), ps if dps is None else move(ps, dps, -h))
        return jax.tree.map(
            lambda a, b: a if a.dtype == jax.dtypes.float0 else (a - b) / (2 * h), ahead, behind
        )

    leaves, tree = jax.tree.flatten(x)
    gradient = []
    for i, leaf in enumerate(leaves):
        entries = []
        for j in range(leaf.size):
            unit = [jnp.zeros_like(a) for a in leaves]
            unit[i] = unit[i].reshape(-1).at[j].set(1.0).reshape(leaf.shape)
            entries.append(central(f, jax.tree.unflatten(tree, unit)))
        gradient.append(jnp.stack(entries).reshape(leaf.shape))
    both = lambda x, ps: nested_grad(f, x, ps, argnums=(0, 1))
    mixed = lambda x, ps: mixed_vjp(f, x, v, ps)
    return dict(
        zip(
            QUANTITIES[1:],
            (jax.tree.unflatten(tree, gradient), central(both, v), central(mixed, v, w)),
        )
    )


def run(julia=None, cases=None) -> list[Row]:
    """Rows for every case: JAX against differences; with Julia, the engines against each other in
    float64 and float32, and Julia against the same differences."""
    rows = []
    with jax.enable_x64(True):
        for case in CASES if cases is None else cases:
            x, ps = _cast(case.x, jnp.float64), _cast(case.ps, jnp.float64)
            ours = derivatives(case.python, x, ps)
            reference = differences(case.python, x, ps)
            rows += _compare(case.name, "jax, differences", ours, reference, "differences")
            if julia is None:
                continue
            f = julia.function(case.julia, using=list(case.using), name=case.name)
            theirs = derivatives(f, x, ps)
            rows += _compare(case.name, "julia, differences", theirs, reference, "differences")
            rows += _compare(case.name, "julia, jax, float64", theirs, ours, "float64")
            x, ps = _cast(case.x, jnp.float32), _cast(case.ps, jnp.float32)
            rows += _compare(
                case.name,
                "julia, jax, float32",
                derivatives(f, x, ps),
                derivatives(case.python, x, ps),
                "float32",
            )
    return rows


def _compare(name, sides, got, want, tolerance):
    return [
        Row(name, f"{quantity} ({sides})", relative_error(got[quantity], want[quantity]), limit)
        for limit in (TOLERANCE[tolerance],)
        for quantity in want
    ]


def record(julia) -> dict:
    """The Julia side's values in float64 by case and quantity, as lists for a JSON file."""
    out = {}
    with jax.enable_x64(True):
        for case in CASES:
            f = julia.function(case.julia, using=list(case.using), name=case.name)
            got = derivatives(f, _cast(case.x, jnp.float64), _cast(case.ps, jnp.float64))
            out[case.name] = {q: _plain(got[q]) for q in QUANTITIES}
    return out


def compare_recorded(path) -> list[Row]:
    """The JAX side against values that ``record`` wrote: real Julia values without a Julia."""
    with open(path) as file:
        recorded = json.load(file)["cases"]
    rows = []
    with jax.enable_x64(True):
        for case in CASES:
            got = derivatives(case.python, _cast(case.x, jnp.float64), _cast(case.ps, jnp.float64))
            for quantity in QUANTITIES:
                error = relative_error(
                    _arrays(got[quantity]), _arrays(recorded[case.name][quantity])
                )
                rows.append(Row(case.name, f"{quantity} (recorded)", error, TOLERANCE["float64"]))
    return rows


def _plain(tree):
    return [
        np.asarray(leaf).tolist()
        for leaf in jax.tree.leaves(tree)
        if leaf.dtype != jax.dtypes.float0
    ]


def _arrays(tree):
    if isinstance(tree, list):
        return [np.asarray(leaf) for leaf in tree]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0]
