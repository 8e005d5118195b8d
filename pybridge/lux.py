"""Lux models as JAX functions."""

from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np

from pybridge.engines.julia import JuliaFunction
from pybridge.julia import structure
from pybridge.julia.runtime import lock, runtime


class LuxModel:
    """A Lux model, evaluated by Julia, as a function of JAX values.

    ``y, st = model(x, ps, st)`` as in Lux. ``x`` has Lux's layout: features first, samples in the
    last dimension; a vector is one sample. Under ``jax.vmap`` over ``x`` alone the whole batch is
    one call. Parameters and states are dicts of arrays, named as Lux names them.

    Args:
      code: Julia code of the model, e.g. ``"Chain(Dense(2 => 64, tanh), Dense(64 => 1))"``.
      using: Julia packages that the code uses, besides Lux.
      name: what errors call it.

    Raises:
      JuliaNotFoundError: at first use, if there is no Julia.
      JuliaError: at first use, if the code is not a Lux model.

    >>> import pybridge
    >>> model = pybridge.LuxModel("Chain(Dense(2 => 64, tanh), Dense(64 => 1))")
    >>> model
    LuxModel('Chain(Dense(2 => 64, tanh), Dense(64 => 1))')
    """

    def __init__(self, code, *, using=(), name="LuxModel"):
        if not isinstance(code, str):
            raise TypeError(
                f"code is a {type(code).__name__}; accepted is a string of Julia code such as "
                '"Chain(Dense(2 => 64, tanh), Dense(64 => 1))"'
            )
        self.code = code
        self.using = ("Lux", *((using,) if isinstance(using, str) else using))
        self.name = name
        self._first = None
        self._test = self._function("tester(model)", name=name, batch="stacked_tester(model)")
        self._train = self._function("trainer(model)", name=f"{name} in training mode")

    def __repr__(self):
        return f"LuxModel({self.code!r})"

    def _function(self, code, name, before=(), **options):
        prelude = resources.files("pybridge.julia").joinpath("lux.jl").read_text()
        return JuliaFunction(
            code,
            using=self.using,
            name=name,
            before=(
                ("pybridge:lux.jl", prelude, ""),
                (self.name, self.code, "written"),
                ("pybridge:lux.jl", "checked(written)", "model"),
                *before,
            ),
            like=lambda: (None, *self._shapes()),
            **options,
        )

    def _shapes(self):
        if self._first is None:
            self._first = self._initial(0)
        return self._first

    def _initial(self, seed):
        about = self._function("seed -> described(model, seed)", name=self.name)
        about.like = None
        julia = runtime()
        key, values = structure.taken(
            julia.ask(f"hold(function_of({about.id}).call({int(seed)}))", self.name)
        )
        julia.ask(f"drop({key})")
        return values

    def setup(self, seed=0, dtype=None):
        """``(ps, st)``: new parameters and the state, as dicts of JAX arrays.

        The state holds what varies: the running mean and variance of a BatchNorm, say, and nothing
        for layers without any. Modes and random generators stay in Julia.

        Args:
          seed: an integer, of Julia's ``Random.Xoshiro``.
          dtype: of the float arrays; None keeps what Lux chose, float32 mostly.

        Raises:
          TypeError: ``seed`` is no integer.
        """
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
            raise TypeError(
                f"seed is a {type(seed).__name__}; accepted is an integer, which seeds Julia's own "
                "generator. A key of jax.random is none; int(jax.random.bits(key)) makes one of it."
            )
        ps, st = self._initial(seed)

        def array(leaf):
            floating = dtype is not None and np.issubdtype(leaf.dtype, np.floating)
            return jnp.asarray(leaf, dtype if floating else None)

        return jax.tree.map(array, ps), jax.tree.map(array, st)

    def __call__(self, x, ps, st=None, *, training=False):
        """``(y, st)``: the output, and the state afterwards.

        In test mode, the default, the state that comes back is the one given. With
        ``training=True`` a BatchNorm uses the statistics of the batch and the new state comes back.

        Args:
          x: an array with features first and samples in the last dimension, or a vector.
          ps, st: as from ``setup``; ``st`` may be left out for a model without any.

        Raises:
          JuliaError: the shapes do not fit; or ``training=True`` and a layer (Dropout) draws random
            numbers, whose generator JAX cannot hold.
        """
        st = self._state(st)
        if training:
            return self._train(x, ps, st)
        return self._test(x, ps, st), st

    def _state(self, st):
        if st is None:
            want = self._shapes()[1]
            if jax.tree.leaves(want):
                raise TypeError(
                    f"{self!r} has a state ({_paths(want)}): call it with st as from setup()"
                )
            return {}
        return st

    def loss(self, code, *, batch=None, samples=(0,), using=(), name=None, result=None):
        """A ``JuliaFunction`` of a loss written in Julia around this model, in test mode.

        Args:
          code: Julia code of ``(m, x, ps, ...) -> value``, where ``m(x, ps)`` is the model's
            output (``m(x, ps, st)`` for one with a state).
          batch, samples, result: as in ``pybridge.julia_function``; ``batch`` has the same
            signature as ``code``.

        Returns:
          A function of ``(x, ps, ...)``, for ``pybridge.nested_grad`` for instance.
        """
        before = [(name or f"{self.name}.loss", code, "loss")]
        together = None
        if batch is not None:
            before.append((f"{name or f'{self.name}.loss'} (batch)", batch, "batch_loss"))
            together = "with_model(batch_loss, stacked_tester(model))"
        function = self._function(
            "with_model(loss, tester(model))",
            name=name or f"{self.name}.loss",
            before=before,
            batch=together,
            samples=samples,
            result=result,
        )
        function.using = (*function.using, *((using,) if isinstance(using, str) else using))
        return function

    def parameters_from(self, tree):
        """This model's parameters, as from ``setup``, from parameters of another origin.

        Args:
          tree: a Julia ``NamedTuple`` that came from juliacall, or a nest of dicts, lists and
            tuples of arrays: dicts by the names that Lux uses, in any order; lists and tuples by
            position in Lux's order. Layers without parameters may be left out.

        Returns:
          A dict of JAX arrays. ``to_julia`` is the way back; neither loses anything.

        Raises:
          ValueError: a name is missing or too many, or a shape is wrong; the path is named.
        """
        if type(tree).__module__.partition(".")[0] == "juliacall":
            tree = _from_julia(tree)
        return _matched(tree, self._shapes()[0], "ps")

    def to_julia(self, ps):
        """``ps`` as a Julia ``NamedTuple`` (an object of juliacall's), in the model's own order."""
        ps = _matched(ps, self._shapes()[0], "ps")
        leaves, tree = jax.tree.flatten(ps)
        arrays = [np.asfortranarray(leaf) for leaf in leaves]
        given = structure.tuple_of(
            f"({structure.element(a.dtype)}, {structure.tuple_of(a.shape)}, {a.ctypes.data})"
            for a in arrays
        )
        code = f"structure({structure.skeleton(tree, self._shapes()[0])}, {given})"
        julia = runtime()
        with lock:
            return julia.juliacall.Main.seval(
                f"Core.eval(Base.get_extension(NestedGradients, :NestedGradientsPythonCallExt), "
                f":({code}))"
            )


