"""``pybridge demo``: double backpropagation on real images, on either engine.

scikit-learn's digits (1,797 images of 8x8 pixels, shipped in that package) are classified by a small
network trained on

    cross-entropy + strength * |grad_x cross-entropy|^2        (Drucker and Le Cun, 1992),

so that each step differentiates an inner gradient in the parameters: the mixed second derivatives
that ``nested_grad`` is for. A network with small input gradients is harder to fool, and the table
shows by how much: accuracy on clean images, under Gaussian noise, and under one FGSM step.
"""

import contextlib
import dataclasses
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pybridge.nested import nested_grad, nested_value_and_grad

SIZES = (64, 64, 64, 10)
# The same network and loss in Julia; the Python twin is `cross_entropy` below.
LUX_MODEL = "Chain(Dense(64 => 64, tanh), Dense(64 => 64, tanh), Dense(64 => 10))"
JULIA_LOSS = f"""
begin
    model = {LUX_MODEL}
    st = Lux.initialstates(Random.default_rng(), model)
    function cross_entropy(x, ps)
        logits = first(model(x, ps.params, st))
        shifted = logits .- maximum(logits; dims=1)
        logp = shifted .- log.(sum(exp.(shifted); dims=1))
        -sum(logp .* (ps.labels' .== 0:9))
    end
end
"""


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images as columns in [0, 1], (64, n) float; labels, (n,) int32."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_digits(dtype=np.float32) -> Digits:
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = model_selection.train_test_split(
        images / 16, labels, test_size=0.25, random_state=0, stratify=labels
    )
    column = lambda x: np.ascontiguousarray(x.T, dtype)
    return Digits(
        column(x_train), y_train.astype(np.int32), column(x_test), y_test.astype(np.int32)
    )


def initial_parameters(seed, dtype=np.float32):
    """Glorot-normal weights and zero biases, named as Lux names the layers of a Chain."""
    rng = np.random.default_rng(seed)
    return {
        f"layer_{i + 1}": {
            "weight": (rng.normal(size=(n, m)) * np.sqrt(2 / (m + n))).astype(dtype),
            "bias": np.zeros(n, dtype),
        }
        for i, (m, n) in enumerate(itertools.pairwise(SIZES))
    }


def logits(params, x):
    """``x``: (64, n) images as columns. Returns (10, n)."""
    layers = list(params.values())
    for layer in layers[:-1]:
        x = jnp.tanh(layer["weight"] @ x + layer["bias"][:, None])
    return layers[-1]["weight"] @ x + layers[-1]["bias"][:, None]


def cross_entropy(x, ps):
    """The sum over the batch. ``ps`` holds the parameters and the integer labels."""
    logp = jax.nn.log_softmax(logits(ps["params"], x), axis=0)
    return -jnp.sum(jnp.take_along_axis(logp, ps["labels"][None], axis=0))


def objective(loss, strength, params, x, labels):
    """Mean cross-entropy and penalty. Samples do not mix in ``loss``, so that the gradient of its sum
    in x is every sample's own gradient."""
    ps = {"params": params, "labels": labels}
    value, gradient = nested_value_and_grad(loss, x, ps)
    return (value + strength * jnp.sum(gradient**2)) / x.shape[1]


def optimizer(steps):
    import optax

    return optax.adam(optax.cosine_decay_schedule(3e-3, steps))


def train(loss, data, seed, *, strength, steps, batch, progress=lambda: None, dtype=np.float32):
    """Returns the parameters, the loss of every step, and the median time of one (seconds)."""
    import optax

    params = initial_parameters(seed, dtype)
    update = optimizer(steps)
    state = update.init(params)

    @jax.jit
    def step(params, state, x, labels):
        value, gradient = jax.value_and_grad(functools.partial(objective, loss, strength))(
            params, x, labels
        )
        change, state = update.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    order = np.random.default_rng(seed)
    losses, times = [], []
    for _ in range(steps):
        pick = order.choice(data.x_train.shape[1], batch, replace=False)
        start = time.perf_counter()
        params, state, value = step(params, state, data.x_train[:, pick], data.y_train[pick])
        losses.append(float(value))
        times.append(time.perf_counter() - start)
        progress()
    return params, np.array(losses), float(np.median(times[1:]))


@jax.jit
def accuracy(params, x, labels):
    return jnp.mean(jnp.argmax(logits(params, x), axis=0) == labels)


