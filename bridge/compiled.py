"""`torch_call` inside torch.compile: a custom operator whose shapes come from tracing the JAX function abstractly.

Dynamo takes the arguments apart with plain Python; what is not a tensor becomes a constant of the graph, known to the
operators by the name of its site. Fake kernels trace the function and never run it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import torch
from jax import tree_util

from bridge.autograd import Pullback
from bridge.dlpack import crossing_dtype, jax_dtype, torch_dtype, x64_enabled
from bridge.invocation import Call
from bridge.program import Program, trace_context
from bridge.signature import static_key

# Kinds of a form: ("tensor", index), ("constant", value), ("dict", keys, forms), (list, forms), (class, forms).
Form = tuple


class _Site(NamedTuple):
    """A call in a graph, tensors left out."""

    fn: Callable
    form: Form

    def call(self, tensors: Sequence[torch.Tensor]) -> Call:
        args, kwargs = filled(self.form, tensors)
        return Call(self.fn, args, kwargs)


class _Results:
    """The form of each site's results, as an attribute of its name, which Dynamo can read and guard."""


# torch keeps compiled graphs on disk: a name that another process could give to another function would find its graph.
_PROCESS = uuid.uuid4().hex
_sites: dict[str, _Site] = {}
_site_names: dict[Hashable, str] = {}
_programs: list[Program] = []
_others: list[list[Any]] = []
_program_numbers: dict[Hashable, int] = {}
_results = _Results()
_lock = threading.RLock()


def call_in_graph(fn: Callable, args: tuple, kwargs: dict) -> Any:
    """What Dynamo traces in place of a call."""
    tensors: list[torch.Tensor] = []
    form = form_of((args, kwargs), tensors)
    site = _site(fn, form)
    wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad] if torch.is_grad_enabled() else []
    outputs = torch.ops.jax_bridge.call(tensors, site, wanted)
    return filled(getattr(_results, site), outputs)


