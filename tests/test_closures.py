"""unwrap: what a Python callable captured, taken out and put in again."""

import array
import collections
import contextvars
import ctypes
import dataclasses
import enum
import functools
import logging
import pathlib
import threading
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pybridge import nested_grad, unwrap

W = np.arange(1.0, 4.0, dtype=np.float32)
x = jnp.array([0.5, -1.0, 2.0])


def check(f, want_ps, *args):
    """The skeleton with its captures is f, and with other captures it is f with those."""
    args = args or (x,)
    skeleton, ps = unwrap(f)
    assert jax.tree.structure(ps) == jax.tree.structure(want_ps)
    jax.tree.map(np.testing.assert_array_equal, ps, want_ps)
    np.testing.assert_allclose(skeleton(*args, ps), f(*args), rtol=1e-6)
    return skeleton, ps


def linear(w):
    return lambda x: jnp.sum(w * x)


def test_closure_cells():
    skeleton, ps = check(linear(W), {"w": W})
    np.testing.assert_allclose(jax.grad(skeleton, -1)(x, ps)["w"], x)
    np.testing.assert_allclose(skeleton(x, {"w": 2 * W}), 2 * linear(W)(x))


def test_nested_closures_and_defaults():
    def outer(w, scale):
        inner = lambda x: w * x

        def f(x, shift=jnp.ones(3), *, gain=W):  # noqa: B008  a default is a capture
            return jnp.sum(inner(x) * scale + shift * gain)

        return f

    check(outer(W, 2.0), {"inner": {"w": W}, "shift": np.ones(3), "gain": W})


def test_numbers_stay_unless_asked_for():
    f = (lambda n, s: lambda x: jnp.sum(x) * s**n)(2, 3.0)
    assert unwrap(f)[1] == {}
    skeleton, ps = unwrap(f, numbers=True)
    assert set(ps) == {"s"}
    np.testing.assert_allclose(jax.grad(skeleton, -1)(x, ps)["s"], 2 * 3.0 * jnp.sum(x))


def test_integers_booleans_keys_and_text_stay():
    def build(labels, flag, mode, key, w):
        return lambda x: jnp.sum(x[labels] * w) * flag + len(mode) * jax.random.normal(key)

    check(build(np.array([0, 1, 1]), True, "mode", jax.random.key(0), W), {"w": W})


def test_partial_with_arguments_and_keywords():
    f = functools.partial(lambda a, b, x, c: jnp.sum(a * b["q"] * x + c), W, {"q": W + 1}, c=W - 1)
    check(f, {"args": (W, {"q": W + 1}), "keywords": {"c": W - 1}})


@dataclasses.dataclass
class Model:
    w: object
    layers: int
    activation: object

    def __call__(self, x):
        return jnp.sum(self.activation(self.w * x))

    def loss(self, x):
        return self(x) * self.layers


def test_callable_dataclass_bound_method_and_its_jit():
    model = Model(W, 2, jnp.tanh)
    check(model, {"w": W})
    check(model.loss, {"w": W})
    check(jax.jit(model.loss), {"w": W})


def test_object_with_slots():
    class Slotted:
        __slots__ = ("w",)

        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return jnp.sum(self.w * x)

    check(Slotted(W), {"w": W})


def test_pytree_module():
    mlp = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
    skeleton, ps = unwrap(lambda x: mlp(x))
    assert [jnp.shape(leaf) for leaf in jax.tree.leaves(ps)] == [(4,), (4, 3), (1,), (1, 4)]
    np.testing.assert_allclose(skeleton(x, ps), mlp(x), rtol=1e-6)
    gradient = jax.tree.leaves(jax.grad(skeleton, -1)(x, ps))
    want = jax.tree.leaves(eqx.filter_grad(lambda m: m(x))(mlp))
    assert sorted(g.size for g in gradient) == sorted(g.size for g in want)
    np.testing.assert_allclose(
        sum(jnp.sum(g**2) for g in gradient), sum(jnp.sum(g**2) for g in want), rtol=1e-5
    )


