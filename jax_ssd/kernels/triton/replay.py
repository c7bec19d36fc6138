"""The decode step of ReplaySSM: a stored state and a ring of recent inputs give y; only a fold stores the state."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jax_ssd.kernels.triton.discretize import gate, step_size
from jax_ssd.kernels.triton.rounding import key_of
from jax_ssd.kernels.triton.update import (
    group_vectors,
    load_blocks,
    load_vector,
    partial_sums,
    store_tile,
    store_vector,
    write_zeros,
)

# Arrays that are read one number at a time.
ANY_ADDRESS = ("A_ptr", "slots_ptr", "seeds_ptr", "layer_ptr", "head_offset_ptr")
# A slot's length fits in 16 bits. The bits above count the programs that have read the slot's ring in this launch.
_ARRIVED = tl.constexpr(1 << 16)


@triton.jit
def inner(B, C, BLOCKS: tl.constexpr):
    """B_j . C of tokens j: B a tuple of blocks (tokens, columns), C of vectors (columns,)."""
    products = B[0] * C[0][None, :]
    for block in tl.static_range(1, BLOCKS):
        products += B[block] * C[block][None, :]
    return tl.sum(products, axis=1)


@triton.jit
def token_rows(pointer, places, columns, used, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Rows (tokens, columns) of arrays whose tokens are STRIDE apart, in float32; zeros where unused or past SIZE."""
    mask = used[:, None] & (columns < SIZE)[None, :]
    pointers = pointer + (places.to(tl.int64) * STRIDE)[:, None] + columns[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def token_blocks(
    pointer, places, used, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, DSTATE: tl.constexpr, STRIDE: tl.constexpr
):
    """`token_rows` of all of dstate, as a tuple of blocks."""
    blocks = ()
    for block in tl.static_range(BLOCKS):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        blocks += (token_rows(pointer, places, columns, used, DSTATE, STRIDE),)
    return blocks


@triton.jit
def fold(
    raw, ring_x, ring_dt, exponents, ring_B_ptr, new_state_ptr, places, folded, rows, slot, head, model_head, k0, k1,
    HEADS: tl.constexpr, TOTAL_HEADS: tl.constexpr, HEADDIM: tl.constexpr, GROUPS: tl.constexpr, DSTATE: tl.constexpr,
    COLUMNS: tl.constexpr, ROUNDS: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store a tile of the state with the ring's oldest tokens in it; `raw` is a tuple of blocks side by side."""
    order = tl.arange(0, ring_dt.shape[0])
    inside = tl.where(order < folded, exponents, 0.0)
    left = tl.cumsum(inside, axis=0, reverse=True) - inside
    weight = tl.where(order < folded, ring_dt * tl.exp(left), 0.0)
    decay = tl.exp(tl.sum(inside, axis=0))
    taken = tl.trans(ring_x * weight[:, None])
    target = new_state_ptr + (slot.to(tl.int64) * HEADS + head) * (HEADDIM * DSTATE)
    for block in tl.static_range(len(raw)):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        B = token_rows(ring_B_ptr, places, columns, order < folded, DSTATE, GROUPS * DSTATE)
        state = raw[block].to(tl.float32) * decay + tl.dot(taken, B, input_precision="tf32x3")
        store_tile(
            target, state, rows, block * COLUMNS, slot, model_head, 0, k0, k1, TOTAL_HEADS, HEADDIM, DSTATE, ROUNDS,
            NATIVE, MASKED,
        )  # fmt: skip


@triton.jit
def append(
    dt_ptr, B_ptr, dt_bias_ptr, ring_dt_ptr, ring_B_ptr, start_ptr, length_ptr, last_ptr, row, slot, start, length,
    folded, HEADS: tl.constexpr, GROUPS: tl.constexpr, DSTATE: tl.constexpr, TOKENS: tl.constexpr, RING: tl.constexpr,
    BIASED: tl.constexpr, SOFTPLUS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, KEYS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what the slot's programs share: the new tokens' dt and B, and the cursors. For the last to arrive."""
    heads = tl.arange(0, HEADS_BLOCK)
    keys = tl.arange(0, KEYS_BLOCK)
    bias = None
    if BIASED:
        bias = load_vector(dt_bias_ptr, heads, HEADS, True)
    for token in tl.static_range(TOKENS):
        place = slot.to(tl.int64) * RING + (start + length + token) % RING
        at = row * TOKENS + token
        dt = step_size(load_vector(dt_ptr + at * HEADS, heads, HEADS, True), bias, SOFTPLUS, LOW, HIGH)
        tl.store(ring_dt_ptr + place * HEADS + heads, dt, mask=heads < HEADS)
        kept = keys < GROUPS * DSTATE
        B = tl.load(B_ptr + at * (GROUPS * DSTATE) + keys, mask=kept)
        tl.store(ring_B_ptr + place * (GROUPS * DSTATE) + keys, B, mask=kept)
    tl.store(start_ptr + slot, (start + folded) % RING)
    tl.store(length_ptr + slot, length - folded + TOKENS)
    tl.store(last_ptr + slot, TOKENS)


@triton.jit(do_not_specialize_on_alignment=ANY_ADDRESS)
def replay_update(
    state_ptr, ring_x_ptr, ring_dt_ptr, ring_B_ptr, start_ptr, length_ptr, last_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, A_ptr,
    D_ptr, z_ptr, dt_bias_ptr, slots_ptr, seeds_ptr, layer_ptr, head_offset_ptr,
    y_ptr, new_state_ptr, new_ring_x_ptr, new_ring_dt_ptr, new_ring_B_ptr, new_start_ptr, new_length_ptr, new_last_ptr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, HEADDIM: tl.constexpr, GROUPS: tl.constexpr, DSTATE: tl.constexpr,
    TOKENS: tl.constexpr, RING: tl.constexpr, LAYERS: tl.constexpr, TOTAL_HEADS: tl.constexpr, ROUNDS: tl.constexpr,
    SKIP: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, SHIFTED: tl.constexpr, SOFTPLUS: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, VECTOR: tl.constexpr, RING_BLOCK: tl.constexpr, TOKENS_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, KEYS_BLOCK: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: TILES tiles (ROWS, dstate), neighbours in one row of the batch and one group, as in `update`.

    Outputs share the memory of the inputs of the same name. A program overwrites in the ring only x of its own tiles,
    after reading it; what other programs read too is left to the last of the slot's programs to arrive.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    SPLITS: tl.constexpr = (HEADDIM + ROWS - 1) // ROWS
    PARTS: tl.constexpr = HEADS * SPLITS // TILES
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    first = (program % PARTS) * TILES
    slot = tl.load(slots_ptr + row)
    group = first // (HEADS // GROUPS * SPLITS)
    tokens = tl.arange(0, TOKENS_BLOCK)
    at = row * TOKENS + tokens
    called = tokens < TOKENS
    new_B = token_blocks(B_ptr + group * DSTATE, at, called, COLUMNS, BLOCKS, DSTATE, GROUPS * DSTATE)
    if (slot < 0) | (slot >= SLOTS):
        write_zeros(y_ptr, row, first, HEADS, HEADDIM, TOKENS, ROWS, TILES, MASKED, NATIVE)
        return

    source = state_ptr + slot.to(tl.int64) * (HEADS * HEADDIM * DSTATE)
    coming = load_blocks(source, first, True, ROWS, COLUMNS, BLOCKS, HEADDIM, DSTATE, MASKED)
    start = tl.load(start_ptr + slot)
    length = tl.load(length_ptr + slot) % _ARRIVED
    folded = tl.where(length + TOKENS > RING, length - tl.load(last_ptr + slot), 0)
    # the ring in order, oldest first
    order = tl.arange(0, RING_BLOCK)
    used = order < length
    places = slot.to(tl.int64) * RING + (start + order) % RING
    ring_B = token_blocks(ring_B_ptr + group * DSTATE, places, used, COLUMNS, BLOCKS, DSTATE, GROUPS * DSTATE)
    ring_scores, new_scores = (), ()
    for token in tl.static_range(TOKENS):
        asked = ((row * TOKENS + token) * GROUPS + group) * DSTATE
        _, C = group_vectors(B_ptr, C_ptr, asked, COLUMNS, BLOCKS, DSTATE, MASKED)
        ring_scores += (inner(ring_B, C, BLOCKS),)
        new_scores += (inner(new_B, C, BLOCKS),)
    k0, k1 = program.to(tl.uint32), program.to(tl.uint32)
    shift = 0
    if ROUNDS:
        k0, k1 = key_of(seeds_ptr, layer_ptr, LAYERS)
        if SHIFTED:
            shift = tl.load(head_offset_ptr)

    for tile in range(TILES):
        raw = coming
        head = (first + tile) // SPLITS
        rows = ((first + tile) % SPLITS) * ROWS + tl.arange(0, ROWS)
        A = tl.load(A_ptr + head)
        bias = tl.load(dt_bias_ptr + head) if BIASED else None
        ring_dt = tl.load(ring_dt_ptr + places * HEADS + head, mask=used, other=0.0)
        ring_x = token_rows(ring_x_ptr + head * HEADDIM, places, rows, used, HEADDIM, HEADS * HEADDIM)
        new_dt = tl.load(dt_ptr + at * HEADS + head, mask=called, other=0.0).to(tl.float32)
        new_x = token_rows(x_ptr + head * HEADDIM, at, rows, called, HEADDIM, HEADS * HEADDIM)
        if TILES > 1:
            more = tile + 1 < TILES
            coming = load_blocks(source, first + tile + 1, more, ROWS, COLUMNS, BLOCKS, HEADDIM, DSTATE, MASKED)

        # replay: y of each new token from the stored state, the ring and the new tokens up to it
        new_dt = tl.where(called, step_size(new_dt, bias, SOFTPLUS, LOW, HIGH), 0.0)
        exponents = ring_dt * A
        since = tl.cumsum(exponents, axis=0, reverse=True) - exponents
        ring_total = tl.sum(exponents, axis=0)
        sums = tl.cumsum(new_dt * A, axis=0)
        for token in tl.static_range(TOKENS):
            at_token = row * TOKENS + token
            place = (at_token * HEADS + head) * HEADDIM
            elapsed = tl.sum(tl.where(tokens <= token, new_dt * A, 0.0), axis=0)
            if TOKENS > 1:
                _, C = group_vectors(
                    B_ptr, C_ptr, (at_token * GROUPS + group) * DSTATE, COLUMNS, BLOCKS, DSTATE, MASKED
                )
            partial = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32)
            for block in tl.static_range(BLOCKS):
                partial += partial_sums(raw[block].to(tl.float32) * C[block][None, :], VECTOR)
            y = tl.sum(partial, axis=1) * tl.exp(ring_total + elapsed)
            history = ring_scores[token] * ring_dt * tl.exp(since + elapsed)
            y += tl.sum(history[:, None] * ring_x, axis=0)
            reached = tl.where(tokens <= token, new_dt * tl.exp(tl.minimum(elapsed - sums, 0.0)), 0.0)
            y += tl.sum((new_scores[token] * reached)[:, None] * new_x, axis=0)
            x = load_vector(x_ptr + place, rows, HEADDIM, MASKED)
            if SKIP == "head":
                y += tl.load(D_ptr + head) * x
            elif SKIP == "channel":
                y += load_vector(D_ptr + head * HEADDIM, rows, HEADDIM, MASKED) * x
            if GATED:
                y = gate(y, load_vector(z_ptr + place, rows, HEADDIM, MASKED))
            store_vector(y_ptr + place, rows, y, HEADDIM, MASKED, NATIVE)

        # fold: the oldest tokens go into the state
        if folded > 0:
            fold(
                raw, ring_x, ring_dt, exponents, ring_B_ptr + group * DSTATE, new_state_ptr, places, folded, rows,
                slot, head, head + shift, k0, k1, HEADS, TOTAL_HEADS, HEADDIM, GROUPS, DSTATE, COLUMNS, ROUNDS, NATIVE,
                MASKED,
            )  # fmt: skip

        # append: own rows of x at once, the rest when every program of the slot has read its ring
        tl.debug_barrier()
        for token in tl.static_range(TOKENS):
            position = slot.to(tl.int64) * RING + (start + length + token) % RING
            x = load_vector(x_ptr + ((row * TOKENS + token) * HEADS + head) * HEADDIM, rows, HEADDIM, MASKED)
            store_vector(new_ring_x_ptr + (position * HEADS + head) * HEADDIM, rows, x, HEADDIM, MASKED, NATIVE)
    arrived = tl.atomic_add(new_length_ptr + slot, _ARRIVED) // _ARRIVED
    if arrived == PARTS - 1:
        append(
            dt_ptr, B_ptr, dt_bias_ptr, new_ring_dt_ptr, new_ring_B_ptr, new_start_ptr, new_length_ptr, new_last_ptr,
            row, slot, start, length, folded, HEADS, GROUPS, DSTATE, TOKENS, RING, BIASED, SOFTPLUS, LOW, HIGH,
            HEADS_BLOCK, KEYS_BLOCK,
        )  # fmt: skip
