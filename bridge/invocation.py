"""One call taken apart: which of its leaves are traced, its key, and its run through a program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import torch
from jax import tree_util

from bridge.constants import import_values
from bridge.dlpack import SIMPLE_TYPES, conform, refuse_device, simple_dtypes, x64_enabled
from bridge.program import Program, ProgramCache, Recipe, trace_context
from bridge.signature import CONSTANT, static_floats, static_key, static_value, traced_value
from bridge.streams import Endpoint, endpoint, home, open_endpoints


class Call:
    """One call, taken apart into leaves; run where its tensors are real (not those of a torch.func transform)."""

    __slots__ = ("_args", "_fn", "_kwargs", "_treedef", "leaves", "places", "program", "sent", "tracked")

    def __init__(self, fn: Callable, args: tuple, kwargs: dict) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self.leaves, self._treedef = tree_util.tree_flatten((args, kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def replace(self, tensors: Sequence[torch.Tensor]) -> None:
        """Puts other tensors in place: the real ones behind those of a transform."""
        for place, tensor in zip(self.places, tensors, strict=True):
            self.leaves[place] = tensor

    def run(self, wanted: tuple[int, ...], programs: ProgramCache | Program) -> list[torch.Tensor]:
        """Results, then residuals; `wanted` says which tensors to differentiate for."""
        where = self.endpoint()
        where.check()
        signature = self._prepare(where)
        key = (self._fn, self._treedef, wanted, where, trace_context(), signature)
        program = programs if isinstance(programs, Program) else programs.find(key)
        order = where.enter()
        values = import_values(self.sent, where, order, borrowed=program is not None and bool(program.shapes))
        if program is None:
            program = cast(ProgramCache, programs).add(key, lambda: self.trace(values, wanted, where))
        self.program = program
        return [where.give(array, order) for array in program.forward(values)]

    def results(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the function returns; residuals, which stand last, are left out."""
        leaves = list(self.program.static_results)
        for place, tensor in zip(self.program.results, tensors, strict=False):
            leaves[place] = tensor
        return tree_util.tree_unflatten(self.program.out_tree, leaves)

    def saved(self, kind: str, index: int, output: Sequence[torch.Tensor]) -> Any:
        """One residual of the program: a tensor, or a value that torch does not hold."""
        if kind == "value":
            return self.sent[index]
        if kind == "constant":
            return self.program.constants[index]
        return output[index if kind == "result" else index + len(self.program.results)]

    def endpoint(self) -> Endpoint:
        if not self.places:
            (device,) = jnp.zeros(()).devices()  # where JAX puts what has no place of its own
            return home(device)
        tensor = self.leaves[self.places[0]]
        return open_endpoints.get(tensor.device) or self._open(tensor)

    def _open(self, tensor: torch.Tensor) -> Endpoint:
        refuse_device(tensor, lambda: self.name(self.places[0]))
        return endpoint(tensor.device)

    def _prepare(self, where: Endpoint) -> tuple[Hashable, ...]:
        """The key of the leaves; `sent` gets the traced ones as they will cross."""
        device, x64 = where.device, x64_enabled()
        dtypes, alignment, strided = simple_dtypes(x64), where.alignment, torch.strided
        sent: list[Any] = []
        signature: list[Hashable] = []
        for i, leaf in enumerate(self.leaves):
            kind = type(leaf)
            # Written out for the common case: a call of its own would cost as much as all that it asks.
            if (
                kind in SIMPLE_TYPES
                and (dtype := leaf.dtype) in dtypes
                and leaf.device == device
                and leaf.layout is strided
                and leaf.is_contiguous()
                and not leaf.is_neg()
                and not leaf.data_ptr() % alignment
            ):
                signature += (dtype, leaf.shape)
                sent.append(leaf)
            elif isinstance(leaf, torch.Tensor):
                leaf = conform(leaf, lambda i=i: self.name(i), device, x64)
                signature += (leaf.dtype, leaf.shape, None if leaf.is_contiguous() else leaf.stride())
                sent.append(leaf)
            elif kind in CONSTANT:
                signature += (kind, leaf)
            else:
                traced, value, key = self.classify(i, where)
                signature.append(key)
                if traced:
                    sent.append(value)
        self.sent = sent
        return tuple(signature)

    def classify(self, place: int, where: Endpoint) -> tuple[bool, Any, Hashable]:
        """Whether a leaf that is not a tensor is traced, its value then, and its key."""
        leaf, x64 = self.leaves[place], x64_enabled()
        if place not in static_floats(self._treedef, self.leaves):
            found = traced_value(leaf, lambda: self.name(place), x64, where.jax_device)
            if found is not None:
                return True, *found
        return False, None, static_key(leaf, lambda: self.name(place))

    def trace(self, values: list[Any], wanted: tuple[int, ...], where: Endpoint) -> Program:
        """The program, traced for arrays or their shapes."""
        traced = [
            i
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) or (type(leaf) not in CONSTANT and self.classify(i, where)[0])
        ]
        kept = set(traced)
        template = tuple(None if i in kept else static_value(leaf) for i, leaf in enumerate(self.leaves))
        recipe = Recipe(self._treedef, template, tuple(traced))
        return Program(self._fn, recipe, values, tuple(traced.index(self.places[i]) for i in wanted), where)

    def name(self, place: int) -> str:
        """A leaf as the caller would write it: the parameter's name where `fn` has one."""
        path = tree_util.tree_flatten_with_path((self._args, self._kwargs))[0][place][0]
        rest = tree_util.keystr(path[2:])
        if path[0].idx == 1:
            return f"{path[1].key}{rest}"
        try:
            parameters = list(inspect.signature(self._fn).bind_partial(*self._args).arguments)
            return f"{parameters[path[1].idx]}{rest}"
        except (IndexError, TypeError, ValueError):
            return f"args[{path[1].idx}]{rest}"
