"""Triton kernels: NVIDIA GPUs of compute capability 8.0 and up, through jax-triton."""

from __future__ import annotations

from typing import Any

from jax_ssd.implementations import triton_scan, triton_update
from jax_ssd.problem import DeviceInfo, Problem

_MODULES = {
    "chunk_scan": triton_scan,
    "prefill": triton_scan,
    "selective_state_update": triton_update,
    "replay_update": triton_update,
}


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    return _MODULES[problem.op].supports(problem, device)


def configuration(problem: Problem, device: DeviceInfo) -> dict[str, Any]:
    """How a call would be cut into programs."""
    return _MODULES[problem.op].configuration(problem, device)


def run(problem: Problem, arrays: Any) -> Any:
    """Serve a call."""
    return _MODULES[problem.op].run(problem, arrays)
