"""Where chunks lie in the token axis: derived on the device from cu_seqlens, aligned to each sequence's own start."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ssd import slots
from jax_ssd.problem import Array, ScanArrays, ScanProblem


class ChunkTable(NamedTuple):
    """One row a chunk; unused rows at the end have length 0 and sequence `num_seqs`."""

    start: Array  # (c,) int32: first token
    length: Array  # (c,) int32: tokens, at most the chunk size
    seq: Array  # (c,) int32
    first: Array  # (c,) bool: begins its sequence
    last: Array  # (c,) bool: ends its sequence


class CheckpointTable(NamedTuple):
    """One row a checkpoint. Checkpoints in one chunk share the state that enters it: the lowest of them holds it."""

    owned: Array  # (k,) bool: the position belongs to a sequence
    row: Array  # (k,) int32: row of the position in its chunk
    start: Array  # (k,) int32: first token of the chunk
    holder: Array  # (k,) int32: index of the checkpoint that holds the entering state


def num_chunks(problem: ScanProblem, chunk_size: int) -> int:
    """Chunks that any division of the tokens into the sequences can need."""
    tokens, seqs = problem.num_tokens, problem.num_seqs
    if problem.uniform_length is not None:
        return seqs * -(-problem.uniform_length // chunk_size)
    return min(tokens, (tokens + seqs * (chunk_size - 1)) // chunk_size) if seqs else 0


def chunk_table(problem: ScanProblem, bounds: Array, lengths: Array, chunk_size: int, rows: int) -> ChunkTable:
    """The table, `rows` long, for sequences that start at bounds (s+1,) and have lengths (s,)."""
    counts = -(-lengths // chunk_size)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    chunk = jnp.arange(rows, dtype=jnp.int32)
    seq = jnp.searchsorted(ends, chunk, side="right").astype(jnp.int32)
    known = jnp.minimum(seq, problem.num_seqs - 1)
    index = chunk - (ends[known] - counts[known])
    used = seq < problem.num_seqs
    start = bounds[known] + index * chunk_size
    length = jnp.where(used, jnp.clip(lengths[known] - index * chunk_size, 0, chunk_size), 0)
    return ChunkTable(start, length, seq, used & (index == 0), used & (index == counts[known] - 1))


def sequence_bounds(problem: ScanProblem, arrays: ScanArrays, active: Array | None) -> tuple[Array, Array]:
    """Starts (s+1,) within the tokens, and lengths (s,) that are 0 for sequences that are not active."""
    if arrays.cu_seqlens is None:
        length = problem.uniform_length or 0
        bounds = jnp.asarray(np.arange(problem.num_seqs + 1) * length, jnp.int32)
    else:
        bounds = jnp.clip(arrays.cu_seqlens, 0, problem.num_tokens)
    lengths = jnp.maximum(bounds[1:] - bounds[:-1], 0)
    return bounds, lengths if active is None else jnp.where(active, lengths, 0)


def checkpoint_table(
    positions: Array, bounds: Array, lengths: Array, chunk_size: int, rows: int
) -> tuple[CheckpointTable, Array]:
    """Where each position lies; for each of `rows` chunks, the checkpoint that holds its entering state, else -1."""
    last = lengths.shape[0] - 1
    seq = jnp.clip(jnp.searchsorted(bounds, positions, side="right").astype(jnp.int32) - 1, 0, last)
    offset = positions - bounds[seq]
    owned = (positions >= 0) & (offset >= 0) & (offset < lengths[seq])
    counts = -(-lengths // chunk_size)
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    chunk = slots.rows_or_end(jnp.where(owned, before[seq] + offset // chunk_size, -1), rows)
    order = jnp.arange(positions.shape[0], dtype=jnp.int32)
    none = positions.shape[0]
    lowest = jnp.full((rows,), none, jnp.int32).at[chunk].min(order, mode="drop")
    row = offset % chunk_size
    table = CheckpointTable(owned, row, positions - row, slots.gather(lowest, chunk))
    return table, jnp.where(lowest == none, -1, lowest)