def test_the_same_array_twice_is_two_leaves_and_both_count():
    w = jnp.asarray(W)
    f = (lambda a, b: lambda x: jnp.sum(a * x + b * x**2))(w, w)
    skeleton, ps = unwrap(f)
    assert set(ps) == {"a", "b"}
    gradient = jax.grad(skeleton, -1)(x, ps)
    np.testing.assert_allclose(gradient["a"], x)
    np.testing.assert_allclose(gradient["b"], x**2)


def test_a_function_that_calls_itself():
    def power(w):
        def f(x, n=3):
            return x if n == 0 else w * f(x, n - 1)

        return f

    skeleton, ps = unwrap(power(jnp.array(2.0)))
    np.testing.assert_allclose(skeleton(1.0, ps), 8.0)
    np.testing.assert_allclose(jax.grad(skeleton, -1)(1.0, ps)["w"], 12.0)


def test_globals_only_when_asked_for():
    f = lambda x: jnp.sum(W * x)
    assert unwrap(f)[1] == {}
    skeleton, ps = unwrap(f, globals=True)
    assert set(ps) == {"W"}
    np.testing.assert_allclose(skeleton(x, {"W": 2 * W}), 2 * f(x))
    np.testing.assert_allclose(W, [1, 2, 3])


@pytest.mark.parametrize(
    "wrapped",
    [jax.jit, jax.checkpoint, functools.partial, lambda f: jax.jit(jax.checkpoint(f))],
)
def test_globals_below_wrappers(wrapped):
    skeleton, ps = unwrap(wrapped(lambda x: jnp.sum(W * x)), globals=True)
    (leaf,) = jax.tree.leaves(ps)
    np.testing.assert_array_equal(leaf, W)
    (gradient,) = jax.tree.leaves(jax.grad(skeleton, -1)(x, ps))
    np.testing.assert_allclose(gradient, x)


def test_globals_of_an_object_are_an_error():
    with pytest.raises(TypeError, match="globals=True looks into functions; f is of type Model"):
        unwrap(Model(W, 2, jnp.tanh), globals=True)


def test_tracers_are_captures_and_nested_grad_of_a_closure_differentiates_them():
    def penalty(w):
        skeleton, ps = unwrap(lambda x: jnp.sum(w * x**2))
        return jnp.sum(nested_grad(skeleton, x, ps) ** 2)

    direct = lambda w: jnp.sum(nested_grad(lambda x: jnp.sum(w * x**2), x) ** 2)
    w = jnp.asarray(W)
    np.testing.assert_allclose(jax.grad(penalty)(w), 8 * w * x**2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(direct)(w), 8 * w * x**2, rtol=1e-6)


def test_the_original_is_left_as_it_was():
    model = Model(jnp.asarray(W), 2, jnp.tanh)
    skeleton, ps = unwrap(model)
    jax.grad(skeleton, -1)(x, ps)
    np.testing.assert_array_equal(model.w, W)


def _cached(w):
    return functools.lru_cache(lambda x: w * x)


def _with_class_attribute():
    class Layer:
        w = W

    return Layer()


def _with_closing_method(w=W):
    class Layer:
        def __call__(self, x):
            return w * x

    return Layer()


def _variable(w):
    variable = contextvars.ContextVar("w")
    variable.set(w)
    return variable


def _with_metaclass():
    Meta = type("Meta", (type,), {"w": W})
    return Meta("Layer", (), {})()


def _with_inner_class():
    return type("Outer", (), {"inner": type("Inner", (), {"w": W})})


def _with_descriptor():
    class Held:
        def __get__(self, instance, owner):
            return self.w

    return type("Layer", (), {"v": _with_attribute(Held())})()


def _dict_of_itself():
    held = {"w": W}
    held["self"] = held
    return held


def _with_function_attribute():
    def g(x):
        return g.w * x

    g.w = W
    return g


class _Deep(dict):
    pass


class _Length(int):
    pass


