"""Lux models as JAX functions, against the same layers written in NumPy and JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pybridge import JuliaError, LuxModel, nested_grad

MLP = "Chain(Dense(2 => 8, tanh), Dense(8 => 3))"


def mlp(x, ps):
    h = jnp.tanh(ps["layer_1"]["weight"] @ x + ps["layer_1"]["bias"])
    return ps["layer_2"]["weight"] @ h + ps["layer_2"]["bias"]


@pytest.fixture(scope="module")
def model(julia):
    return LuxModel(MLP)


def test_setup(model):
    ps, st = model.setup(3)
    assert {k: {n: a.shape for n, a in v.items()} for k, v in ps.items()} == {
        "layer_1": {"weight": (8, 2), "bias": (8,)},
        "layer_2": {"weight": (3, 8), "bias": (3,)},
    }
    assert st == {}
    assert ps["layer_1"]["weight"].dtype == np.float32
    again, _ = model.setup(3)
    other, _ = model.setup(4)
    np.testing.assert_array_equal(ps["layer_1"]["weight"], again["layer_1"]["weight"])
    assert not np.array_equal(ps["layer_1"]["weight"], other["layer_1"]["weight"])


def test_call_and_derivatives(model, x64):
    ps, st = model.setup(0, dtype="float64")
    x = jnp.array([0.3, -0.7])
    y, after = model(x, ps, st)
    assert after == st
    np.testing.assert_allclose(y, mlp(x, ps), rtol=1e-12)

    def penalty(call):
        loss = lambda x, ps: jnp.sum(call(x, ps) ** 2)
        return jax.jit(jax.grad(lambda ps: jnp.sum(nested_grad(loss, x, ps) ** 2)))

    got, right = penalty(lambda x, ps: model(x, ps)[0])(ps), penalty(mlp)(ps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, right)


def test_batches(model, julia, x64):
    ps, st = model.setup(0, dtype="float64")
    X = jnp.linspace(-1, 1, 14).reshape(7, 2)
    right = jax.vmap(mlp, (0, None))(X, ps)
    columns, _ = model(X.T, ps, st)
    np.testing.assert_allclose(columns.T, right, rtol=1e-12)
    call = jax.jit(jax.vmap(lambda x: model(x, ps, st)[0]))
    call(X)
    before = int(julia.ask("CALLS[]"))
    np.testing.assert_allclose(call(X), right, rtol=1e-12)
    assert int(julia.ask("CALLS[]")) - before == 1
    parts = jax.vmap(lambda x: model(x, ps, st)[0])(X.reshape(7, 2, 1))
    np.testing.assert_allclose(parts[..., 0], right, rtol=1e-12)


def test_a_loss_in_julia(model, x64):
    ps, _ = model.setup(0, dtype="float64")
    loss = model.loss(
        "(m, x, ps) -> sum(abs2, m(x, ps))",
        batch="(m, x, ps) -> vec(sum(abs2, m(x, ps); dims=1))",
    )
    X = jnp.linspace(-1, 1, 14).reshape(7, 2)

    def total(loss):
        g = jax.vmap(lambda x, ps: nested_grad(loss, x, ps), (0, None))
        return jax.jit(jax.grad(lambda ps: jnp.sum(g(X, ps) ** 2)))

    got, right = total(loss)(ps), total(lambda x, ps: jnp.sum(mlp(x, ps) ** 2))(ps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, right)


def test_parameters_from_and_back(model):
    ps, _ = model.setup(1)
    first, second = ps["layer_1"], ps["layer_2"]
    by_position = [(first["weight"], first["bias"]), (second["weight"], second["bias"])]
    for tree in (by_position, ps, model.to_julia(ps)):
        back = model.parameters_from(tree)
        jax.tree.map(np.testing.assert_array_equal, back, ps)
    with pytest.raises(
        ValueError, match=r"ps.layer_1.weight has shape \(2, 8\); expected is \(8, 2\)"
    ):
        model.parameters_from([(first["weight"].T, first["bias"]), by_position[1]])
    with pytest.raises(ValueError, match="missing: layer_2"):
        model.parameters_from({"layer_1": first})


def test_batchnorm_in_both_modes(julia):
    model = LuxModel("BatchNorm(2)")
    ps, st = model.setup(0)
    x = jnp.array([[1.0, 2.0, 6.0], [0.0, 1.0, 5.0]])
    y, same = model(x, ps, st)
    np.testing.assert_allclose(y, x / np.sqrt(1 + 1e-5), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, st)
    z, new = jax.jit(lambda x, ps, st: model(x, ps, st, training=True))(x, ps, st)
    mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    np.testing.assert_allclose(z, (x - mean) / np.sqrt(var + 1e-5), rtol=1e-4)
    np.testing.assert_allclose(new["running_mean"], 0.1 * mean[:, 0], rtol=1e-5)
    with pytest.raises(TypeError, match="running_mean"):
        model(x, ps)


def test_dropout_in_both_modes(julia):
    model = LuxModel("Chain(Dense(2 => 2), Dropout(0.5))")
    ps, st = model.setup(0)
    y, _ = model(jnp.ones(2), ps, st)
    right = ps["layer_1"]["weight"] @ jnp.ones(2) + ps["layer_1"]["bias"]
    np.testing.assert_allclose(y, right, rtol=1e-6)
    with pytest.raises(JuliaError, match="draws random numbers"):
        model(jnp.ones(2), ps, st, training=True)


def test_bad_models(julia):
    with pytest.raises(JuliaError, match="must end in a Lux model"):
        LuxModel("1 + 1").setup()
    with pytest.raises(JuliaError, match="syntax error, line 1"):
        LuxModel("Chain(Dense(2 => 1)").setup()
    with pytest.raises(TypeError, match="accepted is a string"):
        LuxModel(3)
    model = LuxModel("Dense(2 => 1)")
    ps, st = model.setup()
    with pytest.raises(JuliaError, match="DimensionMismatch"):
        model(jnp.ones(3), ps, st)


def test_a_seed_that_is_a_key(julia):
    with pytest.raises(TypeError, match="seed is a PRNGKeyArray; accepted is an integer"):
        LuxModel("Dense(1 => 1)").setup(jax.random.key(0))
