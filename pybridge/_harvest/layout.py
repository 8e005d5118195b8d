"""Which spots make which entry: the static side of what reap gives.

A name has a site for each place that sows it, and a site has a spot for each leaf of the value, of its
derivatives and of the marks that go with it. Here a name used twice in one run is found out.
"""

import dataclasses
import itertools
import re

from .primitive import HarvestError, show

_LETTER = re.compile(r"(p|t|c|[cj]\d+)$")
ATTRIBUTES = {"value": "p", "tangent": "t", "cotangent": "c", "jacobian": "j"}


def letters_of(spot):
    return tuple(step[1] for step in spot.steps if step[1])


def is_raw(spot):
    return any(step[0] == "diff" for step in spot.steps)


@dataclasses.dataclass
class Site:
    """All spots of one sow: its leaves, its derivatives, its marks."""

    first: object  # the first spot
    spots: dict  # (letters, leaf or role) -> spot
    twice: object = None  # a second spot for the same thing

    @property
    def value(self):
        """A spot of the value itself, or of the derivative if there is no value."""
        return next((s for s in self.spots.values() if s.primal), self.first)


def _sites(spots):
    """Sites in order of execution, of the spots of one name."""
    sites = {}
    for s in spots:
        path = tuple(e for e in s.id[:-1] if not _LETTER.match(e))
        key = ("uid", s.uid) if is_raw(s) else path
        site = sites.setdefault(key, Site(s, {}))
        part = (letters_of(s), s.leaf if s.role == "value" else s.role)
        old = site.spots.get(part)
        if old is None or (old.weak and not s.weak):
            site.spots[part] = s
        elif not s.weak:
            site.twice = s
    return list(sites.values())


class Layout:
    """The names of a program and their sites, checked: a name used twice is an error or a list."""

    def __init__(self, program):
        spots = program.spots
        linear = _pushed_elsewhere(spots, program.call.key)
        spots = [
            dataclasses.replace(s, steps=tuple(x for x in s.steps if x != ("diff", "t")))
            if s.uid in linear
            else s
            for s in spots
        ]
        self.spots = {s.id: s for s in spots}
        by_name = {}
        for s in spots:
            by_name.setdefault(s.name, []).append(s)
        self.all_sites = {name: _sites(ss) for name, ss in by_name.items()}
        self.sites = {name: self._one_or_many(name, ss) for name, ss in self.all_sites.items()}

    def _one_or_many(self, name, sites):
        modes = {s.first.mode for s in sites}
        twice = [(a.first, b.first) for a, b in itertools.pairwise(sites)]
        twice += [(s.first, s.twice) for s in sites if s.twice]
        if not twice:
            return sites
        one, two = twice[0]
        if modes == {"last"}:
            return sites[-1:]
        if modes == {"append"} and not any(s.twice for s in sites):
            return sites
        again = is_raw(one) and one.uid == two.uid
        hint = " If jax's own grad or vmap of a checkpoint repeats it, use pybridge.harvest's."
        raise HarvestError(
            f"{show(name)} is sown twice in one run: at {one.where} and at {two.where}. Accepted: one sow a "
            f'name (in branches: of one shape and dtype), or mode="append" to collect, mode="last" to overwrite (the same mode at each sow). '
            f"Give the second another name, or a prefix by pybridge.nest(f, scope).{hint if again else ''}"
        )

    def all(self):
        return [s for sites in self.sites.values() for site in sites for s in site.spots.values()]

    def eager(self, attributes):
        """The ids of what is computed with the run: values, and of the rest what was named."""
        first = {ATTRIBUTES[a] for a in attributes} | {"p"}
        return [s.id for s in self.all() if {letter[0] for letter in letters_of(s)} <= first]

    @property
    def signature(self):
        return tuple(
            (name, tuple(tuple(site.spots) for site in sites)) for name, sites in self.sites.items()
        )


def _pushed_elsewhere(spots, key):
    """The uids of sows that only have a tangent and are of no call's tracing with this key: those of a
    linear map that was made before, whose tangents are its values."""
    letters = {}
    for s in spots:
        if is_raw(s) and s.uid[0] != key:
            letters.setdefault(s.uid, set()).add(letters_of(s))
    return {uid for uid, ls in letters.items() if ls == {("t",)}}
