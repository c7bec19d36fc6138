"""Triton plans launched from JAX: one custom call a launch, on XLA's own buffers and stream."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import jax
from jax import lax

from jax_ssd import settings, varying
from jax_ssd.implementations.triton_plan import Plan
from jax_ssd.problem import Array, DeviceInfo

_Result = TypeVar("_Result")


def device_reason(device: DeviceInfo) -> str | None:
    """Why Triton kernels cannot run on a device from this process, or None."""
    if device.platform != "gpu" or device.compute_capability is None:
        return f"needs an NVIDIA GPU, got {device.platform}."
    if device.compute_capability < (8, 0):
        version = ".".join(map(str, device.compute_capability))
        return f"needs compute capability 8.0 or higher, got {version}."
    return _missing()


@functools.cache
def _missing() -> str | None:
    """What keeps this process from launching kernels. jax_triton refuses to be imported without JAX's CUDA plugin."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed."
    try:
        settings.jax_triton()
    except ImportError as fault:
        return f"jax_triton cannot be imported: {fault}."
    return None


def run_plan(
    plan: Plan, arrays: dict[str, Array], kernels: ModuleType, *, compute_capability: int | None = None
) -> dict[str, Array]:
    """Launch a plan's kernels on arrays by name; returns what they wrote.

    An output that shares an input's memory is written in place where the caller donates it; XLA copies it elsewhere.
    `compute_capability` (90 for 9.0) is for lowering where there is no GPU.
    """
    triton_call = settings.jax_triton().triton_call
    env = varying.together(dict(arrays))
    for launch in plan.launches:
        outputs = tuple(name for name in launch.outputs)
        aliases = {
            launch.inputs.index(plan.aliases[name]): position
            for position, name in enumerate(outputs)
            if name in plan.aliases
        }
        shapes = [jax.ShapeDtypeStruct(plan.buffers[name].shape, plan.buffers[name].dtype) for name in outputs]
        results = triton_call(
            *(env[name] for name in launch.inputs),
            *launch.numbers,
            kernel=getattr(kernels, launch.kernel),
            out_shape=shapes,
            grid=(launch.programs,),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            input_output_aliases=aliases,
            compute_capability=compute_capability,
            name=launch.kernel,
            **launch.constants,
        )
        # The custom call knows nothing of mesh axes: its results vary wherever its inputs do.
        env = varying.together(env | dict(zip(outputs, results, strict=True)))
    return {name: env[name] for name in plan.buffers}


def looped(function: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """A function of one pytree that launches kernels, made fit for vmap: a loop."""
    batched = jax.custom_batching.custom_vmap(function)

    @batched.def_vmap
    def rule(axis_size: int, in_batched: list[Any], arrays: Any) -> tuple[_Result, Any]:
        leaves, tree = jax.tree.flatten(arrays)
        mapped = jax.tree.leaves(in_batched[0] if isinstance(in_batched, list | tuple) else in_batched)

        def one(rows: list[Array]) -> _Result:
            rest = iter(rows)
            return batched(tree.unflatten([next(rest) if m else leaf for leaf, m in zip(leaves, mapped, strict=True)]))

        result = lax.map(one, [leaf for leaf, m in zip(leaves, mapped, strict=True) if m])
        return result, jax.tree.map(lambda _: True, result)

    return batched


def transformable(name: str, function: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """A function of one pytree that launches kernels, made fit for vmap (a loop) and clear about gradients (none)."""
    differentiable = jax.custom_jvp(looped(function))

    @differentiable.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(f"{name}: no derivative on kernels; use implementation='xla'.")

    return differentiable
