"""Imports for a call. On a CPU parameters are imported once: until their memory, version, shape or strides change."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import jax
import torch

from bridge.streams import Endpoint, Host


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
            and not entry.array.is_deleted()
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


def import_values(values: list[Any], where: Endpoint, order: Any, *, borrowed: bool) -> list[Any]:
    """JAX arrays for the tensors among values that conform; the others as they are.

    Borrowed ones serve a program with results, and no longer than until those are given.
    """
    if borrowed and where.borrows:
        return where.borrow(values, order)
    kept = constant_imports if isinstance(where, Host) else None
    return [_imported(value, where, order, kept) if isinstance(value, torch.Tensor) else value for value in values]


def _imported(tensor: torch.Tensor, where: Endpoint, order: Any, kept: ConstantImports | None) -> jax.Array:
    if kept is None or type(tensor) is not torch.nn.Parameter:
        return where.take(tensor, order)
    array = kept.get(tensor)
    if array is None:
        array = where.take(tensor, order)
        kept.put(tensor, array)
    return array
