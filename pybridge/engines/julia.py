"""The Julia engine: forms of Julia functions, evaluated by Julia inside the compiled program."""

import ast
import itertools
import weakref

import jax
import jax.numpy as jnp

from pybridge import jets
from pybridge.julia import border, progress, structure
from pybridge.julia.errors import julia_errors
from pybridge.julia.runtime import lock, refuse_fork, runtime, started

_numbers = itertools.count(1)


def julia_function(
    code,
    *,
    using=(),
    name=None,
    result=None,
    batch=None,
    samples=(0,),
    axes="index",
    threads=False,
    borrow=None,
):
    """A Julia function as a JAX function of pytrees.

    It can be called, jitted, vmapped and differentiated to any order like any other, and given to
    ``pybridge.nested_grad``. Julia starts when it is first used. Inputs are copies, or lent
    where that goes unnoticed (``borrow``): Julia code that changes its argument changes nothing
    outside.

    Args:
      code: Julia code whose last expression is the function, e.g. ``"(x, ps) -> sum(ps.W * x)"``,
        or a callable that came from juliacall. Arrays keep their index order: ``x[i, j]`` here is
        ``x[i + 1, j + 1]`` there. Dicts and dataclasses arrive as NamedTuples, lists and tuples as
        Tuples, None as nothing, arrays of rank 0 as numbers.
      using: names of Julia packages that the code uses.
      name: what errors call it.
      result: a pytree of ``jax.ShapeDtypeStruct``, or a function of the arguments' structs that
        returns one: the shape of the result. Without it Julia evaluates the function once on
        made-up values when a program is traced.
      batch: Julia code of the same function on many samples at once, stacked in the *last*
        dimension of the arguments in ``samples``, the result likewise. Under ``vmap`` with
        everything else shared it serves the whole batch in one call.
      samples: the positions of the arguments that carry samples, for ``batch``.
      axes: ``"index"`` or ``"reversed"``. The latter shows Julia the same memory with its
        dimensions reversed, which costs no transpose for arrays of rank 2 and more.
      threads: whether Julia may evaluate several samples of a vmap at once, on its own threads.
        The result does not depend on their number.
      borrow: whether the plain value is computed on XLA's own memory, lent for the call: no copy
        of an argument, and a broadcast of the result's shape is made in XLA's result. A lent
        array is an ``AbstractArray`` that is read-only and no ``Array``, so that no BLAS call takes
        it; one that is kept is void after the call. ``None``: arrays of 256 KiB and more are lent
        to functions that Julia's compiler proves to have no side effect and to use them in
        broadcasts, ``map`` and whole reductions only. ``True``: all are lent. ``False``: none is.
        Derivatives and samples of a ``vmap`` get copies as ever.

    Returns:
      A ``JuliaFunction``.

    Raises:
      JuliaNotFoundError: at first use, if there is no Julia.
      JuliaError: whatever Julia throws: syntax errors with line and column, a package that is not
        installed, an error of the function's own with the lines of the user's code.

    >>> import pybridge
    >>> f = pybridge.julia_function("(x, ps) -> sum(abs2, tanh.(ps.W * x .+ ps.b))")
    >>> f.__name__
    'julia_function_1'
    """
    function = JuliaFunction(code, using, name, result, batch, samples, axes, threads, borrow)
    if started():
        function.id  # noqa: B018  a mistake in the code is reported at once when Julia is there
    return function


