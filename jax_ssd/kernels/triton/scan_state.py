"""Reading and writing states: arrays or slots of a cache, rounding, and checkpoints.

Memory holds (headdim, dstate); registers hold [n, p], which lets the walk multiply by B^T as it lies in shared memory.
"""

import triton
import triton.language as tl

from jax_ssd.kernels.triton.rounding import rounded
from jax_ssd.kernels.triton.scan_prepare import wide
from jax_ssd.kernels.triton.scan_rounding import tile_words


@triton.jit
def _offsets(index, head, p, n, HEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr):
    """[p, n] places in an array (w,h,p,n), and which of them exist."""
    base = (wide(index) * HEADS + head) * (HEADDIM * DSTATE)
    return base + p[:, None] * DSTATE + n[None, :], (p < HEADDIM)[:, None] & (n < DSTATE)[None, :]


@triton.jit
def read_rows(states_ptr, index, head, p, n, HEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr):
    """[p, n] as it lies in memory, in float32, zeros where p or n is past the end."""
    offset, exists = _offsets(index, head, p, n, HEADS, HEADDIM, DSTATE)
    return tl.load(states_ptr + offset, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def load_state(
    initial_ptr, slots_ptr, has_initial_ptr, seq, head, p, n, num_slots,
    HEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """[n, p] that a sequence starts from; a slot that is not asked for is not read."""
    if CACHE:
        slot = tl.load(slots_ptr + seq)
        wanted = (tl.load(has_initial_ptr + seq) != 0) & (slot >= 0) & (slot < num_slots)
        offset, exists = _offsets(slot, head, p, n, HEADS, HEADDIM, DSTATE)
        state = tl.trans(tl.load(initial_ptr + offset, mask=exists & wanted, other=0.0).to(tl.float32))
    else:
        state = tl.trans(read_rows(initial_ptr, seq, head, p, n, HEADS, HEADDIM, DSTATE))
    return state


@triton.jit
def store_state(states_ptr, index, head, p, n, state, HEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr):
    """Store [n, p] in the array's dtype, rounded to nearest."""
    offset, exists = _offsets(index, head, p, n, HEADS, HEADDIM, DSTATE)
    tl.store(states_ptr + offset, tl.trans(state).to(states_ptr.dtype.element_ty), mask=exists)


@triton.jit
def store_rounded(
    states_ptr, index, head, p, n, state, seeds_ptr, layer_ptr, head_offset_ptr,
    HEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
    ROUNDS: tl.constexpr, TOTAL_HEADS: tl.constexpr,
):  # fmt: skip
    """Store [n, p] in the cache's dtype: to nearest where ROUNDS is 0, else stochastically."""
    if ROUNDS == 0:
        store_state(states_ptr, index, head, p, n, state, HEADS, HEADDIM, DSTATE)
    else:
        offset, exists = _offsets(index, head, p, n, HEADS, HEADDIM, DSTATE)
        key_ptr = seeds_ptr + tl.load(layer_ptr) * 2
        place = wide(index) * TOTAL_HEADS + tl.load(head_offset_ptr) + head
        words = tile_words(place * (HEADDIM * DSTATE), p, n, tl.load(key_ptr), tl.load(key_ptr + 1), DSTATE, ROUNDS)
        tl.store(states_ptr + offset, rounded(tl.trans(state), words, states_ptr.dtype.element_ty), mask=exists)


@triton.jit
def next_checkpoint(positions_ptr, num_checkpoints, after, start, stop, BLOCK: tl.constexpr):
    """(key, position, index) of the next checkpoint in tokens start..stop whose key is above `after`.

    A key is position * 2^32 + index: checkpoints in order of position. Without one, the position is `stop`.
    """
    none = (stop.to(tl.int64) << 32) - 1
    best = tl.zeros((BLOCK,), tl.int64) + none
    for first in range(0, num_checkpoints, BLOCK):
        index = first + tl.arange(0, BLOCK)
        position = tl.load(positions_ptr + index, mask=index < num_checkpoints, other=-1)
        key = (position.to(tl.int64) << 32) + index
        wanted = (position >= start) & (position < stop) & (key > after)
        best = tl.minimum(best, tl.where(wanted, key, none))
    key = tl.min(best, axis=0)
    found = key < none
    return key, tl.where(found, (key >> 32).to(tl.int32), stop), (key & 0x7FFFFFFF).to(tl.int32), found
