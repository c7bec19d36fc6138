"""Tuned sizes: everything that chooses a configuration. Were an environment variable read, it would be read here."""

from __future__ import annotations

import dataclasses
import importlib
import os
from types import ModuleType

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
# An H200's, where a device does not say.
_MULTIPROCESSORS = 132
_SHARED_MEMORY = 232448


@dataclasses.dataclass(frozen=True)
class TritonScanTile:
    """How the Triton scan is cut up: `rows` of headdim and all of dstate (`columns`) a program, `segment` tokens or 0 for all."""

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
    return shared + ahead * (per_chunk * tile.rows * (1 + gated) + 6 * 4 * tile.chunk) + tile.columns * tile.rows * itemsize


def triton_scan_tile(
    problem: ScanProblem, multiprocessors: int | None, shared_memory: int | None = None
) -> TritonScanTile | None:
    """The tile for a problem, a function of shapes and the GPU's size; None where none fits its shared memory."""
    sizes = problem.sizes
    itemsize = 4 if problem.dtype == "float32" else 2
    largest = _TRITON_CHUNKS[-1] if itemsize == 2 else 32
    if problem.chunk_size is not None:
        largest = min(largest, max(problem.chunk_size, _TRITON_CHUNKS[0]))
    rows = min(64, max(16, next_power_of_two(sizes.headdim)))
    columns = max(16, next_power_of_two(sizes.dstate))
    programs = sizes.num_heads * -(-sizes.headdim // rows)
    segment = _segment(problem, programs, multiprocessors or _MULTIPROCESSORS)
    for chunk in reversed([size for size in _TRITON_CHUNKS if size <= largest]):
        for stages, touch in ((3, itemsize == 2), (2, False), (1, False)):
            tile = TritonScanTile(
                chunk=chunk,
                rows=rows,
                columns=columns,
                num_warps=8 if columns > 128 else 4,
                num_stages=stages,
                segment=segment,
                state_warps=4,
                state_stages=stages,
                touch=touch,
            )
            if triton_scan_shared_memory(tile, itemsize, problem.present.z) <= (shared_memory or _SHARED_MEMORY):
                return tile
    return None


def _segment(problem: ScanProblem, programs: int, multiprocessors: int) -> int:
    """Tokens of a segment where one program a sequence and head would leave multiprocessors idle, else 0."""
    length = problem.uniform_length or problem.num_tokens // max(problem.num_seqs, 1)
    wanted = multiprocessors * 2 // max(programs * problem.num_seqs, 1)
    if wanted < 2 or length < 1024:
        return 0
    return max(512, next_power_of_two(-(-length // wanted)))


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


# --- Triton decode: the state update and the replay of a ring ---

_TRITON_UPDATE_VALUES = 64  # state elements of a thread: its registers hold them while it walks the tokens


@dataclasses.dataclass(frozen=True)
class TritonUpdateTile:
    """How a Triton decode kernel cuts the state (headdim, dstate) of one slot and head.

    Args:
      rows: rows of headdim in a tile.
      tiles: tiles of a program; all are loaded before the first is worked on.
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
    if tile.rows * tile.columns < 32 * 8 * tile.num_warps:
        return f"rows: expected 8 elements of a block for each of {tile.num_warps} warps' threads, got {tile.rows} rows."
    return None


def triton_update_tile(problem: UpdateProblem) -> TritonUpdateTile:
    """The tile for a problem, a function of shapes alone."""
    sizes = problem.sizes
    columns = min(64, sizes.dstate & -sizes.dstate)
    if columns < 32:  # few columns divide dstate: mask the last block instead
        columns = 64 if sizes.dstate > 32 else 32
    if problem.ring_size is not None:
        return TritonUpdateTile(rows=min(64, next_power_of_two(sizes.headdim)), tiles=1, columns=columns, num_warps=4)
    rows = 16
    return TritonUpdateTile(rows=rows, tiles=2, columns=columns, num_warps=rows * columns // 256)


def jax_triton() -> ModuleType:
    """The jax_triton package. Importing it empties TRITON_CACHE_DIR, which breaks kernels that torch launches: undone."""
    kept = os.environ.get("TRITON_CACHE_DIR")
    module = importlib.import_module("jax_triton")
    if kept is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = kept
    return module
