"""The decode step: a state tile is read once, gives y and is stored as the call's tokens leave it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jax_ssd.kernels.triton.discretize import gate, step_size
from jax_ssd.kernels.triton.rounding import counters, key_of, narrowed, round_tile

# Arrays that are read one number at a time.
ANY_ADDRESS = (
    "dt_ptr",
    "A_ptr",
    "dt_bias_ptr",
    "read_slots_ptr",
    "write_slots_ptr",
    "seeds_ptr",
    "layer_ptr",
    "head_offset_ptr",
)


@triton.jit
def load_tile(pointer, rows, columns, there, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """A tile (rows, columns) of a matrix (HEIGHT, WIDTH), as stored; nothing is read unless `there`."""
    pointers = pointer + (rows[:, None] * WIDTH + columns[None, :])
    if MASKED:
        return tl.load(pointers, mask=there & (rows < HEIGHT)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers, mask=there)


@triton.jit
def write_tile(pointer, rows, columns, values, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """The inverse of `load_tile`."""
    pointers = pointer + (rows[:, None] * WIDTH + columns[None, :])
    if MASKED:
        tl.store(pointers, values, mask=(rows < HEIGHT)[:, None] & (columns < WIDTH)[None, :])
    else:
        tl.store(pointers, values)


@triton.jit
def load_vector(pointer, indices, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """A vector in float32; zeros past SIZE."""
    if MASKED:
        return tl.load(pointer + indices, mask=indices < SIZE, other=0.0).to(tl.float32)
    else:
        return tl.load(pointer + indices).to(tl.float32)


@triton.jit
def store_vector(pointer, indices, values, SIZE: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    """Store a vector in the pointer's dtype, but for what is past SIZE."""
    values = narrowed(values, pointer.dtype.element_ty, NATIVE)
    if MASKED:
        tl.store(pointer + indices, values, mask=indices < SIZE)
    else:
        tl.store(pointer + indices, values)


