"""reduce_window under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from windows_reference import OURS

from pybridge import reduce_window

pytestmark = pytest.mark.usefixtures("x64", "unoptimized")


@pytest.mark.parametrize(
    ("name", "window"),
    [*((name, (2, 2)) for name in OURS), *((name, (6, 7)) for name in ("max", "mul", "user"))],
)
def test_vmap_in_every_nesting(name, window):
    rng = np.random.default_rng(0)
    xs, inits = rng.normal(size=(3, 8, 9)), rng.normal(size=3)
    f = lambda x, i: jnp.sin(
        reduce_window(x, i, OURS[name], window, (2, 1), [(1, 0), (0, 1)])
    ).sum()
    gradient = jax.jit(jax.grad(f, argnums=(0, 1)))
    want = [gradient(x, i) for x, i in zip(xs, inits)]
    for program in (jax.vmap(gradient), jax.jit(jax.vmap(jax.jit(gradient)))):
        got = program(xs, inits)
        np.testing.assert_allclose(got[0], np.stack([w[0] for w in want]), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(got[1], np.stack([w[1] for w in want]), rtol=1e-9, atol=1e-12)
    over = jax.grad(lambda xs, inits: jax.vmap(f)(xs, inits).sum(), argnums=(0, 1))(xs, inits)
    np.testing.assert_allclose(over[0], got[0], rtol=1e-9, atol=1e-12)
    one = jax.vmap(f, in_axes=(None, 0))(xs[0], inits)
    np.testing.assert_allclose(one, [f(xs[0], i) for i in inits], rtol=1e-12)
    last = jax.vmap(f, in_axes=(2, None))(np.moveaxis(xs, 0, 2), inits[0])
    np.testing.assert_allclose(last, [f(x, inits[0]) for x in xs], rtol=1e-12)


@pytest.mark.parametrize("name", ["max", "user", "add"])
def test_vmap_adds_no_loop(name):
    """The number of equations and loop trips does not depend on the batch."""

    def trips(jaxpr):
        counts = []
        for eqn in jaxpr.eqns:
            counts.append((eqn.primitive.name, eqn.params.get("length")))
            for sub in jaxprs_in_params(eqn.params):
                counts += trips(sub)
        return [c for c in counts if c[0] in ("scan", "while")]

    f = lambda x, i: reduce_window(x, i, OURS[name], (2, 3)).sum()
    gradient = jax.grad(f, argnums=(0, 1))
    one = jax.make_jaxpr(gradient)(jnp.ones((5, 6)), 0.5)
    many = jax.make_jaxpr(jax.vmap(gradient))(jnp.ones((100, 5, 6)), jnp.ones(100))
    assert trips(one.jaxpr) == trips(many.jaxpr)


def test_linearize_checkpoint_scan_and_custom_rules_around_it():
    x = jnp.array([1.0, 3.0, 2.0, 5.0])
    f = lambda x: reduce_window(x, 0.0, lax.max, (2,))
    want = jax.jacobian(f)(x)
    _, linear = jax.linearize(f, x)
    np.testing.assert_array_equal(jax.vmap(linear, out_axes=1)(jnp.eye(4)), want)
    np.testing.assert_array_equal(jax.jacrev(jax.checkpoint(f))(x), want)
    np.testing.assert_array_equal(jax.jacfwd(jax.checkpoint(f))(x), want)
    scanned = lambda x: lax.scan(lambda c, _: (c + f(x).sum(), None), 0.0, None, 3)[0]
    np.testing.assert_array_equal(jax.grad(scanned)(x), 3 * want.sum(0))


@pytest.mark.parametrize(
    ("name", "window"),
    [*((name, 2) for name in OURS), *((name, 40) for name in ("max", "mul", "user"))],
)
def test_inside_shard_map(name, window):
    """Loops carry what varies over the mesh; with check_vma, which is shard_map's default."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec
    x = jnp.arange(12.0).reshape(3, 4) / 10
    pool = lambda x, i: reduce_window(x, i, OURS[name], (1, window), None, "SAME")
    sharded = jax.shard_map(pool, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d"))
    gradient = lambda f: jax.jit(jax.grad(lambda x, i: f(x, i).sum(), (0, 1)))(x, 0.5)
    for got, want in zip(gradient(sharded), gradient(pool)):
        np.testing.assert_allclose(got, want, rtol=1e-12)
