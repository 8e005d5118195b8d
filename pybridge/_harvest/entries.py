"""What reap gives: a mapping from names to entries, and the derivatives in an entry.

A named value that passed through d differentiating levels is 2^d arrays or more: at each level,
innermost first, one takes the value or a derivative. An entry is that tree, walked by attributes; with
one level the attributes are arrays, with more they are entries of the levels further out.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .layout import ATTRIBUTES, Site, letters_of
from .levels import Forward, Jvp, Reverse
from .primitive import HarvestError, show


class Undefined(HarvestError, AttributeError):
    """An attribute of an entry that the transformations did not make defined."""


# ---- what the user reads ----


class Reaped(Mapping):
    """The named values of one run: a mapping from names to :class:`Entry`.

    ``reaped["x"]``, ``reaped["scope", "x"]`` or ``reaped["scope"]["x"]``; transformations may be named
    before the name, in any order: ``reaped["grad", "x"]``, ``reaped["vmap", "grad", "x"]`` is the entry
    as those levels made it. A pytree of the arrays in it.

    What was sown comes first, a mapping's keys being what it holds: where a scope "grad" sows "x", both
    ``reaped["grad", "x"]`` and ``reaped["grad"]["x"]`` are that value, also if an "x" outside of it went
    through grad. The derivatives of the other are the attributes of ``reaped["x"]``.
    """

    def __init__(self, layout, store, residual=None, program=None, labels=(), scope=()):
        self._layout, self._store, self._residual = layout, store, residual
        self._program, self._labels, self._scope = program, labels, scope

    def attach(self, operands):
        """Give the arguments that Jacobians are computed from."""
        if self._residual is not None:
            self._residual = (self._residual[0], operands)

    def _view(self, labels, scope):
        return Reaped(self._layout, self._store, self._residual, self._program, labels, scope)

    def __getitem__(self, key):
        return find(self, key)

    def __iter__(self):
        n = len(self._scope)
        for name in self._layout.sites:
            if name[:n] == self._scope and len(name) > n:
                rest = name[n:]
                yield rest[0] if len(rest) == 1 else rest

    def __len__(self):
        return sum(1 for _ in self)

    def __repr__(self):
        return f"Reaped({{{', '.join(f'{k!r}: {self[k]!r}' for k in self)}}})"

    def fetch(self, spot):
        """The array of a spot, computed now if it is a lazy one."""
        if spot.id not in self._store:
            self._compute([spot])
        return self._store[spot.id]

    def _compute(self, spots):
        program = self._program
        if program is None or self._residual is None:
            raise HarvestError(
                f"what is asked of {show(spots[0].name)} was not computed with the run, and what it needs "
                f"is gone. Ask where reap was called, before this mapping is transformed."
            )
        consts, operands = program.with_held(self._residual[0]), self._residual[1]
        for x, aval in zip((*consts, *operands), program.avals):
            if jnp.shape(x) != aval.shape:
                raise HarvestError(
                    f"what is asked of {show(spots[0].name)} is computed only now, but this mapping "
                    f"has been through a vmap since (an argument of shape {aval.shape} is now "
                    f"{jnp.shape(x)}). Ask inside the mapped function, or use "
                    f"reap(pybridge.harvest.vmap(...)) in place of vmap(reap(...))."
                )
        self._store.update(program.only([s.id for s in spots], consts, operands))


class _Static:
    """What of a Reaped is not an array. Equal where the same names were sown alike."""

    def __init__(self, ids, reaped):
        self.ids, self.layout, self.program = ids, reaped._layout, reaped._program
        self.view = (reaped._labels, reaped._scope)
        self.key = (ids, self.layout.signature, self.view)

    def __eq__(self, other):
        return isinstance(other, _Static) and self.key == other.key

    def __hash__(self):
        return hash(self.key)


def _flatten(r):
    return (list(r._store.values()), r._residual), _Static(tuple(r._store), r)


def _unflatten(static, children):
    values, residual = children
    store = dict(zip(static.ids, values))
    return Reaped(static.layout, store, residual, static.program, *static.view)


jax.tree_util.register_pytree_node(Reaped, _flatten, _unflatten)


def _answers(label, level_label):
    """Whether a transformation named by the user is this one."""
    return label == level_label or (label == "grad" and level_label == "value_and_grad")


def find(reaped, key):
    """The entry, or the sub-mapping, under a key: labels of transformations, then a name."""
    names = reaped._layout.sites
    given = key if isinstance(key, tuple) else (key,)
    for cut in range(len(given)):
        labels, name = (*reaped._labels, *given[:cut]), (*reaped._scope, *given[cut:])
        if name in names:
            return _entry(reaped, name, labels, key)
        if any(other[: len(name)] == name for other in names):
            return reaped._view(labels, name)
    known = {step[0] for s in reaped._layout.spots.values() for step in s.steps}
    known |= {_kind(s, i) for s in reaped._layout.spots.values() for i in range(len(s.steps))}
    if all(any(_answers(g, k) for k in known) for g in given):
        return reaped._view((*reaped._labels, *given), reaped._scope)
    have = ", ".join(show(n) for n in names) or "none"
    raise KeyError(f"{key!r} is not a name that was sown; sown: {have}")


def _kind(spot, i):
    """The label of a step, a raw differentiation by what it left behind."""
    label, letter, *_ = spot.steps[i]
    return label if label != "diff" else {"c": "grad"}.get(letter, "jvp")


def _entry(reaped, name, labels, key):
    sites = reaped._layout.sites[name]
    entries = tuple(_select(Entry(reaped, name, site), labels, key) for site in sites)
    return entries[0] if sites[0].first.mode != "append" else Entries(entries)


def _select(entry, labels, key):
    """The entry at some of its levels: at the others it is the value."""
    if not labels:
        return entry
    steps = list(entry.steps)
    chosen = set()
    for label in labels:
        at = next((i for i, k in enumerate(steps) if k and _answers(label, k)), None)
        if at is None:
            have = ", ".join(map(repr, dict.fromkeys(entry.steps))) or "none"
            raise KeyError(
                f"{key!r}: {show(entry.name)} did not go through {label!r}"
                f"{' again' if label in entry.steps else ''}; it went through: {have}"
            )
        steps[at] = None
        chosen.add(at)
    levels = [i for i, (_, letter, *_) in enumerate(entry.site.value.steps) if letter]
    taken = [n for n, i in enumerate(levels) if i in chosen]
    if not taken:
        return entry
    fixed = tuple(None if n in taken else "p" for n in range(len(levels)))
    return dataclasses.replace(entry, fixed=fixed, addressed=True)


class Entries(tuple):
    """What mode="append" collects: the entries of one name, in order; attributes are tuples."""

    def __getattr__(self, attribute):
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return tuple(getattr(e, attribute) for e in self)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Entry:
    """One named value and what the transformations made of it.

    For the value v of a function y = f(x):

    * ``.value`` is v;
    * ``.tangent``, under jvp in the direction dx, is (dv/dx) dx; under grad of one scalar, dv/dx;
    * ``.cotangent``, under grad, is dy/dv: how the result answers to a change of v where it is sown;
    * ``.jacobian``, under grad, jacrev and jacfwd, is dv/dx, of shape v.shape + x.shape, computed when
      asked for (a tuple or tree over the arguments where several are differentiated).

    Under two levels or more each attribute is an Entry of the levels further out, innermost level
    first: for grad(grad(f)), ``.cotangent.value`` is the inner dy/dv, and ``.value.cotangent`` the
    derivative of the outer result in v. Used as an array, an Entry is its value; addressed by levels, as
    in ``reaped["grad", "x"]``, it is the derivative that these levels make of it.

    ``.taken`` says whether (in a loop or under vmap: where) the value was sown, in a branch or a loop;
    ``.count`` is the number of iterations of a while_loop.

    An attribute that is not defined raises, and says why.
    """

    reaped: Reaped
    name: tuple
    site: Site
    fixed: tuple | None = None  # a letter for each level, None where it is open
    addressed: bool = False

    @property
    def order(self):
        """How many differentiating levels the value passed through."""
        return (
            len(letters_of(self.site.value))
            if self.site.value.primal
            else len(max(self._words(), key=len))
        )

    @property
    def steps(self):
        """The transformations the value went through, innermost first."""
        out, n = [], 0
        for label, letter, *_ in self.site.value.steps:
            if label == "diff":
                made = {word[n] for word in self._words() if len(word) > n}
                label = "grad" if "c" in made else "jvp"
            n += bool(letter)
            out.append(label)
        return tuple(out)

    def _words(self):
        return [word for word, part in self.site.spots if isinstance(part, int)]

    # -- the four quantities --

    @property
    def value(self):
        return self._at("value")

    @property
    def tangent(self):
        return self._at("tangent")

    @property
    def cotangent(self):
        return self._at("cotangent")

    @property
    def jacobian(self):
        return self._at("jacobian")

    # -- the marks --

    @property
    def taken(self):
        return self._mark("taken", True)

    @property
    def count(self):
        found = self._mark("count", None)
        if found is None:
            raise Undefined(f"{show(self.name)} has no .count: it is not sown in a while_loop")
        return found

    def _mark(self, role, default):
        at = [s for (word, part), s in self.site.spots.items() if part == role]
        return self.reaped.fetch(at[0]) if at else default

    # -- walking the levels --

    def _at(self, attribute):
        word = self.fixed if self.fixed is not None else (None,) * self.order
        if None not in word:
            if attribute == "value":
                return self._array(tuple(w for w in word))
            raise self._undefined(attribute, None)
        n = word.index(None)
        put = lambda letter: (*word[:n], letter, *word[n + 1 :])
        level = self._level(n)
        letter = ATTRIBUTES[attribute]
        if isinstance(level, (Reverse, Forward)):
            if letter == "t" and level.arg_shapes == ((),) and level.arg_tree.num_leaves == 1:
                letter = "j"
            if letter == "j":
                found = {k: put(f"j{k}") for k in range(len(level.moving))}
                if not all(map(self._known, found.values())):
                    raise self._undefined(attribute, n)
                return self._over(level.arg_tree, level.moving, found)
            if letter == "c":
                found = {o: put(f"c{o}") for o in range(level.n_out)}
                if not all(map(self._known, found.values())):
                    raise self._undefined(attribute, n)
                tree = level.out_tree
                return jax.tree.unflatten(tree, [self._go(w) for w in found.values()])
        if not self._known(put(letter)):
            raise self._undefined(attribute, n)
        return self._go(put(letter))

    def _over(self, tree, moving, words):
        """A tree over the arguments, of what each word gives; None for an integer argument."""
        leaves = [None] * tree.num_leaves
        if None in next(iter(words.values())):
            for k, i in enumerate(moving):
                leaves[i] = self._go(words[k])
            return jax.tree.unflatten(tree, leaves)
        arrays = {k: self._leaves(w) for k, w in words.items()}
        per_leaf = []
        for leaf in range(self.site.first.tree.num_leaves):
            row = list(leaves)
            for k, i in enumerate(moving):
                row[i] = arrays[k][leaf]
            per_leaf.append(jax.tree.unflatten(tree, row))
        return jax.tree.unflatten(self.site.first.tree, per_leaf)

    def _go(self, word):
        if None in word:
            return dataclasses.replace(self, fixed=word)
        return self._array(word)

    def _level(self, n):
        value = self.site.value
        steps = [s for s in value.steps if s[1]]
        return steps[n][2] if n < len(steps) and len(steps[n]) > 2 else None

    def _known(self, word):
        return any(_fits(w, word) for w in self._words())

    def _leaves(self, word):
        """The arrays of all leaves; what has no derivative (integers) is float0, as in JAX."""
        taken = self.taken
        concrete = isinstance(taken, (jax.Array, np.ndarray)) and not isinstance(
            taken, jax.core.Tracer
        )
        if concrete and not np.any(taken):
            raise HarvestError(
                f"{show(self.name)} was not sown in this run: the branch or loop that holds it (at "
                f"{self.site.first.where}) was not entered. Ask .taken first."
            )
        template = {s.leaf: s for s in self.site.spots.values() if s.role == "value"}
        out = []
        for leaf in range(self.site.first.tree.num_leaves):
            spot = self.site.spots.get((word, leaf))
            if spot is None and set(word) <= {"p"}:  # a level that did not move this value
                spot = next(
                    (
                        s
                        for (w, part), s in self.site.spots.items()
                        if part == leaf and set(w) <= {"p"}
                    ),
                    None,
                )
            if spot is not None:
                out.append(self.reaped.fetch(spot))
            else:
                like = template.get(leaf, self.site.first)
                inexact = jnp.issubdtype(like.dtype, jnp.inexact)
                out.append(np.zeros(like.shape, like.dtype if inexact else jax.dtypes.float0))
        return out

    def _array(self, word):
        return jax.tree.unflatten(self.site.first.tree, self._leaves(word))

    # -- used as an array --

    @property
    def primal(self):
        """The value itself, at every level."""
        return self._array(tuple("p" if w is None else w for w in self._full()))

    @property
    def derivative(self):
        """The value as the levels that were addressed made it; the value itself if none were."""
        out = self
        while self.addressed and isinstance(out, Entry) and None in out._full():
            out = out.jacobian if out._has("jacobian") else out.tangent
        return out.primal if isinstance(out, Entry) else out

    def _full(self):
        return self.fixed if self.fixed is not None else (None,) * self.order

    def __jax_array__(self):
        return jnp.asarray(self.derivative)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.derivative, dtype=dtype)

    def __float__(self):
        return float(self.derivative)

    def __repr__(self):
        have = [a for a in ATTRIBUTES if self._has(a)]
        shape = "" if self.site.first.tree.num_leaves > 1 else f" {self.site.value.dtype}"
        levels = ", ".join(self.steps) or "no transformation"
        return f"Entry({show(self.name)}{shape}, through {levels}: .{', .'.join(have)})"

    def _has(self, attribute):
        word = self._full()
        if None not in word:
            return attribute == "value"
        n = word.index(None)
        want = ATTRIBUTES[attribute]
        return any(len(w) > n and w[n][0] == want and _fits(w[:n], word[:n]) for w in self._words())

    # -- why not --

    def _undefined(self, attribute, n):
        value = self.site.value
        say = lambda why: Undefined(f"{show(self.name)} has no .{attribute}: {why}")
        notes = [s.note for s in self.site.spots.values() if s.note]
        if notes:
            return say(notes[0] + ".")
        if n is None:
            return say("no transformation inside the reaped function differentiates it.")
        if not jnp.issubdtype(value.dtype, jnp.inexact) and value.tree.num_leaves == 1:
            return say(f"it is of dtype {value.dtype}, which has no derivative.")
        level = self._level(n)
        if isinstance(level, Jvp):
            return say(
                f"jvp gives its derivative in one direction, .tangent; "
                f"for .{attribute} use pybridge.harvest.grad, jacrev or jacfwd."
            )
        if attribute == "tangent" and isinstance(level, (Reverse, Forward)):
            return say(
                f"{level.label} differentiates in more than one scalar; its derivative is .jacobian, "
                f"or .tangent under pybridge.harvest.jvp."
            )
        if isinstance(level, Forward):
            return say(
                f"{level.label} pushes derivatives forward; a cotangent needs grad or jacrev."
            )
        if isinstance(level, Reverse):
            p = next(s for s in self.site.spots.values() if s.primal)
            if p.dead:
                return say(
                    f"its result is ignored, no result depends on it. Go on with the value that sow "
                    f"returns (at {value.where})."
                )
            return say(f"{p.blind or 'nothing outside depends on it'}.")
        if any(len(w) != self.order for w in self._words()):
            return say(
                "under two or more of jax's own transformations some left no mark, and which is not known; "
                "use those of pybridge.harvest."
            )
        what = {"cotangent": "grad", "tangent": "grad or jvp", "jacobian": "grad", "value": "grad"}
        return say(
            f"jax's own transformation left none behind (or nothing uses the result of sow); use "
            f"pybridge.harvest.{what[attribute]} in place of jax's."
        )


def _fits(word, pattern):
    return len(word) == len(pattern) and all(b is None or a == b for a, b in zip(word, pattern))
