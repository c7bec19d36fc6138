"""The chunked scan in plain JAX: blocks of chunks in a `lax.scan`, with a hand-written gradient.

The gradient walks the blocks backwards from the states that entered them and recomputes the rest, so memory grows with
the tokens and not with chunks times states. Every token's row is written once, which keeps results repeatable.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssd import settings, slots, varying
from jax_ssd.implementations import xla_chunk
from jax_ssd.implementations.chunk_table import (
    CheckpointTable,
    ChunkTable,
    checkpoint_table,
    chunk_table,
    num_chunks,
    sequence_bounds,
)
from jax_ssd.implementations.xla_chunk import BlockTable
from jax_ssd.problem import (
    Array,
    Parameters,
    PrefillArrays,
    PrefillResult,
    ScanArrays,
    ScanProblem,
    ScanResult,
    StepSize,
    Tokens,
)


class Config(NamedTuple):
    """What is static in a scan."""

    step: StepSize
    chunk_size: int


class Differentiable(NamedTuple):
    """Floating-point inputs of a scan."""

    tokens: Tokens
    parameters: Parameters
    initial_states: Array  # (s,h,p,n)


class Tables(NamedTuple):
    """Integer inputs of a scan."""

    chunks: ChunkTable  # each (blocks,c)
    document: Array | None  # (t,)
    checkpoints: CheckpointTable | None
    holders: Array  # (blocks,c): checkpoint that holds the state entering the chunk, else -1


class Scanned(NamedTuple):
    """Outputs of a scan, states in the accumulator's dtype. Without checkpoints their array has no rows."""

    y: Array  # (t,h,p)
    final_states: Array  # (s,h,p,n)
    checkpoint_states: Array  # (k,h,p,n)


class Saved(NamedTuple):
    """What the gradient needs besides the inputs."""

    block_states: Array  # (blocks,h,p,n): entering each block
    holders: Array  # (k,h,p,n): entering the chunks that hold checkpoints


def chunk_scan(problem: ScanProblem, arrays: ScanArrays) -> ScanResult:
    """Serve `chunk_scan`."""
    scanned, _ = _scan_sequences(problem, arrays, None)
    dtype = jnp.dtype(problem.state_dtype)
    checkpoints = None if problem.num_checkpoints is None else scanned.checkpoint_states.astype(dtype)
    return ScanResult(scanned.y, scanned.final_states.astype(dtype), checkpoints)


def prefill(problem: ScanProblem, arrays: PrefillArrays) -> PrefillResult:
    """Serve `prefill`: gather the slots' states, scan, scatter the final states and the checkpoints."""
    cache = arrays.cache
    dtype = arrays.scan.parameters.A.dtype
    active = (arrays.slots >= 0) & (arrays.slots < cache.shape[0])
    initial = None
    if arrays.has_initial_state is not None:
        read = jnp.where(active & arrays.has_initial_state, arrays.slots, -1)
        initial = slots.gather(cache, read).astype(dtype)
    scanned, owned = _scan_sequences(problem, arrays.scan._replace(initial_states=initial), active)
    cache = slots.store(cache, arrays.slots, scanned.final_states, arrays.rounding)
    if arrays.checkpoint_slots is not None:
        where = jnp.where(owned, arrays.checkpoint_slots, -1)
        cache = slots.store(cache, where, scanned.checkpoint_states, arrays.rounding)
    return PrefillResult(scanned.y, cache)