def _with_attribute(value):
    value.w = W
    return value


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Fixed:
    w: object
    activation: object = dataclasses.field(metadata={"static": True}, default=None)


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (lambda: collections.deque([W]), r"f\.held is of type deque.*shape \(3,\)"),
        (lambda: collections.deque([{"a": [W]}]), r"f\.held is of type deque"),
        (lambda: types.MappingProxyType({"a": {"b": [W]}}), r"f\.held is of type mappingproxy"),
        (lambda: frozenset([np.float32(2)]), r"f\.held is of type frozenset"),
        (lambda: {"a": {W.tobytes(): iter([W])}}, r"f\.held\['a'\].*list_iterator"),
        (lambda: np.array([W, None], dtype=object), r"f\.held.*dtype object"),
        (lambda: jax.custom_vjp(linear(W)), r"f\.held is a custom_vjp whose"),
        (lambda: _cached(W), r"f\.held is a _lru_cache_wrapper whose"),
        (lambda: weakref.ref(linear(W)), None),  # dead: nothing is held
        (lambda: weakref.ref(_kept), r"f\.held is a ReferenceType whose"),
        (lambda: weakref.proxy(_kept), r"f\.held is a weak proxy"),
        (lambda: jax.jit(linear(W)).lower(x).compile(), r"f\.held is a compiled program"),
        (_with_class_attribute, r"f\.held: attribute w of the class .*Layer"),
        (lambda: type(_with_class_attribute()), r"f\.held: attribute w of the class .*Layer"),
        (_with_closing_method, r"f\.held: attribute __call__ of the class .*Layer"),
        (_with_function_attribute, r"f\.held: the function g has an attribute w"),
        (lambda: _Deep(a={"b": [W]}), r"f\.held is of type _Deep"),
        (lambda: _with_attribute(_Length(3)), r"f\.held is of type _Length"),
        (lambda: _Fixed(W, linear(W)), r"f\.held is a _Fixed whose fixed part"),
        (lambda: slice(W, None), r"f\.held is of type slice"),
        (lambda: _variable(W), r"f\.held is a ContextVar whose"),
        (lambda: np.zeros(1, [("a", "f4")]), r"f\.held is a ndarray of dtype .*no JAX value"),
        (lambda: np.ma.array(W), r"f\.held is a MaskedArray"),
        (lambda: array.array("f", [1, 2]), r"f\.held is of type array"),
        (lambda: [(ctypes.c_float * 2)(1, 2)], r"f\.held\[0\] is of type c_float_Array_2"),
        (_with_metaclass, r"f\.held: attribute w of the class .*Meta"),
        (_with_inner_class, r"f\.held\.inner: attribute w of the class"),
        (_with_descriptor, r"f\.held: attribute v of the class"),
        (lambda: {3: W, "a": W}, r"f\.held is of type dict, which JAX cannot take apart"),
        (_dict_of_itself, r"f\.held is of type dict, holds arrays and contains itself"),
        (
            lambda: _with_attribute(threading.local()),
            r"f\.held is of type _?local.*cannot be taken",
        ),
    ],
)
def test_a_capture_that_cannot_be_taken_apart_is_an_error(capture, message):
    f = (lambda held: lambda x: held)(capture())
    if message is None:
        assert unwrap(f)[1] == {}
        return
    with pytest.raises(TypeError, match=message):
        unwrap(f)


_kept = linear(W)


def test_bound_methods_of_containers_and_arrays():
    f = (lambda get, dot: lambda x: get("a") @ x + dot(x))({"a": W}.get, (2 * W).dot)
    skeleton, ps = check(f, {"get": {"a": W}, "dot": 2 * W})
    np.testing.assert_allclose(jax.grad(skeleton, -1)(x, ps)["get"]["a"], x)


def test_closure_convert_and_jaxprs():
    convert = lambda w: jax.closure_convert(lambda x: jnp.sum(w * x), x)
    f = (lambda pair: lambda x: pair[0](x, *pair[1]))(convert(jnp.asarray(W)))
    skeleton, ps = unwrap(f)
    (gradient,) = jax.tree.leaves(jax.grad(skeleton, -1)(x, ps))
    np.testing.assert_allclose(gradient, x)


