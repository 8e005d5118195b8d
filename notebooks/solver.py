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
# # A solver that learns its steps
#
# An iterative solver runs until a tolerance is met, so how long it runs depends on the problem and
# on the solver's own parameters. Here these parameters are learned by gradient descent *through*
# the iteration: hyper-gradients of a loop whose length is known only at run time, with a bound.
#
# The equation is $-u'' + u^3 = f$ on $(0, 1)$ with $u = 0$ at both ends, on 31 inner points. The
# solver is Richardson's with a cycle of eight step sizes,
#
# $$u \leftarrow u - \omega_{k \bmod 8}\; r(u), \qquad r(u) = \tfrac{h^2}{4} (-u'' + u^3 - f),$$
#
# until the residual has fallen by a factor of $10^6$. For the linear part the best cycle is known:
# Chebyshev's. It is what the learned one is measured by.

# %% tags=["parameters"]
engine = "jax"  # or "julia": the residual written in Julia, called inside the loop

# %%
import statistics
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax import lax

import pybridge
from pybridge import bounded_while_loop

jax.config.update("jax_enable_x64", True)
plt.rcParams["figure.dpi"] = 100
n, cycle = 31, 8
h = 1 / (n + 1)


# %%
def residual(u, f):
    left, right = jnp.pad(u[:-1], (1, 0)), jnp.pad(u[1:], (0, 1))
    return (2 * u - left - right + h**2 * (u**3 - f)) / 4


RESIDUALS = f"""
function (u, f)
    edge = zero(u[1:1, :])
    left, right = vcat(edge, u[1:end-1, :]), vcat(u[2:end, :], edge)
    (2 .* u .- left .- right .+ {h**2} .* (u .^ 3 .- f)) ./ 4
end
"""
if engine == "julia":
    one = f"let residuals = {RESIDUALS}\n (u, f) -> vec(residuals(u, f))\nend"
    residual = pybridge.julia_function(one, batch=RESIDUALS, samples=(0, 1), name="residual")

# %% [markdown]
# ## The solver
# The loop is written as for `jax.lax.while_loop`, with a bound. It also stops when it diverges, so
# that a bad choice of steps is a large loss and not a NaN.


# %%
def solve(steps, f, tolerance=1e-6, bound=4096, loop=bounded_while_loop):
    """The solution, the logarithm of the residual's reduction, and the number of steps taken."""
    start = residual(jnp.zeros(n), f)

    def reduction(r):
        return jnp.vdot(r, r) / jnp.vdot(start, start)

    def unfinished(state):
        _, r, _ = state
        return (reduction(r) > tolerance**2) & (reduction(r) < 1e6)

    def advance(state):
        u, r, k = state
        u = u - steps[k % cycle] * r
        return u, residual(u, f), k + 1

    u, r, k = loop(unfinished, advance, (jnp.zeros(n), start, 0), bound)
    return u, jnp.log(reduction(r)) / 2, k


def sources(seed, count):
    """Random sums of the first eight sines."""
    waves = np.sin(np.pi * np.arange(1, 9)[:, None] * np.arange(1, n + 1) * h)
    weights = np.random.default_rng(seed).normal(size=(count, 8)) / np.sqrt(np.arange(1, 9))
    return 100 * weights @ waves


smallest, largest = np.sin(np.pi * h / 2) ** 2, np.cos(np.pi * h / 2) ** 2
constant = jnp.full(cycle, 2 / (smallest + largest))
roots = np.cos(np.pi * (np.arange(cycle) + 0.5) / cycle)
chebyshev = 2 / jnp.array(smallest + largest + (largest - smallest) * roots)

# %% [markdown]
# ## Is the gradient right?
# A converged solution does not know how it was found, so the gradient of $\int u$ in $f$ through
# hundreds of steps must be the adjoint method's, $(\partial r / \partial u)^{-T}$ applied to 1.

# %%
f = sources(seed=7, count=1)[0]
through_loop = jax.jit(jax.grad(lambda f: h * jnp.sum(solve(chebyshev, f, tolerance=1e-13)[0])))(f)
u = solve(chebyshev, f, tolerance=1e-13)[0]
r_u, r_f = jax.jacfwd(residual, argnums=(0, 1))(u, f)
adjoint = -r_f.T @ jnp.linalg.solve(r_u.T, jnp.full(n, h))
adjoint_difference = float(jnp.linalg.norm(through_loop - adjoint) / jnp.linalg.norm(adjoint))
print(f"gradient through the loop and by the adjoint method differ by {adjoint_difference:.0e}")

