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
# # Forces from energies
#
# A model of the energy of a copper cluster is learned from *forces only*. Forces are a gradient,
#
# $$F(x; p) = -\nabla_x E(x; p),$$
#
# so a loss on forces is a loss on an inner gradient, and each training step differentiates it in
# the parameters $p$: the mixed second derivatives $\partial_p \nabla_x E$ that `nested_grad` is
# for. Learning $E$ rather than $F$ pays twice: the energy comes along, up to a constant, and since
# the learned forces are the gradient of something, a trajectory conserves that something.
#
# The data are made with the effective-medium potential (EMT) of
# [ASE](https://wiki.fysik.dtu.dk/ase/), a many-body potential for metals. Units: angstrom,
# electronvolt, ASE's unit of time (1 fs is 0.098).

# %% tags=["parameters"]
engine = "jax"  # or "julia": the same energy written in Julia, in the same program

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from ase import units
from ase.calculators.emt import EMT
from ase.cluster import Icosahedron
from ase.md.langevin import Langevin

import pybridge
from pybridge import nested_grad

jax.config.update("jax_enable_x64", True)
plt.rcParams["figure.dpi"] = 100

# %% [markdown]
# ## Data
# Molecular dynamics of Cu$_{13}$ at three temperatures, a frame every 50 fs. The first three
# quarters of each run are for training, the last for the test.


# %%
def frames(temperature, count, seed):
    cluster = Icosahedron("Cu", 2)
    cluster.calc = EMT()
    heat_bath = Langevin(
        cluster,
        5 * units.fs,
        temperature_K=temperature,
        friction=0.02 / units.fs,
        rng=np.random.RandomState(seed),
        fixcm=False,
    )
    heat_bath.run(100)
    out = []
    for _ in range(count):
        heat_bath.run(10)
        energy = cluster.get_potential_energy()
        out.append((cluster.get_positions(), cluster.get_forces(), energy))
    return [np.array(part) for part in zip(*out)]


runs = [frames(temperature, 80, seed) for seed, temperature in enumerate((300, 600, 900))]
x_train, f_train, _ = (np.concatenate([part[:60] for part in parts]) for parts in zip(*runs))
x_test, f_test, e_test = (np.concatenate([part[60:] for part in parts]) for parts in zip(*runs))
x_train.shape, x_test.shape, f"forces: standard deviation {f_test.std():.2f} eV/A"

# %% [markdown]
# ## The model
# Each atom sees its neighbours through a few Gaussians of their distances, smoothly cut off; a
# small network turns what it sees into the atom's energy, and the energies are summed (Behler and
# Parrinello, 2007). Distances know nothing of rotations and sums nothing of the order of atoms, so
# the energy has the symmetries of the true one. `energy` takes positions `(atoms, 3)`; in Julia it
# is written for a stack of them, samples last, so that a `vmap` is one call.

# %%
centres = np.linspace(1.8, 6.0, 16)
width, cutoff = 0.28, 6.5


def energy(x, ps):
    itself = jnp.eye(len(x))
    r = jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, axis=-1) + itself)
    near = jnp.where(r < cutoff, (1 + jnp.cos(jnp.pi * r / cutoff)) / 2, 0) * (1 - itself)
    h = jnp.sum(jnp.exp(-((r[..., None] - centres) ** 2) / (2 * width**2)) * near[..., None], 1)
    for layer in ps[:-1]:
        h = jnp.tanh(h @ layer["W"] + layer["b"])
    return jnp.sum(h @ ps[-1]["W"] + ps[-1]["b"])


ENERGIES = f"""
function (x, ps)
    atoms, samples = size(x, 1), size(x, 3)
    itself = [i == j for i in 1:atoms, j in 1:atoms]
    d = reshape(x, atoms, 1, 3, samples) .- reshape(x, 1, atoms, 3, samples)
    r = sqrt.(sum(abs2, d; dims=3) .+ itself)
    near = ifelse.(r .< {cutoff}, (1 .+ cospi.(r ./ {cutoff})) ./ 2, zero.(r)) .* .!itself
    c = reshape({list(map(float, centres))}, 1, 1, :)
    g = sum(exp.(.-(r .- c) .^ 2 ./ {2 * width**2}) .* near; dims=2)
    h = reshape(permutedims(g, (3, 1, 4, 2)), {len(centres)}, atoms * samples)
    for layer in Base.front(ps)
        h = tanh.(transpose(layer.W) * h .+ layer.b)
    end
    e = transpose(last(ps).W) * h .+ last(ps).b
    vec(sum(reshape(e, atoms, samples); dims=1))
end
"""
if engine == "julia":
    single = (
        f"let energies = {ENERGIES}\n (x, ps) -> only(energies(reshape(x, size(x)..., 1), ps))\nend"
    )
    energy = pybridge.julia_function(single, batch=ENERGIES, name="energy")