def _from_julia(tree):
    julia = runtime()
    with lock:
        hold = julia.juliacall.Main.seval(
            "x -> Base.get_extension(NestedGradients, :NestedGradientsPythonCallExt).hold(x)"
        )
        answer = str(hold(tree))
    key, values = structure.taken(answer)
    julia.ask(f"drop({key})")
    return values


def _paths(tree):
    return ", ".join(jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree))


def _matched(given, like, path):
    if isinstance(like, dict):
        if isinstance(given, list | tuple):
            names = [name for name in like if jax.tree.leaves(like[name])]
            if len(given) != len(names):
                raise ValueError(
                    f"{path} has {len(given)} entries; expected are {len(names)}: "
                    f"{', '.join(names)}"
                )
            given = dict(zip(names, given))
        if not isinstance(given, dict):
            raise ValueError(
                f"{path} is a {type(given).__name__}; expected is a dict with {', '.join(like)}"
            )
        unknown = [str(name) for name in given if name not in like]
        lacking = [name for name in like if name not in given and jax.tree.leaves(like[name])]
        if unknown or lacking:
            raise ValueError(
                f"{path}: expected are {', '.join(like)}; "
                + "; ".join(
                    f"{what}: {', '.join(names)}"
                    for what, names in (("missing", lacking), ("unknown", unknown))
                    if names
                )
            )
        return {name: _matched(given.get(name, {}), like[name], f"{path}.{name}") for name in like}
    if isinstance(like, tuple):
        if not isinstance(given, list | tuple) or len(given) != len(like):
            raise ValueError(f"{path}: expected is a tuple of {len(like)}")
        return tuple(_matched(g, k, f"{path}[{i}]") for i, (g, k) in enumerate(zip(given, like)))
    if like is None:
        return None
    array = jnp.asarray(given)
    if array.shape != like.shape:
        raise ValueError(f"{path} has shape {array.shape}; expected is {like.shape}")
    return array