class JuliaFunction:
    """What ``julia_function`` returns: a function of JAX values, evaluated by Julia.

    Two more arguments than there are for ``pybridge.LuxModel``: ``before``, code that is evaluated
    first, as (source name, code, name of the constant that its value becomes, or ""); and ``like``,
    a function that gives nested dicts, one an argument: NamedTuples keep their key order.
    """

    def __init__(
        self,
        code,
        using=(),
        name=None,
        result=None,
        batch=None,
        samples=(0,),
        axes="index",
        threads=False,
        borrow=None,
        before=(),
        like=None,
    ):
        if axes not in ("index", "reversed"):
            raise ValueError(f"axes is {axes!r}; accepted are 'index' and 'reversed'")
        if isinstance(using, str):
            using = (using,)
        self.code = code
        self.using = tuple(using)
        self.result = result
        self.batch = batch
        self.samples = (samples,) if isinstance(samples, int) else tuple(samples)
        self.axes = axes
        self.threads = threads
        self.borrow = borrow
        self.before = tuple(before)
        self.like = like
        self.jet_functions = {}
        self._id = None
        self.__name__ = name or f"julia_function_{next(_numbers)}"
        if not isinstance(code, str | int) and not is_julia_callable(code):
            raise TypeError(
                f"code is a {type(code).__name__}; accepted are a string of Julia code and a "
                "callable that came from juliacall. A Python function needs no Julia: call it, or "
                "give it to pybridge.nested_grad, as it is"
            )

    @property
    def engine(self):
        return engine

    def __call__(self, *args):
        refuse_fork()  # before JAX is asked for anything, which may hang in a forked child
        with julia_errors():
            return jets.call(engine, self, *args)

    def __repr__(self):
        return f"<Julia function {self.__name__}>"

    @property
    def id(self) -> int:
        """Its number in Julia, which registers it."""
        if self._id is None:
            julia = runtime()
            if isinstance(self.code, int):
                self._id = self.code  # registered already, by Julia itself
            elif isinstance(self.code, str):
                loading = ", ".join(self.using) or self.__name__
                with progress.Announcement(f"Julia loads {loading}"), julia.children:
                    self._id = int(julia.ask(self._registration(), self.__name__))
            else:
                register = julia.juliacall.Main.seval(
                    "(f, name) -> Base.get_extension(NestedGradients, "
                    ":NestedGradientsPythonCallExt).register(f; name=string(name))"
                )
                self._id = int(julia.call(register, self.code, self.__name__))
            weakref.finalize(self, julia.forget, f"remove_function({self._id})").atexit = False
        return self._id

    def skeleton(self, in_tree) -> str:
        """Julia code of the skeleton of its arguments."""
        return structure.skeleton(in_tree, self.like and self.like())

    def unwrap(self, numbers=False):
        """``(skeleton, ps)``: what the Julia function captured, see ``pybridge.unwrap``."""
        julia = runtime()
        answer = julia.ask(f"unwrapped({self.id}, {str(bool(numbers)).lower()})", self.__name__)
        number, held = ast.literal_eval(answer)
        key, params = structure.taken(repr(held))
        julia.ask(f"drop({key})")
        params = jax.tree.map(jnp.asarray, params)
        name = f"{self.__name__} (unwrapped)"
        return JuliaFunction(number, name=name, axes=self.axes), params

    def _registration(self):
        packages = ", ".join(map(structure.quote, self.using))
        before = ", ".join(structure.tuple_of(map(structure.quote, step)) for step in self.before)
        parts = [
            f"name={structure.quote(self.__name__)}",
            f"code={structure.quote(self.code)}",
            f"packages=String[{packages}]",
            f"before=[{before}]",
            f"threads={str(bool(self.threads)).lower()}",
            f"borrow={_maybe(self.borrow)}",
        ]
        if self.batch is not None:
            carries = [n in self.samples for n in range(max(self.samples) + 1)]
            parts += [
                f"batch={structure.quote(self.batch)}",
                f"samples=Bool[{', '.join(str(c).lower() for c in carries)}]",
            ]
        return f"register(; {', '.join(parts)})"


_wrapped = {}  # by id of the Julia object, which the function holds, so no id comes twice
_MOST_WRAPPED = 256


def is_julia_callable(f) -> bool:
    """Whether ``f`` is a callable object that came from juliacall."""
    return type(f).__module__.partition(".")[0] == "juliacall" and callable(f)


def as_julia_function(f):
    """``f`` as a ``JuliaFunction``, or None where it has nothing to do with Julia.

    The same object from juliacall is the same function, so that it is registered and traced once.
    """
    if isinstance(f, JuliaFunction):
        return f
    if not is_julia_callable(f):
        return None
    if id(f) not in _wrapped:
        if len(_wrapped) >= _MOST_WRAPPED:
            _wrapped.pop(next(iter(_wrapped)), None)
        _wrapped[id(f)] = JuliaFunction(f, name=_julia_name(f))
    return _wrapped[id(f)]


def _julia_name(f):
    with lock:
        return str(f)