def initial(seed, sizes=(len(centres), 32, 32, 1)):
    rng = np.random.default_rng(seed)
    return [
        {"W": rng.normal(size=(m, n)) / np.sqrt(m), "b": np.zeros(n)}
        for m, n in zip(sizes[:-1], sizes[1:])
    ]


# %% [markdown]
# ## Training on forces


# %%
def forces(x, ps):
    return -nested_grad(energy, x, ps)


many_forces = jax.vmap(forces, in_axes=(0, None))


def loss(ps, x, f):
    return jnp.mean((many_forces(x, ps) - f) ** 2)


steps, batch = 2500, 16
adam = optax.adam(optax.cosine_decay_schedule(5e-3, steps))


@jax.jit
def train_step(ps, state, x, f):
    value, gradient = jax.value_and_grad(loss)(ps, x, f)
    change, state = adam.update(gradient, state, ps)
    return optax.apply_updates(ps, change), state, value


ps = initial(seed=0)
state, order, losses = adam.init(ps), np.random.default_rng(0), []
for _ in range(steps):
    pick = order.choice(len(x_train), batch, replace=False)
    ps, state, value = train_step(ps, state, x_train[pick], f_train[pick])
    losses.append(float(value))

f_model = jax.jit(many_forces)(x_test, ps)
force_error = float(np.sqrt(np.mean((f_model - f_test) ** 2)) / f_test.std())
print(f"root-mean-square force error on the test frames: {100 * force_error:.1f} % of their spread")

# %% [markdown]
# ## The energy, which the training never saw
# Forces fix an energy up to a constant; the test frames' mean gives it.

# %%
e_model = jax.jit(jax.vmap(energy, in_axes=(0, None)))(x_test, ps)
e_model = e_model - jnp.mean(e_model - e_test)
energy_error = float(np.std(e_model - e_test) / e_test.std())
print(
    f"energy error: {1e3 * np.std(e_model - e_test):.1f} meV, {100 * energy_error:.1f} % of the spread"
)

# %% [markdown]
# ## A trajectory with the learned forces
# Velocity Verlet from the perfect icosahedron with velocities of 800 K, for 2 ps. The learned
# forces are the gradient of the learned energy, so what is left of the fluctuation of the total
# energy is the integrator's, which is of second order: half the time step, a quarter of it.

# %%
mass = Icosahedron("Cu", 2).get_masses()[0]


def total_energy(x, v, ps):
    return energy(x, ps) + mass / 2 * jnp.sum(v**2)


def trajectory(x, v, ps, dt, length):
    def verlet(carry, _):
        x, v, a = carry
        v = v + dt / 2 * a
        x = x + dt * v
        a = forces(x, ps) / mass
        v = v + dt / 2 * a
        return (x, v, a), (total_energy(x, v, ps), mass / 2 * jnp.sum(v**2))

    return jax.lax.scan(verlet, (x, v, forces(x, ps) / mass), None, length)[1]


x0 = Icosahedron("Cu", 2).get_positions()
v0 = np.random.default_rng(5).normal(size=x0.shape) * np.sqrt(units.kB * 800 / mass)
time_steps = (4, 2, 1)  # fs
paths = {
    dt: jax.jit(trajectory, static_argnums=4)(x0, v0, ps, dt * units.fs, 2000 // dt)
    for dt in time_steps
}
fluctuation = [float(np.std(total)) for total, _ in paths.values()]
exchanged = float(np.ptp(paths[1][1]))
for dt, size in zip(time_steps, fluctuation):
    print(f"{dt} fs: the total energy fluctuates by {1e3 * size:.3f} meV; {exchanged:.2f} eV move")

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.5, 3), layout="constrained")
left.plot(f_test.ravel(), np.ravel(f_model), ".", ms=2)
left.axline((0, 0), slope=1, color="k", lw=0.6)
left.set(xlabel="force, EMT (eV/Å)", ylabel="force, learned (eV/Å)")
middle.plot(e_test, e_model, ".", ms=4)
middle.axline((e_test[0], e_test[0]), slope=1, color="k", lw=0.6)
middle.set(xlabel="energy, EMT (eV)", ylabel="energy, learned + constant (eV)")
for dt, (total, _) in paths.items():
    right.plot(
        np.arange(1, len(total) + 1) * dt / 1e3, 1e3 * (total - total[0]), lw=0.8, label=f"{dt} fs"
    )
right.set(xlabel="time (ps)", ylabel="change of total energy (meV)")
right.legend(title="time step")
plt.show()

# %%
{
    "force_error": force_error,
    "energy_error": energy_error,
    "fluctuation_over_exchanged": fluctuation[-1] / exchanged,
    "fluctuation_at_half_step": [a / b for a, b in zip(fluctuation, fluctuation[1:])],
}