@triton.jit
def store_tile(
    pointer, tile, rows, START: tl.constexpr, slot, head, step, k0, k1, HEADS: tl.constexpr, HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr, ROUNDS: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store a float32 tile in the pool's dtype, rounded stochastically where ROUNDS is not 0; columns from START on.

    `pointer` is the place of the slot and head; `slot`, `head` and HEADS are the whole model's.
    """
    COLUMNS: tl.constexpr = tile.shape[1]
    dtype: tl.constexpr = pointer.dtype.element_ty
    columns = START + tl.arange(0, COLUMNS)
    if ROUNDS == 0:
        write_tile(pointer, rows, columns, narrowed(tile, dtype, NATIVE), HEADDIM, DSTATE, MASKED)
    else:
        quads = START + 4 * tl.arange(0, COLUMNS // 4)
        counter, high = counters(slot, head, rows[:, None], quads[None, :], HEADS, HEADDIM, DSTATE)
        values = round_tile(tile, counter, high, step, k0, k1, dtype, ROUNDS, NATIVE)
        if NATIVE:
            pairs = START // 2 + tl.arange(0, COLUMNS // 2)
            packed = pointer.to(tl.pointer_type(tl.uint32))
            write_tile(packed, rows, pairs, values, HEADDIM, DSTATE // 2, MASKED)
        else:
            write_tile(pointer, rows, columns, values, HEADDIM, DSTATE, MASKED)


@triton.jit
def store_states(
    pool_ptr, blocks, rows, slot, head, model_head, step, k0, k1, HEADS: tl.constexpr, TOTAL_HEADS: tl.constexpr,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, ROUNDS: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store a tile, a tuple of float32 blocks side by side, at a slot and head of the pool."""
    pointer = pool_ptr + (slot.to(tl.int64) * HEADS + head) * (HEADDIM * DSTATE)
    for block in tl.static_range(len(blocks)):
        store_tile(
            pointer, blocks[block], rows, block * blocks[block].shape[1], slot, model_head, step, k0, k1, TOTAL_HEADS,
            HEADDIM, DSTATE, ROUNDS, NATIVE, MASKED,
        )  # fmt: skip


@triton.jit
def partial_sums(products, VECTOR: tl.constexpr):
    """Sums (rows, columns / VECTOR) of VECTOR neighbours, which one thread holds: nothing crosses lanes yet."""
    ROWS: tl.constexpr = products.shape[0]
    COLUMNS: tl.constexpr = products.shape[1]
    return tl.sum(tl.reshape(products, (ROWS, COLUMNS // VECTOR, VECTOR)), axis=2)


@triton.jit
def group_vectors(
    B_ptr, C_ptr, offset, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, DSTATE: tl.constexpr, MASKED: tl.constexpr
):
    """B and C of one token and group, in float32, as tuples of BLOCKS vectors (columns,)."""
    B, C = (), ()
    for block in tl.static_range(BLOCKS):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        B += (load_vector(B_ptr + offset, columns, DSTATE, MASKED),)
        C += (load_vector(C_ptr + offset, columns, DSTATE, MASKED),)
    return B, C


@triton.jit
def load_blocks(
    pointer, index, there, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, HEADDIM: tl.constexpr,
    DSTATE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The tile of number `index` of a slot, as stored: a tuple of blocks side by side."""
    SPLITS: tl.constexpr = (HEADDIM + ROWS - 1) // ROWS
    rows = (index % SPLITS) * ROWS + tl.arange(0, ROWS)
    pointer += (index // SPLITS) * (HEADDIM * DSTATE)
    blocks = ()
    for block in tl.static_range(BLOCKS):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        blocks += (load_tile(pointer, rows, columns, there, HEADDIM, DSTATE, MASKED),)
    return blocks


@triton.jit
def write_zeros(
    y_ptr, row, first, HEADS: tl.constexpr, HEADDIM: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """y of a program's tiles in a padding row."""
    SPLITS: tl.constexpr = (HEADDIM + ROWS - 1) // ROWS
    for tile in range(TILES):
        head = (first + tile) // SPLITS
        rows = ((first + tile) % SPLITS) * ROWS + tl.arange(0, ROWS)
        for token in range(TOKENS):
            place = ((row * TOKENS + token) * HEADS + head) * HEADDIM
            store_vector(y_ptr + place, rows, tl.zeros((ROWS,), tl.float32), HEADDIM, MASKED, NATIVE)


@triton.jit(do_not_specialize_on_alignment=ANY_ADDRESS)
def selective_state_update(
    state_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, A_ptr, D_ptr, z_ptr, dt_bias_ptr, read_slots_ptr, write_slots_ptr,
    seeds_ptr, layer_ptr, head_offset_ptr, y_ptr, new_state_ptr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, HEADDIM: tl.constexpr, GROUPS: tl.constexpr, DSTATE: tl.constexpr,
    LAYERS: tl.constexpr, TOTAL_HEADS: tl.constexpr, ROUNDS: tl.constexpr,
    SKIP: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, SHIFTED: tl.constexpr, STORES: tl.constexpr,
    SOFTPLUS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr,
    MASKED: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token. One program: TILES tiles (ROWS, dstate), neighbours in one row of the batch and one group.

    While a tile is worked on, the next is on its way. `new_state_ptr` is `state_ptr` where the update is in place.
    SKIP: "none", "head" or "channel", the kind of D. STORES: "read", "last" or "each", as in UpdateProblem.
    SHIFTED: the heads are a shard's, of TOTAL_HEADS. OVERLAP: the launch may begin before the one ahead of it ends.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    SPLITS: tl.constexpr = (HEADDIM + ROWS - 1) // ROWS
    PARTS: tl.constexpr = HEADS * SPLITS // TILES
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    first = (program % PARTS) * TILES
    slot = tl.load(read_slots_ptr + row)
    group = first // (HEADS // GROUPS * SPLITS)
    B, C = group_vectors(B_ptr, C_ptr, (row * GROUPS + group) * DSTATE, COLUMNS, BLOCKS, DSTATE, MASKED)
    k0, k1 = program.to(tl.uint32), program.to(tl.uint32)
    shift = 0
    if ROUNDS:
        k0, k1 = key_of(seeds_ptr, layer_ptr, LAYERS)
        if SHIFTED:
            shift = tl.load(head_offset_ptr)
    if (slot < 0) | (slot >= SLOTS):
        write_zeros(y_ptr, row, first, HEADS, HEADDIM, 1, ROWS, TILES, MASKED, NATIVE)
        return

    source = state_ptr + slot.to(tl.int64) * (HEADS * HEADDIM * DSTATE)
    coming = load_blocks(source, first, True, ROWS, COLUMNS, BLOCKS, HEADDIM, DSTATE, MASKED)
    for tile in range(TILES):
        raw = coming
        head = (first + tile) // SPLITS
        rows = ((first + tile) % SPLITS) * ROWS + tl.arange(0, ROWS)
        model_head = head + shift
        A = tl.load(A_ptr + head)
        bias = tl.load(dt_bias_ptr + head) if BIASED else None
        skip = None
        if SKIP == "head":
            skip = tl.load(D_ptr + head)
        elif SKIP == "channel":
            skip = load_vector(D_ptr + head * HEADDIM, rows, HEADDIM, MASKED)
        if TILES > 1:
            more = tile + 1 < TILES
            coming = load_blocks(source, first + tile + 1, more, ROWS, COLUMNS, BLOCKS, HEADDIM, DSTATE, MASKED)
            tl.debug_barrier()  # or else ptxas puts these loads behind the work, to save registers
        place = (row * HEADS + head) * HEADDIM
        dt = step_size(tl.load(dt_ptr + row * HEADS + head).to(tl.float32), bias, SOFTPLUS, LOW, HIGH)
        decay = tl.exp(dt * A)
        x = load_vector(x_ptr + place, rows, HEADDIM, MASKED)
        scaled = x * dt
        sums = tl.zeros((ROWS, COLUMNS // VECTOR), tl.float32)
        states = ()
        for block in tl.static_range(BLOCKS):
            state = raw[block].to(tl.float32) * decay + scaled[:, None] * B[block][None, :]
            sums += partial_sums(state * C[block][None, :], VECTOR)
            states += (state,)
        y = tl.sum(sums, axis=1)
        if SKIP != "none":
            y += skip * x
        if GATED:
            y = gate(y, load_vector(z_ptr + place, rows, HEADDIM, MASKED))
        store_vector(y_ptr + place, rows, y, HEADDIM, MASKED, NATIVE)
        target = slot
        if STORES != "read":
            target = tl.load(write_slots_ptr + row)
        if STORES == "read" or ((target >= 0) & (target < SLOTS)):
            store_states(
                new_state_ptr, states, rows, target, head, model_head, 0, k0, k1, HEADS, TOTAL_HEADS, HEADDIM, DSTATE,
                ROUNDS, NATIVE, MASKED,
            )  # fmt: skip


@triton.jit
def token_tile(pointer, places, used, columns, SIZE: tl.constexpr):
    """Rows of SIZE at `places` for several tokens (tokens, columns), as stored; zeros where unused or past SIZE."""
    mask = used[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + places.to(tl.int64)[:, None] * SIZE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def operand(tile, WIDE: tl.constexpr):
    """A tile as an operand of a matrix product: as it is, or in float32."""
    if WIDE:
        return tile.to(tl.float32)
    else:
        return tile


@triton.jit
def power_of_two(values):
    """(2^e, 2^-e) near the largest magnitude of each row, so that a row divided by it fits in float16."""
    exponent = tl.max(tl.abs(values), axis=1).to(tl.uint32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E000000)
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def queries_of(C, BLOCKS: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr):
    """C, a tuple of blocks (tokens, columns), as operands, and what each token's products have to be multiplied by."""
    scale = tl.full((C[0].shape[0],), 1.0, tl.float32)
    queries = ()
    if KIND == "scaled":
        peaks = tl.abs(C[0].to(tl.float32))
        for block in tl.static_range(1, BLOCKS):
            peaks = tl.maximum(peaks, tl.abs(C[block].to(tl.float32)))
        scale, inverse = power_of_two(peaks)
        for block in tl.static_range(BLOCKS):
            queries += (operand((C[block].to(tl.float32) * inverse[:, None]).to(tl.float16), WIDE),)
    else:
        for block in tl.static_range(BLOCKS):
            queries += (operand(C[block], WIDE),)
    return queries, scale


@triton.jit(do_not_specialize_on_alignment=ANY_ADDRESS)
def several_tokens_update(
    state_ptr, x_ptr, dt_ptr, B_ptr, C_ptr, A_ptr, D_ptr, z_ptr, dt_bias_ptr, read_slots_ptr, write_slots_ptr,
    seeds_ptr, layer_ptr, head_offset_ptr, y_ptr, new_state_ptr,
    SLOTS: tl.constexpr, HEADS: tl.constexpr, HEADDIM: tl.constexpr, GROUPS: tl.constexpr, DSTATE: tl.constexpr,
    TOKENS: tl.constexpr, LAYERS: tl.constexpr, TOTAL_HEADS: tl.constexpr, ROUNDS: tl.constexpr,
    SKIP: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, SHIFTED: tl.constexpr, STORES: tl.constexpr,
    SOFTPLUS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, KIND: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """As `selective_state_update`, for several tokens: y of all of them comes from the first state by matrix products.

    KIND: how C meets the state: "same" dtypes, C "scaled" to float16, or both "wide" (float32).
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    SPLITS: tl.constexpr = (HEADDIM + ROWS - 1) // ROWS
    PARTS: tl.constexpr = HEADS * SPLITS // TILES
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    first = (program % PARTS) * TILES
    slot = tl.load(read_slots_ptr + row)
    group = first // (HEADS // GROUPS * SPLITS)
    tokens = tl.arange(0, TOKENS_BLOCK)
    called = tokens < TOKENS
    at = row * TOKENS + tokens
    k0, k1 = program.to(tl.uint32), program.to(tl.uint32)
    shift = 0
    if ROUNDS:
        k0, k1 = key_of(seeds_ptr, layer_ptr, LAYERS)
        if SHIFTED:
            shift = tl.load(head_offset_ptr)
    if (slot < 0) | (slot >= SLOTS):
        write_zeros(y_ptr, row, first, HEADS, HEADDIM, TOKENS, ROWS, TILES, MASKED, NATIVE)
        return

    source = state_ptr + slot.to(tl.int64) * (HEADS * HEADDIM * DSTATE)
    coming = load_blocks(source, first, True, ROWS, COLUMNS, BLOCKS, HEADDIM, DSTATE, MASKED)
    # C of every token against B of every token, and C as an operand
    scores = tl.zeros((TOKENS_BLOCK, TOKENS_BLOCK), tl.float32)
    C = ()
    for block in tl.static_range(BLOCKS):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        some_B = token_tile(B_ptr, at * GROUPS + group, called, columns, DSTATE)
        C += (token_tile(C_ptr, at * GROUPS + group, called, columns, DSTATE),)
        # Triton's interpreter cannot multiply bfloat16.
        scores = tl.dot(
            operand(C[block], not NATIVE), tl.trans(operand(some_B, not NATIVE)), scores, input_precision="tf32x3"
        )
    WIDE: tl.constexpr = KIND == "wide" or not NATIVE
    queries, scale = queries_of(C, BLOCKS, KIND, WIDE)

    for tile in range(TILES):
        raw = coming
        head = (first + tile) // SPLITS
        rows = ((first + tile) % SPLITS) * ROWS + tl.arange(0, ROWS)
        model_head = head + shift
        A = tl.load(A_ptr + head)
        bias = tl.load(dt_bias_ptr + head) if BIASED else None
        dt = tl.load(dt_ptr + at * HEADS + head, mask=called, other=0.0).to(tl.float32)
        x = token_tile(x_ptr, at * HEADS + head, called, rows, HEADDIM).to(tl.float32)
        if TILES > 1:
            more = tile + 1 < TILES
            coming = load_blocks(source, first + tile + 1, more, ROWS, COLUMNS, BLOCKS, HEADDIM, DSTATE, MASKED)

        # y of every token
        dt = tl.where(called, step_size(dt, bias, SOFTPLUS, LOW, HIGH), 0.0)
        elapsed = tl.cumsum(dt * A, axis=0)
        gaps = tl.minimum(elapsed[:, None] - elapsed[None, :], 0.0)
        weights = tl.where(tokens[:, None] >= tokens[None, :], scores * tl.exp(gaps) * dt[None, :], 0.0)
        y = tl.zeros((TOKENS_BLOCK, ROWS), tl.float32)
        for block in tl.static_range(BLOCKS):
            y = tl.dot(queries[block], tl.trans(operand(raw[block], WIDE)), y, input_precision="tf32x3")
        y = tl.dot(weights, x, y * (tl.exp(elapsed) * scale)[:, None], input_precision="tf32x3")
        if SKIP == "head":
            y += tl.load(D_ptr + head) * x
        elif SKIP == "channel":
            y += load_vector(D_ptr + head * HEADDIM, rows, HEADDIM, MASKED)[None, :] * x
        if GATED:
            y = gate(y, token_tile(z_ptr, at * HEADS + head, called, rows, HEADDIM).to(tl.float32))
        places = (at * HEADS + head)[:, None] * HEADDIM + rows[None, :]
        inside = called[:, None] & (rows < HEADDIM)[None, :]
        tl.store(y_ptr + places, narrowed(y, y_ptr.dtype.element_ty, NATIVE), mask=inside)

        # the states that are stored
        total = tl.sum(dt * A, axis=0)
        shares = dt * tl.exp(tl.minimum(total - elapsed, 0.0))
        states = ()
        for block in tl.static_range(BLOCKS):
            if STORES == "each":
                states += (raw[block].to(tl.float32),)
            else:
                states += (raw[block].to(tl.float32) * tl.exp(total),)
        for token in tl.static_range(TOKENS):
            here = row * TOKENS + token
            share = tl.sum(tl.where(tokens == token, dt if STORES == "each" else shares, 0.0), axis=0)
            scaled = load_vector(x_ptr + (here * HEADS + head) * HEADDIM, rows, HEADDIM, MASKED) * share
            decay = tl.exp(share * A)
            advanced = ()
            for block in tl.static_range(BLOCKS):
                columns = block * COLUMNS + tl.arange(0, COLUMNS)
                B = load_vector(B_ptr + (here * GROUPS + group) * DSTATE, columns, DSTATE, MASKED)
                if STORES == "each":
                    advanced += (states[block] * decay + scaled[:, None] * B[None, :],)
                else:
                    advanced += (states[block] + scaled[:, None] * B[None, :],)
            states = advanced
            if STORES == "each" or token == TOKENS - 1:
                target = slot
                if STORES != "read":
                    target = tl.load(write_slots_ptr + (here if STORES == "each" else row))
                if STORES == "read" or ((target >= 0) & (target < SLOTS)):
                    store_states(
                        new_state_ptr, states, rows, target, head, model_head, token, k0, k1, HEADS, TOTAL_HEADS,
                        HEADDIM, DSTATE, ROUNDS, NATIVE, MASKED,
                    )  # fmt: skip
