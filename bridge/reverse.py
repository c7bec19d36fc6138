"""`jax_call`: a torch function inside an eager JAX program, with gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import tree_util
from jax.core import Tracer

from bridge.dlpack import conform, x64_enabled
from bridge.streams import Endpoint, Host, home


def jax_call(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a torch function with JAX arrays and returns JAX arrays.

        jax_call(fn, *args, **kwargs) == to_jax(fn(*to_torch(args), **to_torch(kwargs)))

    For eager JAX: `jax.grad` and `jax.vjp` differentiate through it once, by torch's autograd. Arguments share memory;
    results do on a CPU, and are copied into JAX's memory on a GPU, where torch could not know when JAX is done with
    its own.

    Args:
        fn: a torch function. It must not write to its arguments, since JAX's arrays never change.
        *args, **kwargs: pytrees; JAX arrays, all on one device, become tensors, everything else is passed on.

    Returns:
        What `fn` returns, with JAX arrays in place of tensors.

    Raises:
        TypeError: an argument is traced (under jit, vmap or scan), or a result cannot cross.
        ValueError: arrays on several devices; `fn` wrote to an argument; 64-bit results with jax_enable_x64 off.
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function, given a {type(fn).__name__}")
    leaves, treedef = tree_util.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    call = _TorchCall(fn, treedef, leaves, places)
    arrays: Any = _run(call, *[leaves[i] for i in places])
    remaining = iter(arrays)
    results = [next(remaining) if leaf is _ARRAY else leaf for leaf in call.results]
    return tree_util.tree_unflatten(call.out_tree, results)


_ARRAY = object()


class _TorchCall:
    """One call; the structure of its results is known once it has run."""

    def __init__(self, fn: Callable, treedef: Any, leaves: list[Any], places: list[int]) -> None:
        self.fn, self.treedef, self.leaves, self.places = fn, treedef, leaves, places
        self.results: list[Any] = []
        self.out_tree: Any = None

    def run(self, arrays: Sequence[jax.Array], grad: bool) -> tuple[list[jax.Array], _Graph]:
        arrays = [jnp.asarray(array) for array in arrays]  # differentiation passes Python numbers
        where = _common_home(arrays)
        tensors = to_torch(arrays, where)
        versions = [tensor._version for tensor in tensors]
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor.requires_grad_(grad and (tensor.is_floating_point() or tensor.is_complex()))
        args, kwargs = tree_util.tree_unflatten(self.treedef, leaves)
        with torch.set_grad_enabled(grad):
            results, self.out_tree = tree_util.tree_flatten(self.fn(*args, **kwargs))
        if any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
            raise ValueError("fn: expected a function that leaves its arguments as they are; it wrote to one of them")
        outputs = [result for result in results if isinstance(result, torch.Tensor)]
        self.results = [_ARRAY if isinstance(result, torch.Tensor) else result for result in results]
        return to_jax([_own(output, tensors) for output in outputs], where), _Graph(where, tensors, outputs)


@tree_util.register_static
class _Graph:
    """torch's side of a call, which the backward pass needs: a residual without leaves."""

    def __init__(self, where: Endpoint, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.where, self.inputs, self.outputs = where, inputs, outputs

    def pull(self, cotangents: Sequence[Any]) -> tuple[jax.Array | None, ...]:
        used = [
            (output, cotangent)
            for output, cotangent in zip(self.outputs, cotangents, strict=True)
            if output.requires_grad and cotangent.dtype != jax.dtypes.float0
        ]
        wanted = [tensor for tensor in self.inputs if tensor.requires_grad]
        if not used or not wanted:
            return (None,) * len(self.inputs)
        # JAX's cotangent of a complex number is the conjugate of torch's.
        given = [one.conj() for one in to_torch([jnp.asarray(cotangent) for _, cotangent in used], self.where)]
        found = torch.autograd.grad([output for output, _ in used], wanted, given, retain_graph=True, allow_unused=True)
        arrays = iter(to_jax([one.conj() for one in found if one is not None], self.where))
        by_input = iter([None if one is None else next(arrays) for one in found])
        return tuple(next(by_input) if tensor.requires_grad else None for tensor in self.inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: _TorchCall, *arrays: jax.Array) -> list[jax.Array]:
    return call.run(arrays, grad=False)[0]


def _run_forward(call: _TorchCall, *arrays: jax.Array) -> tuple[list[jax.Array], _Graph]:
    return call.run(arrays, grad=True)


def _run_backward(call: _TorchCall, graph: _Graph, cotangents: list[Any]) -> tuple[jax.Array | None, ...]:
    return graph.pull(cotangents)


_run.defvjp(_run_forward, _run_backward)


def to_torch(arrays: Sequence[jax.Array], where: Endpoint) -> list[torch.Tensor]:
    """Tensors on the arrays' memory, for the current stream."""
    for array in arrays:
        if isinstance(array, Tracer):
            raise TypeError(
                "jax_call runs in eager JAX only: it was given a traced array, as in jit, vmap, scan or a second grad"
            )
    where.check()
    order = where.enter()
    return [where.give(array, order) for array in arrays]


def to_jax(tensors: Sequence[torch.Tensor], where: Endpoint) -> list[jax.Array]:
    """JAX arrays of the tensors: their memory on a CPU, copies on a GPU."""
    x64 = x64_enabled()
    ready = [conform(tensor.detach(), lambda: "result", where.device, x64) for tensor in tensors]
    order = where.enter()
    arrays = [where.take(tensor, order) for tensor in ready]
    if isinstance(where, Host):
        return arrays
    copies = [jnp.array(array, copy=True) for array in arrays]
    for copy in copies:
        where.give(copy, order)  # the stream that torch may reuse the memory on waits for the copy
    return copies


def _own(output: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """A result that nobody else can write to later: parameters and views of arguments are copied."""
    if output.layout is not torch.strided:
        return output  # refused when it crosses
    shared = isinstance(output, torch.nn.Parameter) or any(
        output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for tensor in inputs
    )
    return output.clone() if shared else output


def _common_home(arrays: Sequence[jax.Array]) -> Endpoint:
    devices = set().union(*(array.devices() for array in arrays if not isinstance(array, Tracer)))
    if len(devices) > 1:
        raise ValueError(f"arguments: expected arrays on one device, given some on {sorted(map(str, devices))}")
    return home(devices.pop() if devices else jax.local_devices()[0])
