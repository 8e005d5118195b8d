# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A physics-informed network for Burgers' equation
#
# $$u_t + u\,u_x = \nu\,u_{xx}, \qquad u(0, x) = -\sin \pi x, \qquad u(t, \pm 1) = 0, \qquad
#   \nu = 0.02.$$
#
# A network's own derivatives in $t$ and $x$ enter its loss, and training differentiates them in the
# parameters: one order more. The exact solution is known (Cole and Hopf turned the equation into
# the heat equation), so that the error is an error and not a residual.
#
# The network is a plain JAX function here. With `engine = "julia"` the same network is trained a
# second time as a Lux model, evaluated and differentiated by Julia inside the same jitted step,
# from the same parameters.

# %% tags=["parameters"]
engine = "jax"  # or "julia": both, beside each other

# %%
import itertools
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import pybridge
from pybridge import hvp, nested_value_and_grad

jax.config.update("jax_enable_x64", True)
plt.rcParams["figure.dpi"] = 90
viscosity = 0.02

# %% [markdown]
# ## The exact solution
# Cole and Hopf's integral, $u = -\int \sin \pi(x - \eta)\, w\, d\eta / \int w\, d\eta$ with
# $w = \exp(-\cos \pi (x - \eta) / 2 \pi \nu - \eta^2 / 4 \nu t)$, by Gauss and Hermite's rule.

# %%
nodes, weights = np.polynomial.hermite.hermgauss(80)


def exact(t, x):
    y = x[..., None] - 2 * np.sqrt(viscosity * t)[..., None] * nodes
    w = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * viscosity))
    return -np.sum(np.sin(np.pi * y) * w, axis=-1) / np.sum(w, axis=-1)


# %% [markdown]
# ## The network, and the equation
# $u = -\sin \pi x + t\,(1 - x^2)\,N(t, x)$ has the right initial and boundary values whatever $N$
# is. `nested_value_and_grad` gives $u$, $u_t$, $u_x$, and `hvp` along $x$ gives $u_{xx}$; both can
# be differentiated further, and `vmap` over the points is one call into the engine.

# %%
sizes = (2, 32, 32, 32, 1)


def initial(seed):
    """Glorot's normal weights, named as Lux names the layers of a Chain."""
    rng = np.random.default_rng(seed)
    return {
        f"layer_{i}": {"weight": rng.normal(size=(n, m)) * np.sqrt(2 / (m + n)), "bias": np.zeros(n)}
        for i, (m, n) in enumerate(itertools.pairwise(sizes), 1)
    }


def jax_network(z, ps):
    *hidden, last = ps.values()
    for layer in hidden:
        z = jnp.tanh(layer["weight"] @ z + layer["bias"])
    return last["weight"] @ z + last["bias"]


def solution(network):
    def u(z, ps):
        t, x = z
        return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * network(z, ps)[0]

    return u


def residual(u, z, ps):
    value, (u_t, u_x) = nested_value_and_grad(u, z, ps)
    _, u_xx = hvp(u, z, jnp.array([0.0, 1.0]), ps)
    return u_t + value * u_x - viscosity * u_xx


# %% [markdown]
# ## Training
# Points are drawn anew for each step.


# %%
def train(network, steps, total=5000, points=512):
    u = solution(network)
    adam = optax.adam(optax.cosine_decay_schedule(5e-3, total))

    def loss(ps, z):
        return jnp.mean(jax.vmap(residual, in_axes=(None, 0, None))(u, z, ps) ** 2)

    @jax.jit
    def step(ps, state, z):
        value, gradient = jax.value_and_grad(loss)(ps, z)
        change, state = adam.update(gradient, state, ps)
        return optax.apply_updates(ps, change), state, value

    ps = initial(seed=0)
    state, rng, losses, times = adam.init(ps), np.random.default_rng(0), [], []
    for _ in range(steps):
        z = rng.random((points, 2)) * [1, 2] - [0, 1]
        start = time.perf_counter()
        ps, state, value = step(ps, state, z)
        losses.append(float(value))
        times.append(time.perf_counter() - start)
    return ps, np.array(losses), float(np.median(times[1:]))


ps, losses, seconds = train(jax_network, steps=5000)
print(f"JAX: {1e3 * seconds:.1f} ms a step")

# %%
t, x = np.meshgrid(np.linspace(0.01, 1, 50), np.linspace(-1, 1, 201), indexing="ij")
grid = np.stack([t.ravel(), x.ravel()], axis=1)
u_exact = exact(t, x)
u_model = jax.vmap(solution(jax_network), in_axes=(0, None))(grid, ps).reshape(t.shape)
error = float(np.linalg.norm(u_model - u_exact) / np.linalg.norm(u_exact))
print(f"error against the exact solution: {100 * error:.2f} % (relative, root mean square)")
numbers = {"error": error}

# %% [markdown]
# ## The same with Lux
# `LuxModel` is a JAX function of a JAX pytree; nothing else of the program changes. Loss curves
# that start from the same parameters must agree to rounding, which training then magnifies. (The
# figure was drawn with `engine = "julia"`.)

# %%
curves = {"JAX": losses}
if engine == "julia":
    layers = [f"Dense({m} => {n}, tanh)" for m, n in itertools.pairwise(sizes[:-1])]
    model = pybridge.LuxModel(f"Chain({', '.join(layers)}, Dense({sizes[-2]} => {sizes[-1]}))")

    def lux_network(z, ps):
        y, _ = model(z, ps)
        return y

    _, lux_losses, lux_seconds = train(lux_network, steps=500)
    curves["Lux, in Julia"] = lux_losses
    first = slice(50)
    difference = float(np.max(np.abs(lux_losses[first] / losses[first] - 1)))
    print(f"Lux: {1e3 * lux_seconds:.1f} ms a step; JAX: {1e3 * seconds:.1f} ms")
    print(f"greatest relative difference of the losses over 50 steps: {difference:.1e}")
    numbers |= {"difference": difference, "seconds": {"jax": seconds, "julia": lux_seconds}}

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.5, 3), layout="constrained")
for row in (0, 12, 24, 49):
    (line,) = left.plot(x[row], u_exact[row], lw=3, alpha=0.35)
    left.plot(x[row], u_model[row], "--", lw=1, color=line.get_color(), label=f"t = {t[row, 0]:.2f}")
left.set(xlabel="x", ylabel="u (wide: exact, dashed: network)")
left.legend(fontsize="small")
picture = middle.pcolormesh(t, x, np.abs(u_model - u_exact), shading="auto", rasterized=True)
figure.colorbar(picture, label="|error|")
middle.set(xlabel="t", ylabel="x")
for (name, curve), style in zip(curves.items(), ("-", "--")):
    right.loglog(np.arange(1, len(curve) + 1), curve, style, lw=0.8, label=name)
right.set(xlabel="step", ylabel="mean squared residual")
right.legend()
plt.show()

# %%
numbers
