"""Parameters imported once: cached until their memory, version, shape or strides change."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import jax
import torch

from bridge.streams import Endpoint


class _Import(NamedTuple):
    parameter: weakref.ref
    pointer: int
    version: int
    shape: torch.Size
    strides: tuple[int, ...]
    array: jax.Array


class ConstantImports:
    """Imports of `torch.nn.Parameter`s by identity; an entry goes when its parameter does.

    An entry shares the parameter's memory, so a write that does not count as a version (through `.data`) is seen too.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Import] = {}

    def get(self, parameter: torch.nn.Parameter) -> jax.Array | None:
        entry = self._entries.get(id(parameter))
        if (
            entry is not None
            and entry.parameter() is parameter
            and entry.pointer == parameter.data_ptr()
            and entry.version == parameter._version
            and entry.shape == parameter.shape
            and entry.strides == parameter.stride()
        ):
            return entry.array
        return None

    def put(self, parameter: torch.nn.Parameter, array: jax.Array) -> None:
        if parameter.is_inference():  # has no version to be told by
            return
        key = id(parameter)
        reference = weakref.ref(parameter, lambda _: self._entries.pop(key, None))
        self._entries[key] = _Import(
            reference, parameter.data_ptr(), parameter._version, parameter.shape, parameter.stride(), array
        )

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


constant_imports = ConstantImports()


def import_values(values: list[Any], where: Endpoint, order: Any) -> list[Any]:
    """JAX arrays for the tensors among values that conform; the others as they are."""
    imported: list[Any] = []
    cached: list[int] = []
    fresh = False
    take = where.take
    for value in values:
        if type(value) is torch.nn.Parameter:
            array = constant_imports.get(value)
            if array is None:
                fresh = True
                array = take(value, order)
                constant_imports.put(value, array)
            else:
                cached.append(len(imported))
            imported.append(array)
        elif isinstance(value, torch.Tensor):
            fresh = True
            imported.append(take(value, order))
        else:
            imported.append(value)
    if cached and not fresh:  # something has to make the program wait for the caller's stream
        imported[cached[0]] = take(values[cached[0]], order)
    return imported