class JuliaEngine:
    name = "julia"
    complex_derivatives = False

    def __init__(self):
        # Plans by function. A function is what compiled programs keep alive, so a plan is there as
        # long as any program that calls it.
        self.plans = weakref.WeakKeyDictionary()

    def eager(self, jitted):
        # What calls a form outside of jit: errors keep their class (see errors.py).
        return julia_errors()(jitted)

    def trace(self, target, in_tree, in_avals):
        if target.result is not None:
            return _given_result(target, in_tree, in_avals)
        leaves = [structure.raw(aval) for aval in in_avals]
        examples = [
            f"example({structure.element(leaf.dtype)}, {structure.dims(leaf.shape, target.axes)})"
            for leaf in leaves
        ]
        args = f"NestedGradients.fill({target.skeleton(in_tree)}, {structure.tuple_of(examples)})"
        with progress.Announcement(
            f"Julia compiles {target.__name__}, to learn its result's shape"
        ):
            answer = runtime().ask(f"describe({target.id}, {args})", target.__name__)
        return structure.structs_of(answer, target.axes)

    def evaluate(self, operands, *, function, open, sizes, zflags, sflags):
        operands = [_without_keys(operand) for operand in operands]
        params = {"open": open, "sizes": sizes, "zflags": zflags, "sflags": sflags}
        structs = jets.out_structs([jax.typeof(x) for x in operands], function=function, **params)
        idle, params, inner = _drop_idle_levels(params)
        if idle:
            structs = jets.out_structs(
                [jax.typeof(x) for x in operands], function=function, **params
            )
        axes = function.target.axes
        out = border.call(
            self._plan(function, **params),
            operands,
            _sample_ranks(operands, **params),
            structs,
            [len(s.shape) - sum(f) for s, f in zip(structs, _given(params["sflags"][open]))],
            axes,
        )
        return (
            [inner(leaf, flags) for leaf, flags in zip(out, _given(sflags[open]))] if idle else out
        )

    def _plan(self, function, **params):
        table = self.plans.setdefault(function, {})
        key = tuple(params.items())
        if key not in table:
            julia = runtime()
            number = int(julia.ask(_plan_code(function, **params), function.target.__name__))
            table[key] = number
            progress.watch_first_call(function.target.__name__, julia.inside)
            weakref.finalize(function, julia.forget, f"remove_plan({number})").atexit = False
        return table[key]


engine = JuliaEngine()


def _maybe(flag):
    return "nothing" if flag is None else str(bool(flag)).lower()


def _given(spec):
    return [flags for flags in spec if flags is not None]


def _given_result(target, in_tree, in_avals):
    result = target.result
    if callable(result) and not isinstance(result, jax.ShapeDtypeStruct):
        result = result(*jax.tree.unflatten(in_tree, in_avals))
    leaves, tree = jax.tree.flatten(result)
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"result= of {target.__name__} holds a {type(leaf).__name__}; accepted is a pytree "
                "of jax.ShapeDtypeStruct, or a function that returns one"
            )
    return tree, tuple(
        jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
        for leaf in leaves
    )


def _without_keys(operand):
    if jax.dtypes.issubdtype(operand.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(operand)
    return operand


def _sample_ranks(operands, open, sizes, zflags, sflags):
    flags = [*zflags]
    for j, spec in enumerate(sflags):
        if j != open:
            flags += _given(spec)
    return [operand.ndim - sum(f) for operand, f in zip(operands, flags)]


def _drop_idle_levels(params):
    """Leave out the levels at which no operand is batched: every sample is the same there.

    Returns (whether there are any, the params without them, how a result leaf gets them back).
    """
    sizes, open = params["sizes"], params["open"]
    flags = [*params["zflags"]]
    for j, spec in enumerate(params["sflags"]):
        if j != open:
            flags += _given(spec)
    busy = [level for level in range(len(sizes)) if any(f[level] for f in flags)]
    if len(busy) == len(sizes):
        return False, params, None

    def keep(spec):
        return None if spec is None else tuple(spec[level] for level in busy)

    inner = {
        "open": open,
        "sizes": keep(sizes),
        "zflags": tuple(map(keep, params["zflags"])),
        "sflags": tuple(tuple(map(keep, spec)) for spec in params["sflags"]),
    }

    def restore(leaf, flags):
        axis = 0
        for level, size in enumerate(sizes):
            if level not in busy:
                if flags[level]:
                    shape = (*leaf.shape[:axis], size, *leaf.shape[axis:])
                    leaf = jnp.broadcast_to(jnp.expand_dims(leaf, axis), shape)
                else:
                    leaf = leaf * size
            axis += flags[level]
        return leaf

    return True, inner, restore


def _plan_code(function, open, sizes, zflags, sflags):
    axes = function.target.axes
    z = [structure.raw(aval) for aval in function.in_avals]
    out = function.out_avals
    owners = [
        n + 1
        for n, arg in enumerate(jax.tree.unflatten(function.in_tree, z))
        for _ in jax.tree.leaves(arg)
    ]

    def leaf(aval, flags):
        if flags is None:
            return "nothing"
        marks = structure.tuple_of("true" if flag else "false" for flag in flags)
        kind = structure.element(aval.dtype)
        return f"({kind}, {structure.dims(aval.shape, axes)}, {marks})"

    def slot(avals, spec):
        return structure.tuple_of(map(leaf, avals, spec))

    slots = ["()" if j == open else slot(z if j else out, spec) for j, spec in enumerate(sflags)]
    parts = {
        "id": function.target.id,
        "args": function.target.skeleton(function.in_tree),
        "result": structure.skeleton(function.out_tree),
        "open": open,
        "sizes": structure.tuple_of(sizes),
        "owners": structure.tuple_of(owners),
        "z": slot(z, zflags),
        "slots": structure.tuple_of(slots),
        "out": slot(z if open else out, sflags[open]),
    }
    return f"plan(; {', '.join(f'{name}={code}' for name, code in parts.items())})"
