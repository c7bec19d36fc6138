"""Manual mesh axes: inside `jax.shard_map` a loop's carry must vary over the axes that its inputs vary over."""

from __future__ import annotations

from typing import TypeVar

import jax
from jax import lax

_Tree = TypeVar("_Tree")


def together(tree: _Tree) -> _Tree:
    """The same values, all marked as varying over every mesh axis that one of them varies over."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    axes = frozenset().union(*(_axes(leaf) for leaf in leaves))
    if not axes:
        return tree
    return jax.tree.map(lambda leaf: _cast(leaf, axes), tree)


def _axes(value: jax.Array) -> frozenset[str]:
    return jax.typeof(value).manual_axis_type.varying


def _cast(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - _axes(value)))
    return lax.pcast(value, missing, to="varying") if missing else value
