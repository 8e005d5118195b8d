"""plant: which value goes to which spot."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .entries import Entries, Entry
from .layout import is_raw, letters_of
from .primitive import HarvestError, path_of, show


def _flat(values, prefix=()):
    """(name, value) pairs of a mapping, nested mappings opened."""
    for key, value in values.items():
        name = (*prefix, *path_of(key, "a name in values"))
        yield name, value


def plants_for(layout, values):
    """{spot id: array} for all of ``values``."""
    if not isinstance(values, Mapping):
        raise HarvestError(
            f"plant: values is {type(values).__name__}; accepted: a mapping from names to arrays or "
            f'pytrees. Pass a dict such as {{"x": array}}.'
        )
    plants, todo = {}, list(_flat(values))
    while todo:
        name, value = todo.pop()
        sites = layout.sites.get(name)
        scope = any(n[: len(name)] == name for n in layout.sites)
        if sites is None and scope and isinstance(value, Mapping):
            todo.extend(_flat(value, name))
            continue
        if sites is None:
            have = ", ".join(map(show, layout.sites)) or "none"
            raise HarvestError(
                f"plant: {show(name)} is never sown; sown are: {have}. Use one of these names."
            )
        if sites[0].first.mode == "append":
            given = value if isinstance(value, (tuple, list)) else (value,)
            if len(given) != len(sites):
                raise HarvestError(
                    f"plant: {show(name)} is sown {len(sites)} times (mode append), but {len(given)} "
                    f"values are given; accepted: a tuple of {len(sites)}."
                )
        else:
            sites = layout.all_sites[name]
            given = [value] * len(sites)
        for site, v in zip(sites, given):
            plants |= _at(name, site, v)
    return plants


def _at(name, site, value):
    if isinstance(value, (Entry, Entries)):
        value = value.primal
    spots = {s.leaf: s for s in site.spots.values() if s.role == "value" and s.primal}
    tree = site.first.tree
    leaves, given = jax.tree.flatten(value)
    if given != tree:
        raise HarvestError(
            f"plant: the value for {show(name)} has structure {given}; accepted: {tree}, as sown at "
            f"{site.first.where}."
        )
    out = {}
    for leaf, x in enumerate(leaves):
        spot = spots[leaf]
        if spot.id[0] == "2" or spot.weak:
            raise HarvestError(
                f"plant: {show(name)} is sown inside a custom derivative rule (at {spot.where}), which "
                f"a planted value would contradict. Plant at a name outside of it."
            )
        scalar = isinstance(x, (bool, int, float, complex))
        x = jnp.asarray(x)
        fits = (
            jnp.promote_types(x.dtype, spot.dtype) == spot.dtype
            if scalar
            else x.dtype == spot.dtype
        )
        if x.shape != spot.shape or not fits:
            raise HarvestError(
                f"plant: the value for {show(name)} is {x.dtype}{list(x.shape)}; accepted: "
                f"{spot.dtype}{list(spot.shape)}, as sown at {spot.where}. Give that shape and dtype."
            )
        out[spot.id] = x.astype(spot.dtype) if scalar else x
    if is_raw(site.first):
        # What jax's own jvp or transpose left at the name: a planted value does not follow the argument.
        for s in site.spots.values():
            if s.role == "value" and not set(letters_of(s)) <= {"p"}:
                out[s.id] = jnp.zeros(s.shape, s.dtype)
    return out
