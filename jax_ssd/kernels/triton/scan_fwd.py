"""The scan: one program for each head, block of headdim and segment walks its chunks with the state in registers.

A segment is a sequence, or `SEGMENT` tokens of one where heads are few and sequences long; then `segment_states` runs
first and leaves the states from which the state entering any segment is made.
"""

import triton
import triton.language as tl

from jax_ssd.kernels.triton.scan_prepare import bound_of, locate, wide
from jax_ssd.kernels.triton.scan_state import load_state, next_checkpoint, read_rows, store_rounded, store_state
from jax_ssd.kernels.triton.scan_walk import (
    across,
    add_rows,
    carried,
    gated,
    last_of,
    leaving_weights,
    load_rows,
    touch,
    within,
)

# log2 of a factor that is 0 in float32.
NOTHING_LEFT: tl.constexpr = tl.constexpr(-150.0)


@triton.jit
def _program(HEADS: tl.constexpr, HEADDIM: tl.constexpr, ROWS: tl.constexpr):
    """(head, first row of headdim, place of the segment): programs that share B and C are neighbours."""
    BLOCKS: tl.constexpr = (HEADDIM + ROWS - 1) // ROWS
    which = tl.program_id(0) % (HEADS * BLOCKS)
    return which // BLOCKS, which % BLOCKS * ROWS, tl.program_id(0) // (HEADS * BLOCKS)


