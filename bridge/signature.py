"""What a value that is not a tensor is in a call: traced, or static, and the key that it adds to the program's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import torch
from jax import tree_util
from jax.core import Tracer

from bridge.dlpack import JaxDevice, jax_dtype

Name = Callable[[], str]

# Static leaves that need no look: their type tells apart what compares equal.
CONSTANT = frozenset({bool, int, str, type(None)})


def traced_value(value: Any, name: Name, x64: bool, device: JaxDevice) -> tuple[Any, Hashable] | None:
    """The value to pass to the program and its key; None for a static one."""
    if isinstance(value, float):
        return float(value), float
    if isinstance(value, complex):
        return complex(value), complex
    if isinstance(value, (np.ndarray, np.generic)):
        array = _checked(np.asarray(value), name, x64)
        return array, (array.dtype, array.shape)
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name()}: expected a torch tensor, given a JAX tracer; torch_call runs outside JAX's transforms"
        )
    if isinstance(value, jax.Array):
        if value.devices() != {device}:
            raise ValueError(
                f"{name()}: expected an array on {device} like the tensors, given one on {value.devices()}"
            )
        return value, (value.dtype, value.shape, value.weak_type, repr(getattr(value, "format", None)))
    return None


def static_key(value: Any, name: Name) -> Hashable:
    """Tells apart what compares equal but acts differently, such as 1, 1.0 and True, or 0.0 and -0.0."""
    if type(value) is tuple:
        return tuple([static_key(item, name) for item in value])
    if isinstance(value, float):
        return float, float(value).hex()
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{name()}: expected a tensor, a float or a hashable static value, given a {type(value).__name__}"
        ) from None
    return type(value), value


def static_value(value: Any) -> Any:
    return jax_dtype(value) if isinstance(value, torch.dtype) else value


def static_floats(treedef: Any, leaves: list[Any]) -> frozenset[int]:
    """Which leaves are floats of a tuple that holds no array."""
    return _static_floats(treedef, tuple([isinstance(leaf, (torch.Tensor, jax.Array, np.ndarray)) for leaf in leaves]))


@functools.lru_cache(maxsize=1024)
def _static_floats(treedef: Any, arrays: tuple[bool, ...]) -> frozenset[int]:
    found: set[int] = set()

    def visit(node: Any) -> None:
        if isinstance(node, tuple):
            places = tree_util.tree_leaves(node)
            if not any(arrays[place] for place in places):
                found.update(places)
                return
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, (tuple, list)) else ():
            visit(child)

    args, kwargs = tree_util.tree_unflatten(treedef, range(len(arrays)))
    for value in (*args, *kwargs.values()):
        visit(value)
    return frozenset(found)


def _checked(array: np.ndarray, name: Name, x64: bool) -> np.ndarray:
    """An array that JAX takes without losing digits, by the rules for tensors."""
    if x64 or array.dtype.itemsize <= (8 if array.dtype.kind == "c" else 4):
        return array
    if array.dtype.kind in "iu":
        narrow = np.dtype(array.dtype.kind + "4")
        limits = np.iinfo(narrow)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise ValueError(
                f"{name()}: expected values from {limits.min} to {limits.max}, since jax_enable_x64 is off; "
                f"given {array.dtype} values outside that range"
            )
        return array.astype(narrow)
    raise ValueError(
        f"{name()}: expected a dtype of 32 bits or less a number, since jax_enable_x64 is off; given {array.dtype}"
    )
