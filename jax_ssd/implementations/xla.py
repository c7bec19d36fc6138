"""Plain JAX: runs wherever XLA does, serves every call, and is what kernels fall back to for gradients."""

from __future__ import annotations

from typing import Any

from jax_ssd import settings
from jax_ssd.implementations import xla_scan, xla_update
from jax_ssd.implementations.chunk_table import num_chunks
from jax_ssd.problem import DeviceInfo, Problem, ScanProblem


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """None: it serves everything."""
    return None


def configuration(problem: Problem, device: DeviceInfo) -> dict[str, Any]:
    """Chunk size and chunks per step of a scan; nothing is chosen for an update."""
    if not isinstance(problem, ScanProblem):
        return {}
    chunk_size = settings.xla_chunk_size(problem)
    chunks = num_chunks(problem, chunk_size)
    return {"chunk_size": chunk_size, "block_chunks": settings.xla_block_chunks(chunk_size, chunks)}


def run(problem: Problem, arrays: Any) -> Any:
    """Serve a call."""
    return _RUN[problem.op](problem, arrays)


_RUN = {
    "chunk_scan": xla_scan.chunk_scan,
    "prefill": xla_scan.prefill,
    "selective_state_update": xla_update.selective_state_update,
    "replay_update": xla_update.replay_update,
}