@triton.jit
def _zero_rows(y_rows, start, end, p, HEADS: tl.constexpr, HEADDIM: tl.constexpr, CHUNK: tl.constexpr, STEP):
    """y = 0 for blocks of rows from start to end, every STEP-th token block."""
    row = tl.arange(0, CHUNK)
    for first in range(start, end, STEP):
        offset = (first + row).to(tl.int64)[:, None] * (HEADS * HEADDIM) + p[None, :]
        zeros = tl.zeros((CHUNK, p.shape[0]), y_rows.dtype.element_ty)
        tl.store(y_rows + offset, zeros, mask=(first + row < end)[:, None] & (p < HEADDIM)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_slots"])
def segment_states(
    x_ptr, B_ptr, initial_ptr, cu_seqlens_ptr, slots_ptr, has_initial_ptr, sums_ptr, step_ptr, since_ptr,
    num_tokens, num_seqs, num_slots,
    local_ptr,  # out (segment places,h,p,n) float32
    decay_ptr,  # out (segment places,h): log2 of what a segment leaves of the state that enters it
    NUM_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
    X_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr,
    INITIAL: tl.constexpr, CACHE: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    CHUNK: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """local[place + 1] = the state after the segment at `place`, had zeros entered; local[first] = the initial state.

    The first segment of a sequence starts from the initial state, and nobody needs what a last segment leaves.
    """
    head, first_p, place = _program(NUM_HEADS, HEADDIM, ROWS)
    seq, begin, end, start = locate(cu_seqlens_ptr, place, num_tokens, num_seqs, SEGMENT, SEQS)
    stop = start + SEGMENT
    if stop >= end:
        return
    p, n = first_p + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    state = tl.zeros((COLUMNS, ROWS), tl.float32)
    if start == begin:
        if INITIAL:
            state = load_state(
                initial_ptr, slots_ptr, has_initial_ptr, seq, head, p, n, num_slots, NUM_HEADS, HEADDIM, DSTATE, CACHE
            )
        store_state(local_ptr, place, head, p, n, state, NUM_HEADS, HEADDIM, DSTATE)

    group = head // (NUM_HEADS // NUM_GROUPS)
    x_rows, B_rows = x_ptr + head * HEADDIM, B_ptr + group * DSTATE
    sums_row = sums_ptr + head.to(tl.int64) * num_tokens
    step_row = step_ptr + head.to(tl.int64) * num_tokens
    row = tl.arange(0, CHUNK)
    live = row < CHUNK
    whole = 0.0
    total = last_of(sums_row, start, stop, CHUNK)
    last_since = -1
    for first in range(start, stop, CHUNK):
        x = load_rows(x_rows, first, live, p, HEADDIM, X_STRIDE, CHUNK)
        B = load_rows(B_rows, first, live, n, DSTATE, B_STRIDE, CHUNK)
        sums = tl.load(sums_row + first + row)
        step = tl.load(step_row + first + row)
        next_total = last_of(sums_row, first + CHUNK, stop, CHUNK)
        if DOCUMENTS:
            last_since = last_of(since_ptr, first, stop, CHUNK)
            whole = tl.where(last_since < 0, whole, -float("inf"))
        weight = leaving_weights(sums, step, total, row, last_since, DOCUMENTS)
        state = add_rows(carried(state, total, last_since, DOCUMENTS), x, B, weight, PRECISION, UPCAST)
        whole += total
        total = next_total
    store_state(local_ptr, place + 1, head, p, n, state, NUM_HEADS, HEADDIM, DSTATE)
    if first_p == 0:
        tl.store(decay_ptr + place.to(tl.int64) * NUM_HEADS + head, whole)


@triton.jit
def _entering_state(
    local_ptr, decay_ptr, place, first_place, head, p, n,
    HEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
):  # fmt: skip
    """The state that enters a segment: what the segments before it leave, from the nearest back to the first.

    It stops where what is left of older segments is 0 in float32: few are read where the state decays fast.
    """
    state = read_rows(local_ptr, place, head, p, n, HEADS, HEADDIM, DSTATE)
    other = place - 1
    decays = decay_ptr + head
    exponent = tl.load(decays + wide(other) * HEADS, mask=other > first_place, other=NOTHING_LEFT)
    while exponent > NOTHING_LEFT:
        # What the next turn asks for is loaded with this turn's rows: one wait, not two.
        before = tl.load(decays + wide(other - 1) * HEADS, mask=other - 1 > first_place, other=NOTHING_LEFT)
        rows = read_rows(local_ptr, other, head, p, n, HEADS, HEADDIM, DSTATE)
        state += rows * tl.exp2(tl.minimum(exponent, 0.0))
        exponent += before
        other -= 1
    return tl.trans(state)


@triton.jit
def _walk(
    state, start, stop, x_rows, B_rows, C_rows, z_rows, y_rows, D, sums_row, step_row, since_ptr, p, n,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
    X_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, C_STRIDE: tl.constexpr, Z_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, TOUCH: tl.constexpr,
):  # fmt: skip
    """y of the tokens start..stop, and the state after them."""
    row = tl.arange(0, CHUNK)
    since, last_since = tl.full((CHUNK,), -1, tl.int32), -1
    total = last_of(sums_row, start, stop, CHUNK)
    for first in tl.range(start, stop, CHUNK, num_stages=STAGES):
        # Load.
        live = first + row < stop
        x = load_rows(x_rows, first, live, p, HEADDIM, X_STRIDE, CHUNK)
        B = load_rows(B_rows, first, live, n, DSTATE, B_STRIDE, CHUNK)
        C = load_rows(C_rows, first, live, n, DSTATE, C_STRIDE, CHUNK)
        sums = tl.load(sums_row + first + row, mask=live, other=0.0)
        step = tl.load(step_row + first + row, mask=live, other=0.0)
        # A scalar is not prefetched by the pipeline; asking a chunk ahead hides its latency.
        next_total = last_of(sums_row, first + CHUNK, stop, CHUNK)
        z = x
        if HAS_Z:
            z = load_rows(z_rows, first, live, p, HEADDIM, Z_STRIDE, CHUNK)
        if DOCUMENTS:
            since = tl.load(since_ptr + first + row, mask=live, other=-1)
            last_since = last_of(since_ptr, first, stop, CHUNK)
        if TOUCH:
            touch(B)
            touch(C)
        # Outputs.
        y = across(C, state, sums, since, DOCUMENTS, PRECISION, UPCAST)
        y = within(C, B, x, sums, step, row, since, y, DOCUMENTS, PRECISION, UPCAST)
        # State.
        weight = leaving_weights(sums, step, total, row, last_since, DOCUMENTS)
        state = add_rows(carried(state, total, last_since, DOCUMENTS), x, B, weight, PRECISION, UPCAST)
        total = next_total
        # Store.
        y = gated(y, x, D, z, HAS_D, HAS_Z).to(y_rows.dtype.element_ty)
        out = y_rows + wide(first) * Y_STRIDE + row[:, None] * Y_STRIDE + p[None, :]
        tl.store(out, y, mask=live[:, None] & (p < HEADDIM)[None, :])
    return state


@triton.jit
def _state_at(
    state, position, start, x_rows, B_rows, sums_row, step_row, since_ptr, p, n,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, X_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The state just after `position`, in the chunk at `start` that `state` enters."""
    row = tl.arange(0, CHUNK)
    live = start + row <= position
    x = load_rows(x_rows, start, live, p, HEADDIM, X_STRIDE, CHUNK)
    B = load_rows(B_rows, start, live, n, DSTATE, B_STRIDE, CHUNK)
    sums = tl.load(sums_row + start + row, mask=live, other=0.0)
    step = tl.load(step_row + start + row, mask=live, other=0.0)
    total = tl.load(sums_row + position)
    since = -1
    if DOCUMENTS:
        since = tl.load(since_ptr + position)
    weight = leaving_weights(sums, step, total, row, since, DOCUMENTS)
    return add_rows(carried(state, total, since, DOCUMENTS), x, B, weight, PRECISION, UPCAST)


@triton.jit
def _zero_what_nobody_owns(
    y_rows, checkpoints_ptr, positions_ptr, owned_end, num_tokens, num_checkpoints, place, num_places, head, p, n,
    HEADS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr, CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """This program's share of the tokens past the end, and of the checkpoints that belong to no sequence."""
    _zero_rows(y_rows, owned_end + place * CHUNK, num_tokens, p, HEADS, HEADDIM, CHUNK, num_places * CHUNK)
    if CHECKPOINTS == "array":
        for index in range(place, num_checkpoints, num_places):
            position = tl.load(positions_ptr + index)
            if (position < 0) | (position >= owned_end):
                zeros = tl.zeros((n.shape[0], p.shape[0]), tl.float32)
                store_state(checkpoints_ptr, index, head, p, n, zeros, HEADS, HEADDIM, DSTATE)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_slots", "num_checkpoints"])
def scan(
    x_ptr, B_ptr, C_ptr, z_ptr, D_ptr, initial_ptr, cu_seqlens_ptr,
    slots_ptr, has_initial_ptr, positions_ptr, checkpoint_slots_ptr, seeds_ptr, layer_ptr, head_offset_ptr,
    sums_ptr, step_ptr, since_ptr, local_ptr, decay_ptr,
    num_tokens, num_seqs, num_slots, num_checkpoints,
    y_ptr,  # out (t,h,p)
    final_ptr,  # out (s,h,p,n), or the cache (w,h,p,n)
    checkpoints_ptr,  # out (k,h,p,n) where checkpoints go to an array
    NUM_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr,
    X_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, C_STRIDE: tl.constexpr, Z_STRIDE: tl.constexpr,
    SKIP: tl.constexpr,  # D: "none", "head" or "channel"
    HAS_Z: tl.constexpr, INITIAL: tl.constexpr, CACHE: tl.constexpr, DOCUMENTS: tl.constexpr,
    CHECKPOINTS: tl.constexpr,  # "none", "array" or "cache"
    ROUNDS: tl.constexpr, TOTAL_HEADS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    CHUNK: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEQS: tl.constexpr,
    STAGES: tl.constexpr, TOUCH: tl.constexpr,
):  # fmt: skip
    """One program for each head, block of headdim and place of a segment."""
    # Set up.
    head, first_p, place = _program(NUM_HEADS, HEADDIM, ROWS)
    p, n = first_p + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    Y_STRIDE: tl.constexpr = NUM_HEADS * HEADDIM
    y_rows = y_ptr + head * HEADDIM
    num_places = tl.num_programs(0) // (NUM_HEADS * ((HEADDIM + ROWS - 1) // ROWS))
    owned_end = bound_of(cu_seqlens_ptr, num_seqs, num_tokens)
    _zero_what_nobody_owns(
        y_rows, checkpoints_ptr, positions_ptr, owned_end, num_tokens, num_checkpoints, place, num_places, head, p, n,
        NUM_HEADS, HEADDIM, DSTATE, CHUNK, CHECKPOINTS,
    )  # fmt: skip
    seq, begin, end, start = locate(cu_seqlens_ptr, place, num_tokens, num_seqs, SEGMENT, SEQS)
    stop = end
    if SEGMENT != 0:
        stop = tl.minimum(start + SEGMENT, end)
        if (start >= end) & (start > begin):
            return
    target = seq
    if CACHE:
        target = tl.load(slots_ptr + seq)
        if (target < 0) | (target >= num_slots):
            _zero_rows(y_rows, start, stop, p, NUM_HEADS, HEADDIM, CHUNK, CHUNK)
            return

    # The state that enters. `segment_states` copied what a cache held: another program may have written there by now.
    state = tl.zeros((COLUMNS, ROWS), tl.float32)
    if SEGMENT == 0:
        if INITIAL:
            state = load_state(
                initial_ptr, slots_ptr, has_initial_ptr, seq, head, p, n, num_slots, NUM_HEADS, HEADDIM, DSTATE, CACHE
            )
    else:
        before = (start - begin) // SEGMENT
        if end - begin > SEGMENT:
            state = _entering_state(local_ptr, decay_ptr, place, place - before, head, p, n, NUM_HEADS, HEADDIM, DSTATE)
        else:
            if INITIAL:
                state = load_state(
                    initial_ptr, slots_ptr, has_initial_ptr, seq, head, p, n, num_slots, NUM_HEADS, HEADDIM, DSTATE,
                    CACHE,
                )  # fmt: skip

    # Walk.
    group = head // (NUM_HEADS // NUM_GROUPS)
    x_rows, z_rows = x_ptr + head * HEADDIM, z_ptr + head * HEADDIM
    B_rows, C_rows = B_ptr + group * DSTATE, C_ptr + group * DSTATE
    sums_row, step_row = sums_ptr + head.to(tl.int64) * num_tokens, step_ptr + head.to(tl.int64) * num_tokens
    D = 0.0
    if SKIP == "head":
        D = tl.load(D_ptr + head).to(tl.float32)
    if SKIP == "channel":
        D = tl.load(D_ptr + head * HEADDIM + p, mask=p < HEADDIM, other=0.0).to(tl.float32)[None, :]
    if CHECKPOINTS == "none":
        state = _walk(
            state, start, stop, x_rows, B_rows, C_rows, z_rows, y_rows, D, sums_row, step_row, since_ptr, p, n,
            HEADDIM, DSTATE, X_STRIDE, B_STRIDE, C_STRIDE, Z_STRIDE, Y_STRIDE, SKIP != "none", HAS_Z, DOCUMENTS,
            PRECISION, UPCAST, CHUNK, STAGES, TOUCH,
        )  # fmt: skip
    else:
        here, key, more = start, tl.full((), -1, tl.int64), start < stop
        while more:
            key, position, index, more = next_checkpoint(positions_ptr, num_checkpoints, key, start, stop, SEQS)
            until = tl.where(more, start + (position - start) // CHUNK * CHUNK, stop)
            state = _walk(
                state, here, until, x_rows, B_rows, C_rows, z_rows, y_rows, D, sums_row, step_row, since_ptr, p, n,
                HEADDIM, DSTATE, X_STRIDE, B_STRIDE, C_STRIDE, Z_STRIDE, Y_STRIDE, SKIP != "none", HAS_Z, DOCUMENTS,
                PRECISION, UPCAST, CHUNK, STAGES, TOUCH,
            )  # fmt: skip
            here = until
            slot, kept = index, more
            if CHECKPOINTS == "cache":
                slot = tl.load(checkpoint_slots_ptr + index, mask=more, other=-1)
                kept = more & (slot >= 0) & (slot < num_slots)
            if kept:
                at = _state_at(
                    state, position, until, x_rows, B_rows, sums_row, step_row, since_ptr, p, n,
                    HEADDIM, DSTATE, X_STRIDE, B_STRIDE, DOCUMENTS, PRECISION, UPCAST, CHUNK,
                )  # fmt: skip
                store_rounded(
                    checkpoints_ptr if CHECKPOINTS == "array" else final_ptr,
                    slot, head, p, n, at, seeds_ptr, layer_ptr, head_offset_ptr,
                    NUM_HEADS, HEADDIM, DSTATE, ROUNDS, TOTAL_HEADS,
                )  # fmt: skip

    # The state that leaves.
    if stop == end:
        store_rounded(
            final_ptr, target, head, p, n, state, seeds_ptr, layer_ptr, head_offset_ptr,
            NUM_HEADS, HEADDIM, DSTATE, ROUNDS, TOTAL_HEADS,
        )  # fmt: skip
