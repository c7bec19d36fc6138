"""Tuned sizes: everything that chooses a configuration, and the one environment variable."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.resources
import itertools
import json
import os
from types import ModuleType
from typing import Any, NamedTuple

from jax_ssd.problem import ScanProblem, UpdateProblem

_XLA_CHUNK = 64
_XLA_SMALLEST_CHUNK = 16
# A block is what one step of the scan works on. Longer blocks save fewer states for the gradient and hold more scores.
_XLA_BLOCK_TOKENS = 512


def xla_chunk_size(problem: ScanProblem) -> int:
    """Rows of a chunk: the caller's, or one that leaves little padding at the mean length of a sequence."""
    if problem.chunk_size is not None:
        return problem.chunk_size
    mean = problem.num_tokens // max(problem.num_seqs, 1)
    chunk = _XLA_SMALLEST_CHUNK
    while chunk < _XLA_CHUNK and chunk < mean:
        chunk *= 2
    return chunk


def xla_block_chunks(chunk_size: int, num_chunks: int) -> int:
    """Chunks that one step of the scan works on."""
    return max(1, min(_XLA_BLOCK_TOKENS // chunk_size, num_chunks))


# Triton scan.

_TRITON_CHUNKS = (16, 32, 64)
_SMALLER_CHUNK = 32  # for float32, and for tensor cores that need both operands in registers
_SHARED_MEMORY = 232448  # an H200's, where a device does not say


class _Tuned(NamedTuple):
    """What was measured to be best on one GPU; `benchmarks/gpu_scan.py --stage tune` writes it anew."""

    chunk: int
    num_stages: int
    touch: bool
    state_warps: int
    state_stages: int
    programs_per_multiprocessor: int
    shortest_segment: int
    multiprocessors: int
    compute_capability: tuple[int, int]


@functools.cache
def tuned_triton_scan() -> dict[str, Any]:
    """The H200's table: sizes for half precision, the winner of each row, date and versions. Other GPUs use it too."""
    text = importlib.resources.files("jax_ssd").joinpath("tuned/nvidia_h200.json").read_text()
    return json.loads(text)["triton_scan"]


def _pinned_segment() -> int | None:
    """JAX_SSD_TRITON_SEGMENT: the segment length of every Triton scan (0: none), so that bits agree across shapes."""
    text = os.environ.get("JAX_SSD_TRITON_SEGMENT")
    if text is None:
        return None
    if not text.isdecimal() or int(text) % _TRITON_CHUNKS[-1]:
        raise ValueError(f"JAX_SSD_TRITON_SEGMENT: expected a multiple of {_TRITON_CHUNKS[-1]} tokens, got {text!r}.")
    return int(text)


_PINNED_SEGMENT = _pinned_segment()


@dataclasses.dataclass(frozen=True)
class TritonScanTile:
    """How the Triton scan is cut up: a program has `rows` of headdim, all of dstate, `segment` tokens (0: all)."""

    chunk: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int
    segment: int
    state_warps: int
    state_stages: int
    touch: bool = False

    def __post_init__(self) -> None:
        reason = triton_scan_reason(self)
        if reason is not None:
            raise ValueError(reason)


def triton_scan_reason(tile: TritonScanTile) -> str | None:
    """Why a tile cannot be, or None: the only statement of the constraints."""
    for name in ("chunk", "rows", "columns"):
        value = getattr(tile, name)
        if value < 16 or value & (value - 1):
            return f"{name}: expected a power of two of at least 16, got {value}."
    if tile.segment % tile.chunk:
        return f"segment: expected a multiple of the chunk, {tile.chunk}, got {tile.segment}."
    return None


def triton_scan_shared_memory(tile: TritonScanTile, itemsize: int, gated: bool) -> int:
    """Bytes that the walk takes at most: its pipelined inputs and the state as an operand."""
    ahead = max(tile.num_stages - 1, 1)
    per_chunk = tile.chunk * itemsize
    shared = (ahead + (not tile.touch)) * 2 * per_chunk * tile.columns
    return (
        shared
        + ahead * (per_chunk * tile.rows * (1 + gated) + 6 * 4 * tile.chunk)
        + tile.columns * tile.rows * itemsize
    )


def triton_scan_tile(
    problem: ScanProblem,
    multiprocessors: int | None,
    shared_memory: int | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> TritonScanTile | None:
    """The tile for a problem, a function of shapes and of the GPU; None where none fits its shared memory."""
    sizes, tuned = problem.sizes, _Tuned(**tuned_triton_scan()["half"])
    itemsize = 4 if problem.dtype == "float32" else 2
    # Only Hopper's and Blackwell's tensor cores take operands from shared memory; elsewhere larger tiles spill.
    roomy = (compute_capability or tuned.compute_capability)[0] in (9, 10)
    largest = tuned.chunk if itemsize == 2 and roomy else _SMALLER_CHUNK
    if problem.chunk_size is not None:
        largest = min(largest, max(problem.chunk_size, _TRITON_CHUNKS[0]))
    rows = min(64, max(16, next_power_of_two(sizes.headdim)))
    columns = max(16, next_power_of_two(sizes.dstate))
    segment = _segment(problem, sizes.num_heads * -(-sizes.headdim // rows), multiprocessors, tuned)
    depths = ((tuned.num_stages, tuned.touch and itemsize == 2), (2, False), (1, False))
    chunks = reversed([size for size in _TRITON_CHUNKS if size <= largest])
    for fewer, chunk, (stages, touch) in itertools.product((1, 2), list(chunks), depths):
        tile = TritonScanTile(
            chunk=chunk,
            rows=max(16, rows // fewer),
            columns=columns,
            num_warps=8 if columns > 128 or not roomy else 4,
            num_stages=stages,
            segment=segment,
            state_warps=tuned.state_warps,
            state_stages=tuned.state_stages if stages == tuned.num_stages else stages,
            touch=touch,
        )
        if triton_scan_shared_memory(tile, itemsize, problem.present.z) <= (shared_memory or _SHARED_MEMORY):
            return tile
    return None


def _segment(problem: ScanProblem, programs: int, multiprocessors: int | None, tuned: _Tuned) -> int:
    """Tokens of a segment where one program a sequence and head would leave multiprocessors idle, else 0."""
    if _PINNED_SEGMENT is not None:
        return _PINNED_SEGMENT
    length = problem.uniform_length or problem.num_tokens // max(problem.num_seqs, 1)
    room = (multiprocessors or tuned.multiprocessors) * tuned.programs_per_multiprocessor
    wanted = room // max(programs * problem.num_seqs, 1)
    if wanted < 2 or length < 2 * tuned.shortest_segment:
        return 0
    return max(tuned.shortest_segment, next_power_of_two(-(-length // wanted)))


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


# --- Triton decode: the state update and the replay of a ring ---

# Up to here every program has a place on the GPU at once, and smaller ones finish sooner.
_TRITON_UPDATE_ELEMENTS = 4096  # of the state in a tile
_TRITON_UPDATE_FEW_ROWS = 1 << 14  # rows of the state in a call: smaller tiles keep more multiprocessors busy
_TRITON_UPDATE_FEWEST_PROGRAMS = 512


@dataclasses.dataclass(frozen=True)
class TritonUpdateTile:
    """How a Triton decode kernel cuts the state (headdim, dstate) of one slot and head.

    Args:
      rows: rows of headdim in a tile.
      tiles: most tiles of a program, neighbours in one group; the next is loaded while one is worked on.
      columns: columns of a block; a tile is several blocks side by side, a program spans dstate.
      num_warps: warps of a program.
    """

    rows: int
    tiles: int
    columns: int
    num_warps: int

    def __post_init__(self) -> None:
        reason = triton_update_reason(self)
        if reason is not None:
            raise ValueError(reason)


def triton_update_reason(tile: TritonUpdateTile) -> str | None:
    """Why a tile cannot be, or None: the only statement of the constraints."""
    for name in ("rows", "tiles", "columns", "num_warps"):
        value = getattr(tile, name)
        if value < 1 or value & (value - 1):
            return f"{name}: expected a power of two, got {value}."
    if tile.columns < 8:
        return f"columns: expected at least 8, got {tile.columns}."
    if tile.rows * tile.columns < 32 * 4 * tile.num_warps:
        return f"rows: expected 4 elements of a block for every thread of {tile.num_warps} warps, got {tile.rows}."
    return None


def triton_update_tile(problem: UpdateProblem) -> TritonUpdateTile:
    """The tile for a problem, a function of shapes alone."""
    sizes = problem.sizes
    vector = 4 if problem.cache.dtype == "float32" else 8  # elements of a 16-byte load
    line = 8 * vector
    columns = min(line, sizes.dstate & -sizes.dstate)
    if columns < 32:  # few columns divide dstate: mask the last block instead
        columns = line if sizes.dstate > 32 else 32
    rows = max(16, min(64, _TRITON_UPDATE_ELEMENTS // next_power_of_two(sizes.dstate)))
    few = problem.batch * sizes.num_heads * sizes.headdim <= _TRITON_UPDATE_FEW_ROWS
    if sizes.headdim % rows or few or (problem.ring_size is not None and vector == 8):
        rows = 16
    programs = problem.batch * sizes.num_heads * -(-sizes.headdim // rows)
    tiles = 4 if programs >= 4 * _TRITON_UPDATE_FEWEST_PROGRAMS else 1
    num_warps = min(4, rows * columns // (32 * vector))
    return TritonUpdateTile(rows=rows, tiles=tiles, columns=columns, num_warps=num_warps)


def jax_triton() -> ModuleType:
    """The jax_triton package. Importing it, or failing to, empties TRITON_CACHE_DIR, which breaks Triton: undone."""
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        return importlib.import_module("jax_triton")
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if kept:
            os.environ["TRITON_CACHE_DIR"] = kept