def test_what_holds_no_values_stays():
    held = (
        jax.make_mesh((1,), ("a",)),
        logging.getLogger("jax"),
        pathlib.Path("."),
        [],
        Kind.FIRST,
    )
    check((lambda held, w: lambda x: jnp.sum(w * x) * (held is not None))(held, W), {"w": W})


class Kind(enum.IntEnum):
    FIRST = 1


def test_private_slots():
    class Slotted:
        __slots__ = ("__w", "unset")

        def __init__(self):
            self.__w = W

        def __call__(self, x):
            return jnp.sum(self.__w * x)

    check(Slotted(), {"_Slotted__w": W})


def test_a_cached_property_is_computed_again():
    class Layer:
        def __init__(self):
            self.raw = W

        @functools.cached_property
        def w(self):
            return 2 * self.raw

        def __call__(self, x):
            return jnp.sum(self.w * x)

    layer = Layer()
    layer(x)  # fills it
    skeleton, ps = check(layer, {"raw": W})
    np.testing.assert_allclose(jax.grad(skeleton, -1)(x, ps)["raw"], 2 * x)
    assert "w" in vars(layer)


def test_an_object_that_delegates_what_it_lacks():
    class Wrapper:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __call__(self, x):
            return self.inner(x)

    with pytest.raises(TypeError, match=r"f is of type Wrapper.*cannot be copied.*RecursionError"):
        unwrap(Wrapper(linear(W)))


def test_an_assigned_capture_is_an_error_and_a_counter_goes_on_counting():
    def stateful(w):
        def f(x):
            nonlocal w
            w = w + 1
            return w * x

        return f

    with pytest.raises(TypeError, match=r"f\.w holds arrays and is assigned to"):
        unwrap(stateful(W))

    calls = 0

    def counting(x, w=W):
        nonlocal calls
        calls += 1
        return jnp.sum(w * x)

    skeleton, ps = unwrap(counting)
    skeleton(x, ps)
    assert calls == 1


def test_functions_that_call_each_other_through_a_container():
    def build(w):
        table = []
        table.append(lambda x, n: x if n == 0 else w * table[0](x, n - 1))
        return table[0]

    skeleton, ps = unwrap(build(jnp.array(2.0)))
    np.testing.assert_allclose(jax.grad(skeleton, -1)(1.0, 3, ps)["w"], 12.0)


def test_what_contains_itself_is_an_error():
    class Layer:
        def __init__(self):
            self.w = W
            self.act = self.linear

        def linear(self, x):
            return jnp.sum(self.w * x)

        def __call__(self, x):
            return self.act(x)

    with pytest.raises(TypeError, match=r"f is of type Layer.*contains itself"):
        unwrap(Layer())


def test_what_cannot_be_copied_is_an_error():
    class One:
        def __copy__(self):
            return self

        def __call__(self, x):
            return jnp.sum(self.w * x)

    one = One()
    one.w = W
    with pytest.raises(TypeError, match=r"f is of type One.*cannot be copied"):
        unwrap(one)


def test_keys_that_look_alike_stay_apart():
    d = collections.OrderedDict([(1, W), ("1", 2 * W)])
    skeleton, ps = unwrap((lambda d: lambda x: jnp.sum((d[1] + 10 * d["1"]) * x))(d))
    assert len(jax.tree.leaves(ps)) == 2
    np.testing.assert_allclose(skeleton(x, ps), jnp.sum(21 * W * x), rtol=1e-6)


def test_bad_calls():
    with pytest.raises(TypeError, match="f must be callable"):
        unwrap(3)
    skeleton, _ = unwrap(linear(W))
    with pytest.raises(ValueError, match="captures are"):
        skeleton(x, {"v": W})
    with pytest.raises(TypeError, match="last argument"):
        skeleton()