# %% [markdown]
# ## Learning the steps
# The loss is the mean logarithm of the residual's reduction *a step*: the convergence rate. The
# solver is vmapped over eight sources at a time; they need different numbers of steps and share the
# parameters. Training starts from eight step sizes spread by a factor of three.


# %%
def rate(log_steps, f):
    _, reduction, k = jax.vmap(solve, in_axes=(None, 0))(2 * jnp.exp(log_steps), f)
    return jnp.mean(reduction / k)


epochs = 600
adam = optax.adam(optax.cosine_decay_schedule(0.05, epochs))
optimizer = optax.chain(optax.clip_by_global_norm(0.1), adam)


@jax.jit
def learn(log_steps, state, f):
    value, gradient = jax.value_and_grad(rate)(log_steps, f)
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(log_steps, change), state, value


log_steps = jnp.linspace(-0.6, 0.6, cycle)
state, rates = optimizer.init(log_steps), []
for epoch in range(epochs):
    log_steps, state, value = learn(log_steps, state, sources(1000 + epoch, count=8))
    rates.append(float(value))
learned = 2 * jnp.exp(log_steps)

unseen = sources(seed=1, count=64)
count = jax.jit(jax.vmap(lambda steps, f: solve(steps, f)[2], in_axes=(None, 0)))
schedules = {"constant": constant, "Chebyshev": chebyshev, "learned": learned}
mean_steps = {name: float(jnp.mean(count(steps, unseen))) for name, steps in schedules.items()}
for name, steps in mean_steps.items():
    print(f"{name}: {steps:.0f} steps on average, on 64 unseen sources")

# %% [markdown]
# ## What the bound costs
# The gradient of the learned solver for one source, with a growing bound. Beside it the usual way
# around `while_loop`: a `scan` over the whole bound that keeps the state once it has converged.


# %%
def naive(unfinished, advance, state, bound):
    def step(state, _):
        going = unfinished(state)
        return jax.tree.map(lambda a, b: jnp.where(going, a, b), advance(state), state), None

    return lax.scan(step, state, None, bound)[0]


def gradient(loop, bound):
    def objective(steps, f):
        return jnp.sum(solve(steps, f, bound=bound, loop=loop)[0])

    return jax.jit(jax.grad(objective, argnums=(0, 1))).lower(learned, f).compile()


bounds = (512, 1024, 4096, 16384)
programs = {
    (name, bound): gradient(loop, bound)
    for name, loop in (("bounded_while_loop", bounded_while_loop), ("scan", naive))
    for bound in bounds
}
times = {key: [] for key in programs}
for _ in range(21):
    for key, program in programs.items():
        start = time.perf_counter()
        jax.block_until_ready(program(learned, f))
        times[key].append(time.perf_counter() - start)
cost = {key: 1e3 * statistics.median(values) for key, values in times.items()}
memory = {key: p.memory_analysis().temp_size_in_bytes / 2**20 for key, p in programs.items()}
print(f"{int(solve(learned, f)[2])} steps taken; gradient, ms (MiB of temporary memory)")
for bound in bounds:
    row = [f"{name}: {cost[name, bound]:.1f} ({memory[name, bound]:.1f})" for name in ("bounded_while_loop", "scan")]
    print(f"bound {bound}: {', '.join(row)}")


# %%
def history(steps, length=600):
    def step(u, k):
        r = residual(u, f)
        return u - steps[k % cycle] * r, jnp.linalg.norm(r)

    norms = np.array(lax.scan(step, jnp.zeros(n), jnp.arange(length))[1])
    return norms / norms[0]


figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.5, 3), layout="constrained")
for name, steps in schedules.items():
    norms = history(steps)
    left.semilogy(norms[: np.argmax(norms < 1e-6) or None], lw=0.9, label=name)
    middle.semilogy(np.arange(1, cycle + 1), np.sort(steps), "o-", ms=3, lw=0.9)
left.set(xlabel="step", ylabel="residual, relative", ylim=(1e-6, 30))
left.legend()
middle.set(xlabel="place in the cycle, sorted", ylabel="step size")
for name, style in (("bounded_while_loop", "o-"), ("scan", "s--")):
    right.loglog(bounds, [cost[name, bound] for bound in bounds], style, ms=4, label=name)
right.set(xlabel="bound", ylabel="time of a gradient (ms)", ylim=(None, 500))
right.legend(fontsize="small", loc="upper left")
plt.show()

# %%
{
    "adjoint_difference": adjoint_difference,
    "mean_steps": mean_steps,
}
