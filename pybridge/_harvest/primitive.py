"""sow: the identity with a name, as a JAX primitive.

Its rules are those of the identity, each leaving its mark: a *step* (label, letter) appended to the
equation's ``steps``. So what JAX's own transformations made of a named value stays legible in a jaxpr:

    jvp:        sow(v)  ->  sow(v; "p"), sow(dv; "t")        primal and tangent
    transpose:  sow(dv; "t")  ->  sow(ct; "c")               the cotangent that arrives there
    batching:   sow(v)  ->  sow(v; vmap), the batch axis first, since a batching rule never sees out_axes

Every differentiation appends one letter to both copies, so no two of them collide, at any order.
"""

import itertools
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

_uids = itertools.count()
RULE_NOTE = "it is sown inside a custom derivative rule, where only .value is defined"
MODES = ("strict", "append", "last")


class HarvestError(ValueError):
    """A named value cannot be read or written as asked."""


class Session:
    """What ``reap`` and ``plant`` of one function share over their calls: a key for JAX's caches.

    A call at work (``Call``) is the value of a JAX user context, hence part of every tracing cache's
    key, and calls of one session are equal: a function that was jitted before is traced again for a
    session, once, and its sows report to the call.
    """

    def __init__(self):
        self.renew()

    def renew(self):
        """Forget what was traced: after an error the next call must meet it again."""
        self.key = next(_uids) + 1


class Call:
    """One run of a reaped or planted function; ``early`` is for equation.py."""

    def __init__(self, session, early=False):
        self.key, self.early, self.sown = session.key, early, []

    def __eq__(self, other):
        return isinstance(other, Call) and (self.key, self.early) == (other.key, other.early)

    def __hash__(self):
        return hash((self.key, self.early))


_sessions = weakref.WeakKeyDictionary()


def session_of(fun):
    """The session of a function; a new one where a function cannot be a key."""
    try:
        return _sessions.setdefault(fun, Session())
    except TypeError:
        return Session()


active = jax.make_user_context(None)  # the Call, or None
scopes = jax.make_user_context(())  # the prefixes that `nest` has opened

sow_p = Primitive("sow")
sow_p.multiple_results = True
HIDDEN = {}  # primitive -> function of its parameters: what is sown where no jaxpr shows it


def new_uid():
    """An identity for a sow: the key of the session that traced it, or 0, and a number."""
    return (0 if active.value is None else active.value.key, next(_uids))


def path_of(name, argument="name"):
    """A name as a tuple: ``"x"`` is ``("x",)``."""
    if isinstance(name, str) and name:
        return (name,)
    if (
        isinstance(name, tuple)
        and name
        and all(isinstance(n, (str, int, np.integer)) and n != "" for n in name)
        and not any(isinstance(n, bool) for n in name)  # True is 1 where names are compared
    ):
        return tuple(n if isinstance(n, str) else int(n) for n in name)
    raise HarvestError(
        f"{argument} is {name!r}; accepted: a non-empty string, or a non-empty tuple of strings and "
        f'integers such as ("layer", 3). Pass one of these.'
    )


def is_array(x):
    return isinstance(x, (jax.Array, np.ndarray))


def show(path):
    return repr(path[0]) if len(path) == 1 else repr(path)


def _caller():
    """file:line of the nearest frame outside this package: where the user's code sows."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("pybridge."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown place"


def sow(value, name, mode):
    path = scopes.value + path_of(name)
    if mode not in MODES:
        raise HarvestError(f"mode is {mode!r}; accepted: {', '.join(map(repr, MODES))}.")
    with_paths, tree = jax.tree_util.tree_flatten_with_path(value)
    if not with_paths:
        raise HarvestError(
            f"sow({show(path)}): the value {value!r} has no array in it; accepted: an array or a pytree "
            f"of arrays with at least one. Leave this sow out."
        )
    for where, leaf in with_paths:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)) or (
            isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in "biufcV"
        ):
            at = jax.tree_util.keystr(where)
            raise HarvestError(
                f"sow({show(path)}): value{at} is {leaf!r} of type {type(leaf).__name__}; accepted: "
                f"arrays and numbers. Sow only the arrays of this value."
            )
    uid, where = new_uid(), _caller()
    if active.value is not None:
        trace = get_opaque_trace_state()
        active.value.sown.append((path, where, uid, mode, trace))
    out = sow_p.bind(
        *(leaf for _, leaf in with_paths),
        path=path,
        uid=uid,
        leaves=tuple(range(len(with_paths))),
        tree=tree,
        mode=mode,
        where=where,
        steps=(),
    )
    # Nothing traces a concrete result: the value itself goes on, not JAX's rendering of it.
    out = [o if isinstance(o, jax.core.Tracer) else x for o, (_, x) in zip(out, with_paths)]
    return jax.tree.unflatten(tree, out)


# ---- the rules: shape, jvp, transpose, batching, lowering ----

sow_p.def_impl(lambda *xs, **_: list(xs))
sow_p.def_abstract_eval(lambda *avals, **_: list(avals))


def _jvp(primals, tangents, *, steps, leaves, **params):
    out = sow_p.bind(*primals, steps=(*steps, ("diff", "p")), leaves=leaves, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    dout = list(tangents)
    if moving:
        tan = sow_p.bind(
            *(tangents[i] for i in moving),
            steps=(*steps, ("diff", "t")),
            leaves=tuple(leaves[i] for i in moving),
            **params,
        )
        for i, t in zip(moving, tan):
            dout[i] = t
    return out, dout


def _transpose(cts, *_, steps, leaves, **params):
    last = max((i for i, (_, letter) in enumerate(steps) if letter == "t"), default=None)
    if last is None:  # the transpose of a linear function that sows
        turned = (*steps, ("diff", "c"))
    else:
        turned = (*steps[:last], (steps[last][0], "c"), *steps[last + 1 :])
    out = list(cts)
    moving = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    if moving:
        sown = sow_p.bind(
            *(cts[i] for i in moving),
            steps=turned,
            leaves=tuple(leaves[i] for i in moving),
            **params,
        )
        for i, ct in zip(moving, sown):
            out[i] = ct
    return out


def batch_first(args, dims):
    """The operands with their batch axis first, those that have none repeated."""
    size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
    return [
        jnp.broadcast_to(x, (size, *jnp.shape(x))) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims)
    ]


def _batch(args, dims, *, steps, **params):
    first = batch_first(args, dims)
    return sow_p.bind(*first, steps=(*steps, ("vmap", "")), **params), [0] * len(args)


ad.primitive_jvps[sow_p] = _jvp
ad.primitive_transposes[sow_p] = _transpose
batching.primitive_batchers[sow_p] = _batch
mlir.register_lowering(sow_p, lambda _ctx, *xs, **_: list(xs))


# ---- which jaxprs sow ----

_sows = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def subjaxprs(value):
    """The jaxprs in an equation's parameter, through tuples, lists and dicts."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from subjaxprs(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from subjaxprs(v)


def sown_in_eqn(eqn):
    """Parameters of the sows in an equation, at any depth."""
    if eqn.primitive is sow_p:
        return [eqn.params]
    if eqn.primitive in HIDDEN:
        return list(HIDDEN[eqn.primitive](eqn.params))
    return [p for inner in subjaxprs(eqn.params) for p in sows_in(inner)]


def sows_in(jaxpr):
    """Parameters of all sows of a jaxpr, those of inner jaxprs included."""
    with _lock:
        known = _sows.get(jaxpr)
    if known is None:
        known = tuple(p for eqn in jaxpr.eqns for p in sown_in_eqn(eqn))
        with _lock:
            _sows[jaxpr] = known
    return known