def form_of(value: Any, tensors: list[torch.Tensor]) -> Form:
    """The structure of a value; its tensors are appended in JAX's order (dictionaries by sorted key)."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, dict):
        keys = tuple(sorted(value))
        return ("dict", keys, tuple([form_of(value[key], tensors) for key in keys]))
    if isinstance(value, (tuple, list)):
        return (type(value), tuple([form_of(item, tensors) for item in value]))
    return ("constant", value)


def filled(form: Form, tensors: Sequence[torch.Tensor]) -> Any:
    """The value again, with other tensors."""
    kind = form[0]
    if kind == "tensor":
        return tensors[form[1]]
    if kind == "constant":
        return form[1]
    if kind == "dict":
        return {key: filled(item, tensors) for key, item in zip(form[1], form[2], strict=True)}
    items = [filled(item, tensors) for item in form[1]]
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


@torch.compiler.assume_constant_result
def _site(fn: Callable, form: Form) -> str:
    key = (fn, static_key(form, lambda: "arguments of torch_call"))
    with _lock:
        if key not in _site_names:
            name = _site_names[key] = f"site_{_PROCESS}_{len(_sites)}"
            _sites[name] = _Site(fn, form)
        return _site_names[key]


def _program(tensors: Sequence[torch.Tensor], site: str, wanted: Sequence[int]) -> int:
    """The number of the traced program; tensors may be fake. Sizes that Dynamo left open become fixed here."""
    call = _sites[site].call(tensors)
    where, x64 = call.endpoint(), x64_enabled()
    values: list[Any] = []
    signature: list[Hashable] = []
    for i, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor):
            dtype = jax_dtype(crossing_dtype(leaf.dtype, lambda i=i: call.name(i), x64))
            shape = tuple(int(size) for size in leaf.shape)
            values.append(jax.ShapeDtypeStruct(shape, dtype))
            signature.append((shape, dtype))
        else:
            traced, value, key = call.classify(i, where)
            signature.append(key)
            values += [value] if traced else []
    key = (trace_context(), site, where.device, tuple(wanted), tuple(signature))
    with _lock:
        if key not in _program_numbers:
            program = call.trace(values, tuple(wanted), where)
            _programs.append(program)
            _others.append([_fixed(program, kind, index, values) for kind, index in program.saved])
            setattr(_results, site, _result_form(program))
            _program_numbers[key] = len(_programs) - 1
        return _program_numbers[key]


def _fixed(program: Program, kind: str, index: int, values: list[Any]) -> Any:
    """A residual that is the same for every run of the graph, or None."""
    if kind == "constant":
        return program.constants[index]
    fixed = kind == "value" and not isinstance(values[index], jax.ShapeDtypeStruct)
    return values[index] if fixed else None


def _result_form(program: Program) -> Form:
    places = iter(range(len(program.results)))
    leaves = [_Place(next(places)) if i in program.results else leaf for i, leaf in enumerate(program.static_results)]
    return _form_of_places(tree_util.tree_unflatten(program.out_tree, leaves))


class _Place(NamedTuple):
    index: int


def _form_of_places(value: Any) -> Form:
    if isinstance(value, _Place):
        return ("tensor", value.index)
    if isinstance(value, dict):
        return ("dict", tuple(value), tuple(_form_of_places(item) for item in value.values()))
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(_form_of_places(item) for item in value))
    if not tree_util.all_leaves([value]) and value is not None:
        raise NotImplementedError(
            f"result: inside torch.compile torch_call returns tuples, lists and dicts, not a {type(value).__name__}"
        )
    return ("constant", value)


# Under CUDA graphs the compiler has to leave the operators out of the capture; older versions cannot be told.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


@torch.library.custom_op("jax_bridge::call", mutates_args=(), tags=_TAGS)
def _call(tensors: list[torch.Tensor], site: str, wanted: list[int]) -> list[torch.Tensor]:
    tensors = [tensor.contiguous() for tensor in tensors]
    program = _programs[_program(tensors, site, wanted)]
    return _sites[site].call(tensors).run(tuple(wanted), program)


@_call.register_fake
def _(tensors: list[torch.Tensor], site: str, wanted: list[int]) -> list[torch.Tensor]:
    program = _programs[_program(tensors, site, wanted)]
    return [_blank(program, shape, dtype) for shape, dtype in program.shapes]


@torch.library.custom_op("jax_bridge::pullback", mutates_args=(), tags=_TAGS)
def _pullback(
    saved: list[torch.Tensor], cotangents: list[torch.Tensor], given: list[bool], number: int
) -> list[torch.Tensor]:
    present: Iterator[torch.Tensor] = iter(cotangents)
    every = [next(present) if is_given else None for is_given in given]
    contiguous = [tensor.contiguous() for tensor in saved]
    return list(Pullback.forward(_programs[number], _others[number], None, len(saved), *contiguous, *every))


@_pullback.register_fake
def _(saved: list[torch.Tensor], cotangents: list[torch.Tensor], given: list[bool], number: int) -> list[torch.Tensor]:
    program = _programs[number]
    return [_blank(program, shape, dtype) for shape, dtype in program.value_shapes]


def _blank(program: Program, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=torch_dtype(dtype), device=program.where.device)


def _setup(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
    tensors, site, wanted = inputs
    ctx.count, ctx.wanted = len(tensors), wanted
    if not wanted:
        return
    ctx.number = _program(tensors, site, wanted)
    program = _programs[ctx.number]
    leaves = _sites[site].call(tensors).leaves
    arguments = [leaves[place] for place in program.traced]
    kinds = {"value": arguments, "result": output, "residual": output[len(program.results) :]}
    saved = [
        kinds[kind][index]
        for (kind, index), other in zip(program.saved, _others[ctx.number], strict=True)
        if other is None
    ]
    ctx.save_for_backward(*saved)


def _backward(ctx: Any, cotangents: list[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], None, None]:
    gradients: list[torch.Tensor | None] = [None] * ctx.count
    if ctx.wanted:
        floats = list(compress(cotangents, _programs[ctx.number].differentiable))
        present = [one for one in floats if one is not None]
        given = [one is not None for one in floats]
        found = torch.ops.jax_bridge.pullback(list(ctx.saved_tensors), present, given, ctx.number)
        for place, gradient in zip(ctx.wanted, found, strict=True):
            gradients[place] = gradient
    return gradients, None, None


_call.register_autograd(_backward, setup_context=_setup)
