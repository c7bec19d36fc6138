"""The Triton scan from JAX: two launches (three with segments), the gradient on xla from the saved inputs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssd import settings
from jax_ssd.implementations import triton_launch, triton_plan, xla_scan
from jax_ssd.problem import (
    Array,
    DeviceInfo,
    Parameters,
    PrefillArrays,
    PrefillResult,
    ScanArrays,
    ScanProblem,
    ScanResult,
    Tokens,
)

_LARGEST_DSTATE = 256


class Static(NamedTuple):
    """What a scan is compiled for; `compute_capability` (90 for 9.0) is None where the GPU at hand decides."""

    problem: ScanProblem
    tile: settings.TritonScanTile
    compute_capability: int | None


class Differentiable(NamedTuple):
    """Floating-point inputs of a scan."""

    tokens: Tokens
    parameters: Parameters
    initial_states: Array | None


class Integers(NamedTuple):
    """Integer inputs of a scan."""

    cu_seqlens: Array | None
    seq_idx: Array | None
    checkpoint_positions: Array | None


def supports(problem: ScanProblem, device: DeviceInfo) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    return triton_launch.device_reason(device) or unsupported(problem, device)


def unsupported(problem: ScanProblem, device: DeviceInfo) -> str | None:
    """Why the kernels cannot serve a problem on an NVIDIA GPU, or None."""
    if "float64" in (problem.dtype, problem.state_dtype, problem.cache and problem.cache.dtype):
        return "computes in float32, got float64."
    if problem.sizes.dstate > _LARGEST_DSTATE:
        return f"needs a dstate of at most {_LARGEST_DSTATE}, got {problem.sizes.dstate}."
    if not (problem.num_tokens and problem.num_seqs):
        return "has nothing to launch for an empty call."
    if _tile(problem, device) is None:
        return f"no tile fits {device.shared_memory_per_block} bytes of shared memory."
    return None


def configuration(problem: ScanProblem, device: DeviceInfo) -> dict[str, Any]:
    """The tile that a call would use, and its number of launches."""
    tile = _tile(problem, device)
    return dataclasses.asdict(tile) | {"launches": 3 if tile.segment else 2} if tile else {}


def run(
    problem: ScanProblem, arrays: ScanArrays | PrefillArrays, device: DeviceInfo | None = None
) -> ScanResult | PrefillResult:
    """Serve `chunk_scan` or `prefill`; `device` stands in for the GPU where there is none."""
    major, minor = (device and device.compute_capability) or (0, 0)
    tile = _tile(problem, device or _gpu())
    assert tile is not None, "asked by `supports`"
    static = Static(problem, tile, 10 * major + minor or None)
    if isinstance(arrays, PrefillArrays):
        return triton_launch.transformable("prefill", functools.partial(_prefill, static))(arrays)
    inputs = Differentiable(arrays.tokens, arrays.parameters, arrays.initial_states)
    return _chunk_scan(static, inputs, Integers(arrays.cu_seqlens, arrays.seq_idx, arrays.checkpoint_positions))


def _tile(problem: ScanProblem, device: DeviceInfo) -> settings.TritonScanTile | None:
    return settings.triton_scan_tile(
        problem, device.multiprocessors, device.shared_memory_per_block, device.compute_capability
    )


def _gpu() -> DeviceInfo:
    """What the choice of a tile needs to know of the GPU."""
    gpu = jax.devices("gpu")[0]
    major, minor = (int(part) for part in gpu.compute_capability.split("."))
    return DeviceInfo("gpu", (major, minor), gpu.core_count, getattr(gpu, "shared_memory_per_block_optin", None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunk_scan(static: Static, inputs: Differentiable, integers: Integers) -> ScanResult:
    launch = triton_launch.looped(functools.partial(_launch_scan, static))
    return launch((inputs, integers))


def _forward(static: Static, inputs: Differentiable, integers: Integers) -> tuple[ScanResult, Any]:
    return _chunk_scan(static, inputs, integers), (inputs, integers)


def _backward(static: Static, residuals: tuple[Differentiable, Integers], cotangents: ScanResult) -> tuple[Any, None]:
    return _gradient(static, *residuals, cotangents), None


_chunk_scan.defvjp(_forward, _backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradient(static: Static, inputs: Differentiable, integers: Integers, cotangents: ScanResult) -> Differentiable:
    """The gradient on xla, from the saved inputs."""

    def plain(inputs: Differentiable) -> ScanResult:
        return xla_scan.chunk_scan(static.problem, ScanArrays(*inputs, *integers))

    return jax.vjp(plain, inputs)[1](cotangents)[0]


@_gradient.defjvp
def _second_derivative(static: Static, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError("chunk_scan: no second derivatives on kernels; use implementation='xla'.")


def _launch_scan(static: Static, arrays: tuple[Differentiable, Integers]) -> ScanResult:
    written = _launch(static, *arrays)
    return ScanResult(written["y"], written["final"], written.get("checkpoints"))


def _prefill(static: Static, arrays: PrefillArrays) -> PrefillResult:
    scan, rounding = arrays.scan, arrays.rounding
    inputs = Differentiable(scan.tokens, scan.parameters, None)
    cached = {name: getattr(arrays, name) for name in ("cache", "slots", "has_initial_state", "checkpoint_slots")}
    total_heads = None
    if rounding is not None:
        total_heads = rounding.check_heads(static.problem.sizes.num_heads)
        cached |= {"seeds": jnp.asarray(rounding.seeds), "layer": _one(rounding.layer)}
        cached["head_offset"] = _one(rounding.head_offset)
    integers = Integers(scan.cu_seqlens, None, scan.checkpoint_positions)
    written = _launch(static, inputs, integers, total_heads, **cached)
    return PrefillResult(written["y"], written["final"])


def _launch(
    static: Static, inputs: Differentiable, integers: Integers, total_heads: int | None = None, **cached: Array | None
) -> dict[str, Array]:
    """Launch the plan's kernels on the call's arrays by name; the bounds of a batch are known."""
    from jax_ssd.kernels.triton import scan

    problem = static.problem
    named = inputs.tokens._asdict() | inputs.parameters._asdict() | integers._asdict() | cached
    named["initial_states"] = inputs.initial_states
    if named["cu_seqlens"] is None:
        bounds = np.arange(problem.num_seqs + 1) * (problem.uniform_length or 0)
        named["cu_seqlens"] = jnp.asarray(bounds, jnp.int32)
    strides = triton_plan.dense_strides(problem)
    plan = triton_plan.scan_plan(problem, static.tile, strides, upcast=False, total_heads=total_heads)
    present = {name: value for name, value in named.items() if value is not None}
    return triton_launch.run_plan(plan, present, scan, compute_capability=static.compute_capability)


def _one(value: Any) -> Array:
    """A scalar as an int32 array (1,)."""
    return jnp.asarray(value).astype(jnp.int32).reshape(1)