@jax.jit
def fgsm(params, x, labels, size):
    """One step of the fast gradient sign method (Goodfellow et al., 2015)."""
    return x + size * jnp.sign(nested_grad(cross_entropy, x, {"params": params, "labels": labels}))


NOISE, FGSM = 0.3, 0.1


def evaluate(params, data, seed):
    """Test accuracy: clean, under Gaussian noise, under one FGSM step."""
    x, y = data.x_test, data.y_test
    noise = NOISE * np.random.default_rng(1000 + seed).normal(size=x.shape).astype(x.dtype)
    return (
        float(accuracy(params, x, y)),
        float(accuracy(params, x + noise, y)),
        float(accuracy(params, fgsm(params, x, y, FGSM), y)),
    )


def run(*, engine="jax", seeds=3, steps=1000, batch=128, strength=1.0, out="pybridge-demo.png"):
    """Train, print and draw; returns the means by model, for the tests. See ``pybridge demo``."""
    from rich.console import Console

    console = Console()
    if engine == "julia":
        return _against_julia(console, batch=batch, strength=strength, out=out)
    data = load_digits()
    scores, curves, models = {}, {}, {}
    with _progress(console, 2 * seeds * steps) as tick:
        for name, lam in (("plain", 0.0), ("regularised", strength)):
            results = []
            for seed in range(seeds):
                params, losses, _ = train(
                    cross_entropy, data, seed, strength=lam, steps=steps, batch=batch, progress=tick
                )
                results.append(evaluate(params, data, seed))
            scores[name], curves[name], models[name] = np.mean(results, axis=0), losses, params
    _print_table(console, scores, seeds)
    _figure(curves, models, data, out)
    console.print(f"figure: {out}")
    return scores


def _against_julia(console, *, batch, strength, out, steps=50):
    """The same training on both engines from the same parameters, in float64."""
    from pybridge.engines.julia import julia_function

    with jax.enable_x64(True):
        data = load_digits(np.float64)
        julia_loss = julia_function(JULIA_LOSS, using=["Lux", "Random"], name="cross_entropy")
        results = {}
        with _progress(console, 2 * steps) as tick:
            for name, loss in (("jax", cross_entropy), ("julia", julia_loss)):
                results[name] = train(
                    loss,
                    data,
                    0,
                    strength=strength,
                    steps=steps,
                    batch=batch,
                    progress=tick,
                    dtype=np.float64,
                )
    (_, a, time_a), (_, b, time_b) = results["jax"], results["julia"]
    difference = float(np.max(np.abs(a - b) / np.abs(a)))
    console.print(
        f"greatest relative difference of the loss curves, {steps} steps: {difference:.1e}"
    )
    console.print(f"time a step: jax {1e3 * time_a:.2f} ms, julia {1e3 * time_b:.2f} ms")
    _two_curves({"JAX engine": a, "Julia engine": b}, out)
    console.print(f"figure: {out}")
    return {"difference": difference, "jax": time_a, "julia": time_b}


@contextlib.contextmanager
def _progress(console, total):
    from rich import progress

    columns = (
        progress.TextColumn("training"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=total)
        yield lambda: bar.advance(task)


def _print_table(console, scores, seeds):
    from rich.table import Table

    table = Table(title=f"test accuracy on digits, mean of {seeds} seeds")
    for heading in ("model", "clean", f"noise {NOISE}", f"FGSM {FGSM}"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, values in scores.items():
        table.add_row(name, *(f"{100 * v:.1f} %" for v in values))
    console.print(table)


def _figure(curves, models, data, out):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, losses in curves.items():
        left.semilogy(losses, label=name, lw=0.8)
    left.set(xlabel="step", ylabel="training objective")
    left.legend()
    sizes = np.linspace(0, 0.25, 11)
    for name, params in models.items():
        attacked = [
            accuracy(params, fgsm(params, data.x_test, data.y_test, size), data.y_test)
            for size in sizes
        ]
        right.plot(sizes, attacked, "o-", ms=3, label=name)
    right.set(xlabel="FGSM step (pixels are 0 to 1)", ylabel="test accuracy", ylim=(0, 1.02))
    right.legend()
    figure.savefig(out, dpi=120)


def _two_curves(curves, out):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--")):
        axes.semilogy(losses, style, label=name)
    axes.set(xlabel="step", ylabel="training objective")
    axes.legend()
    figure.savefig(out, dpi=120)