def _scan_sequences(problem: ScanProblem, arrays: ScanArrays, active: Array | None) -> tuple[Scanned, Array]:
    """Scan the active sequences; also which checkpoints (k,) belong to one of them."""
    chunk_size = settings.xla_chunk_size(problem)
    chunks = num_chunks(problem, chunk_size)
    block_chunks = settings.xla_block_chunks(chunk_size, chunks)
    blocks = -(-chunks // block_chunks)
    sizes, dtype = problem.sizes, arrays.parameters.A.dtype
    initial = arrays.initial_states
    if initial is None:
        initial = jnp.zeros((problem.num_seqs, sizes.num_heads, sizes.headdim, sizes.dstate), dtype)
    if blocks == 0:
        none = jnp.zeros((problem.num_checkpoints or 0, *initial.shape[1:]), dtype)
        return Scanned(jnp.zeros_like(arrays.tokens.x), initial, none), jnp.zeros(none.shape[:1], jnp.bool_)
    bounds, lengths = sequence_bounds(problem, arrays, active)
    rows = blocks * block_chunks
    table = chunk_table(problem, bounds, lengths, chunk_size, rows)
    checkpoints, holders = None, jnp.full((rows,), -1, jnp.int32)
    if arrays.checkpoint_positions is not None and problem.num_checkpoints:
        checkpoints, holders = checkpoint_table(arrays.checkpoint_positions, bounds, lengths, chunk_size, rows)
    tables = Tables(
        chunks=ChunkTable(*(column.reshape(blocks, block_chunks) for column in table)),
        document=None if arrays.seq_idx is None else _documents(arrays.seq_idx, problem),
        checkpoints=checkpoints,
        holders=holders.reshape(blocks, block_chunks),
    )
    config = Config(problem.step_size, chunk_size)
    inputs = Differentiable(arrays.tokens, arrays.parameters, initial)
    scanned: Any = _scan(config, *varying.together((inputs, tables)))
    owned = jnp.zeros((problem.num_checkpoints or 0,), jnp.bool_) if checkpoints is None else checkpoints.owned
    return Scanned(*scanned), owned


def _documents(seq_idx: Array, problem: ScanProblem) -> Array:
    """Documents (t,) numbered from 0 in each batch row: a new one begins wherever seq_idx changes."""
    rows = seq_idx.reshape(problem.num_seqs, -1)
    changes = jnp.pad(rows[:, 1:] != rows[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(changes, axis=1, dtype=jnp.int32).reshape(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(config: Config, inputs: Differentiable, tables: Tables) -> Scanned:
    return _forward(config, inputs, tables)[0]


def _forward(config: Config, inputs: Differentiable, tables: Tables) -> tuple[Scanned, Saved]:
    """Walk the blocks; y, final states and the states before checkpoints are written in place."""
    initial = inputs.initial_states
    num_checkpoints = 0 if tables.checkpoints is None else tables.checkpoints.row.shape[0]

    def one_block(carried: tuple[Array, ...], block: tuple[ChunkTable, Array]) -> tuple[tuple[Array, ...], Array]:
        state, y, final_states, holders = carried
        table, held = block
        result = _apply(config, inputs.parameters, state, *_block_inputs(config, inputs, tables, table))
        y = slots.scatter(y, _token_rows(config, table), result.y)
        final_states = slots.scatter(final_states, jnp.where(table.last, table.seq, -1), result.leaving)
        holders = slots.scatter(holders, held, result.entering)
        return (result.state, y, final_states, holders), state

    state = jnp.zeros(initial.shape[1:], initial.dtype)
    holders = jnp.zeros((num_checkpoints, *state.shape), state.dtype)
    carried = varying.together((state, jnp.zeros_like(inputs.tokens.x), initial, holders))
    (_, y, final_states, holders), block_states = lax.scan(one_block, carried, (tables.chunks, tables.holders))
    checkpoint_states = holders
    if tables.checkpoints is not None:
        one_checkpoint = functools.partial(_checkpoint, config, inputs, holders)
        checkpoint_states = lax.map(one_checkpoint, tables.checkpoints)
    return Scanned(y, final_states, checkpoint_states), Saved(block_states, holders)


def _forward_saving(
    config: Config, inputs: Differentiable, tables: Tables
) -> tuple[Scanned, tuple[Differentiable, Tables, Saved]]:
    scanned, saved = _forward(config, inputs, tables)
    return scanned, (inputs, tables, saved)


class _Gradients(NamedTuple):
    """Sums of gradients while the blocks are walked backwards."""

    state: Array  # of the state that leaves the block
    tokens: Tokens
    parameters: Parameters
    initial_states: Array
    holders: Array


def _backward(
    config: Config, residuals: tuple[Differentiable, Tables, Saved], cotangents: Scanned
) -> tuple[Differentiable, None]:
    """Checkpoints first, one by one, then the blocks from last to first."""
    inputs, tables, saved = residuals
    dtype = inputs.initial_states.dtype
    exact = dtype if tables.checkpoints is not None else None  # rows then receive more than one term
    empty = _sequences_without_chunks(tables, inputs.initial_states.shape[0])
    sums = _Gradients(
        state=jnp.zeros(inputs.initial_states.shape[1:], dtype),
        tokens=jax.tree.map(lambda value: jnp.zeros(value.shape, exact or value.dtype), inputs.tokens),
        parameters=jax.tree.map(jnp.zeros_like, inputs.parameters),
        initial_states=jnp.where(empty[:, None, None, None], cotangents.final_states, 0),
        holders=jnp.zeros_like(saved.holders),
    )
    sums, _ = varying.together((sums, inputs))
    if tables.checkpoints is not None:
        walk = functools.partial(_checkpoint_backward, config, inputs, saved.holders)
        sums, _ = lax.scan(walk, sums, (tables.checkpoints, cotangents.checkpoint_states))
    walk = functools.partial(_block_backward, config, inputs, tables, cotangents)
    blocks = (tables.chunks, tables.holders, saved.block_states)
    sums, _ = lax.scan(walk, sums, blocks, reverse=True)
    tokens = jax.tree.map(lambda grad, value: grad.astype(value.dtype), sums.tokens, inputs.tokens)
    return Differentiable(tokens, sums.parameters, sums.initial_states), None


_scan.defvjp(_forward_saving, _backward)


def _block_backward(
    config: Config,
    inputs: Differentiable,
    tables: Tables,
    cotangents: Scanned,
    sums: _Gradients,
    block: tuple[ChunkTable, Array, Array],
) -> tuple[_Gradients, None]:
    """Recompute one block from the state that entered it and pull its cotangents back."""
    table, held, state = block
    fresh, tokens, block_table = _block_inputs(config, inputs, tables, table)
    rows = _token_rows(config, table)

    def differentiable(parameters: Parameters, state: Array, fresh: Array, tokens: Tokens) -> xla_chunk.BlockResult:
        return _apply(config, parameters, state, fresh, tokens, block_table)

    result, pull_back = jax.vjp(differentiable, inputs.parameters, state, fresh, tokens)
    cotangent = xla_chunk.BlockResult(
        y=slots.gather(cotangents.y, rows).astype(result.y.dtype),
        state=sums.state,
        entering=slots.gather(sums.holders, held),
        leaving=slots.gather(cotangents.final_states, jnp.where(table.last, table.seq, -1)),
    )
    parameters, state, fresh, tokens = pull_back(varying.together(cotangent))
    begun = jnp.where(table.first, table.seq, -1)
    return sums._replace(
        state=state,
        tokens=_add_rows(sums.tokens, rows, tokens),
        parameters=jax.tree.map(jnp.add, sums.parameters, parameters),
        initial_states=slots.accumulate(sums.initial_states, begun, fresh),
    ), None


def _checkpoint_backward(
    config: Config,
    inputs: Differentiable,
    holders: Array,
    sums: _Gradients,
    checkpoint: tuple[CheckpointTable, Array],
) -> tuple[_Gradients, None]:
    """Pull one checkpoint's cotangent back to its chunk's tokens and to the state that entered the chunk."""
    where, cotangent = checkpoint
    tokens, valid, rows = _checkpoint_inputs(config, inputs, where)

    def differentiable(parameters: Parameters, entering: Array, tokens: Tokens) -> Array:
        return xla_chunk.partial_state(parameters, entering, tokens, valid, config.step)

    _, pull_back = jax.vjp(differentiable, inputs.parameters, holders[where.holder], tokens)
    parameters, entering, tokens = pull_back(jnp.where(where.owned, cotangent, 0))
    held = jnp.where(where.owned, where.holder, -1)
    return sums._replace(
        tokens=_add_rows(sums.tokens, rows, tokens),
        parameters=jax.tree.map(jnp.add, sums.parameters, parameters),
        holders=slots.accumulate(sums.holders, held, entering),
    ), None


def _checkpoint(config: Config, inputs: Differentiable, holders: Array, where: CheckpointTable) -> Array:
    """The state (h,p,n) just after one position; zeros where nobody owns it."""
    tokens, valid, _ = _checkpoint_inputs(config, inputs, where)
    state = xla_chunk.partial_state(inputs.parameters, holders[where.holder], tokens, valid, config.step)
    return jnp.where(where.owned, state, 0)


def _checkpoint_inputs(config: Config, inputs: Differentiable, where: CheckpointTable) -> tuple[Tokens, Array, Array]:
    """Tokens of a checkpoint's chunk, which of them count, and their rows, -1 for those that do not."""
    row = jnp.arange(config.chunk_size, dtype=jnp.int32)
    valid = (row <= where.row) & where.owned
    rows = jnp.where(valid, where.start + row, -1)
    return _take_rows(inputs.tokens, rows), valid, rows


def _apply(
    config: Config, parameters: Parameters, state: Array, fresh: Array, tokens: Tokens, table: BlockTable
) -> xla_chunk.BlockResult:
    return xla_chunk.block(parameters, state, fresh, tokens, table, config.step)


def _block_inputs(
    config: Config, inputs: Differentiable, tables: Tables, table: ChunkTable
) -> tuple[Array, Tokens, BlockTable]:
    """What a block reads: initial states of the sequences that it begins, its tokens, and what is known of its rows."""
    rows = _token_rows(config, table)
    fresh = slots.gather(inputs.initial_states, jnp.where(table.first, table.seq, -1))
    document = entering = None
    if tables.document is not None:
        last = table.start + jnp.maximum(table.length, 1) - 1
        within = jnp.minimum(_every_row(config, table), last[:, None])
        document = slots.gather(tables.document, within)
        entering = jnp.where(table.first, 0, slots.gather(tables.document, table.start - 1))
    return fresh, _take_rows(inputs.tokens, rows), BlockTable(rows >= 0, table.first, document, entering)


def _every_row(config: Config, table: ChunkTable) -> Array:
    return table.start[:, None] + jnp.arange(config.chunk_size, dtype=jnp.int32)


def _token_rows(config: Config, table: ChunkTable) -> Array:
    """Tokens (c,l) of a block's chunks, -1 past the end of a chunk."""
    row = jnp.arange(config.chunk_size, dtype=jnp.int32)
    return jnp.where(row < table.length[:, None], table.start[:, None] + row, -1)


def _take_rows(tokens: Tokens, rows: Array) -> Tokens:
    return jax.tree.map(lambda value: slots.gather(value, rows), tokens)


def _add_rows(sums: Tokens, rows: Array, tokens: Tokens) -> Tokens:
    return jax.tree.map(lambda total, rows_: slots.accumulate(total, rows, rows_), sums, tokens)


def _sequences_without_chunks(tables: Tables, num_seqs: int) -> Array:
    """(s,) bool."""
    begun = jnp.where(tables.chunks.first, tables.chunks.seq, -1).reshape(-1)
    return slots.scatter(jnp.ones((num_seqs,), jnp.bool_), begun, jnp.zeros(begun.shape, jnp.bool_))
