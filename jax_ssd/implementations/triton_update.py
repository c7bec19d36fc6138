"""Decode on Triton kernels: state update and replay of a ring, each in one launch, in place on donated arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ssd import settings
from jax_ssd.implementations import triton_launch
from jax_ssd.implementations.triton_update_plan import CACHE_FIELDS, replay_plan, update_plan
from jax_ssd.problem import Array, DeviceInfo, ReplayArrays, UpdateArrays, UpdateProblem, UpdateResult
from jax_ssd.replay import ReplayCache, ReplayResult

_LARGEST_DSTATE = 512
_LARGEST_RING = 32
_MOST_TOKENS = 16  # the tokens of a call are unrolled


def supports(problem: UpdateProblem, device: DeviceInfo) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    return triton_launch.device_reason(device) or unsupported(problem)


def unsupported(problem: UpdateProblem) -> str | None:
    """Why the kernels cannot serve a problem on any device, or None."""
    if "float64" in (problem.dtype, problem.cache.dtype):
        return "computes in float32, got float64."
    dstate = problem.sizes.dstate
    if dstate % 8 or dstate > _LARGEST_DSTATE:
        return f"needs a dstate that is a multiple of 8 up to {_LARGEST_DSTATE}, got {dstate}."
    if problem.num_tokens > _MOST_TOKENS:
        return f"takes at most {_MOST_TOKENS} tokens a call, got {problem.num_tokens}."
    if problem.ring_size is not None and problem.ring_size > _LARGEST_RING:
        return f"takes rings of at most {_LARGEST_RING} tokens, got {problem.ring_size}."
    if not (problem.batch and problem.num_tokens and problem.cache.num_slots):
        return "has nothing to launch for an empty call."
    return None


def configuration(problem: UpdateProblem, device: DeviceInfo) -> dict[str, Any]:
    """The tile that a call would use."""
    return dataclasses.asdict(settings.triton_update_tile(problem))


def run(problem: UpdateProblem, arrays: Any, *, compute_capability: int | None = None) -> Any:
    """Serve a decode step; `compute_capability` (90 for 9.0) is for lowering where there is no GPU."""
    serve = _selective_state_update if problem.ring_size is None else _replay_update
    launch = functools.partial(serve, problem, compute_capability=compute_capability)
    return triton_launch.transformable(problem.op, launch)(arrays)


def _selective_state_update(
    problem: UpdateProblem, arrays: UpdateArrays, compute_capability: int | None
) -> UpdateResult:
    from jax_ssd.kernels.triton import update

    named = _token_arrays(arrays) | dict(
        state=arrays.state, read_slots=arrays.read_slots, write_slots=arrays.write_slots
    )
    tile = settings.triton_update_tile(problem)
    plan = update_plan(problem, tile, native=True, **_place(arrays.rounding))
    written = triton_launch.run_plan(plan, _present(named), update, compute_capability=compute_capability)
    return UpdateResult(written["y"], written["new_state"])


def _replay_update(problem: UpdateProblem, arrays: ReplayArrays, compute_capability: int | None) -> ReplayResult:
    from jax_ssd.kernels.triton import replay

    named = _token_arrays(arrays) | dict(zip(CACHE_FIELDS, arrays.cache, strict=True), slots=arrays.slots)
    tile = settings.triton_update_tile(problem)
    plan = replay_plan(problem, tile, native=True, **_place(arrays.rounding))
    written = triton_launch.run_plan(plan, _present(named), replay, compute_capability=compute_capability)
    return ReplayResult(written["y"], ReplayCache(*(written[f"new_{name}"] for name in CACHE_FIELDS)))


def _token_arrays(arrays: UpdateArrays | ReplayArrays) -> dict[str, Array | None]:
    """Tokens, parameters and what the rounding reads, by the kernels' names."""
    return arrays.tokens._asdict() | arrays.parameters._asdict() | _rounding_arrays(arrays.rounding)


def _place(rounding: Any) -> dict[str, Any]:
    """Where the heads and the seeds are, as static options of a plan."""
    if rounding is None:
        return {}
    layers, total_heads = rounding.seeds.shape[0], rounding.total_heads
    return dict(layers=layers, total_heads=total_heads, shifted=total_heads is not None)


def _rounding_arrays(rounding: Any) -> dict[str, Array]:
    """What the kernel reads of a StochasticRounding: arrays, so that no step or layer compiles anew."""
    if rounding is None:
        return {}
    return dict(seeds=jnp.asarray(rounding.seeds), layer=_one(rounding.layer), head_offset=_one(rounding.head_offset))


def _one(value: Any) -> Array:
    """A scalar as an array (1,) of 32-bit integers; a Python number becomes a constant of the program."""
    if isinstance(value, int | np.integer):
        return jnp.asarray(np.array([value], np.int64).astype(np.uint32).view(np.int32))
    return jnp.asarray(value).astype(jnp.int32).reshape(1)


def _present(named: dict[str, Array | None]) -> dict[str, Array]:
    return {name: value for name, value in named.items() if value is not None}
