"""Stages of the scan's kernels: what one chunk does to the outputs and to the state [n, p] in registers.

Tiles are padded to powers of two with zeros, rows past the end of a segment too: their dt is 0.
"""

import triton
import triton.language as tl

from jax_ssd.kernels.triton.scan_prepare import wide


@triton.jit
def dot(left, right, accumulator, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """accumulator + left @ right in float32. UPCAST: Triton's interpreter multiplies the bits of bfloat16."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc=accumulator, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def touch(tile):
    """Use a tile in registers: Triton keeps one shared buffer fewer of it, and two programs fit a multiprocessor."""
    tl.inline_asm_elementwise("// $0 $1", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)


@triton.jit
def load_rows(base, start, live, column, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """[l, column] of a token-major array; zeros where a row is not live or a column is past WIDTH."""
    offset = tl.arange(0, ROWS)[:, None] * STRIDE + column[None, :]
    rows = base + wide(start) * STRIDE
    return tl.load(rows + offset, mask=live[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def last_of(sums, start, end, CHUNK: tl.constexpr):
    """An entry of the last row of the chunk at `start`, 0 where there is no chunk."""
    return tl.load(sums + tl.minimum(start + CHUNK, end) - 1, mask=start < end, other=0)


@triton.jit
def leaving_weights(sums, step, total, row, since, DOCUMENTS: tl.constexpr):
    """[l] weight of each row in the state after the chunk: dt * exp(total - sums)."""
    weight = step * tl.exp2(tl.minimum(total - sums, 0.0))
    if DOCUMENTS:
        weight = tl.where(row >= since, weight, 0.0)
    return weight


@triton.jit
def carried(state, total, since, DOCUMENTS: tl.constexpr):
    """The state as it enters, decayed to the end of the chunk."""
    factor = tl.exp2(tl.minimum(total, 0.0))
    if DOCUMENTS:
        factor = tl.where(since < 0, factor, 0.0)
    return state * factor


@triton.jit
def add_rows(state, x, B, weight, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """state + sum_l weight_l B_l x_l^T."""
    weighted = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
    # [n, l] @ [l, p] -> [n, p]
    return dot(tl.trans(B), weighted, state, PRECISION, UPCAST)


@triton.jit
def within(C, B, x, sums, step, row, since, y, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """y + sum_{m<=l} exp(sums_l - sums_m) dt_m (C_l . B_m) x_m."""
    scores = tl.zeros((C.shape[0], B.shape[0]), tl.float32)
    # [l, n] @ [n, m] -> [l, m]
    scores = dot(C, tl.trans(B), scores, PRECISION, UPCAST)
    decay = tl.exp2(tl.minimum(sums[:, None] - sums[None, :], 0.0))
    causal = row[:, None] >= row[None, :]
    if DOCUMENTS:
        causal = causal & (row[None, :] >= since[:, None])
    weights = tl.where(causal, scores * decay * step[None, :], 0.0).to(x.dtype)
    # [l, m] @ [m, p] -> [l, p]
    return dot(weights, x, y, PRECISION, UPCAST)


@triton.jit
def across(C, state, sums, since, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """exp(sums_l) C_l . S, S the state that enters the chunk."""
    y = tl.zeros((C.shape[0], state.shape[1]), tl.float32)
    # [l, n] @ [n, p] -> [l, p]
    y = dot(C, state.to(C.dtype), y, PRECISION, UPCAST)
    factor = tl.exp2(tl.minimum(sums, 0.0))
    if DOCUMENTS:
        factor = tl.where(since < 0, factor, 0.0)
    return y * factor[:, None]


@triton.jit
def gated(y, x, D, z, HAS_D: tl.constexpr, HAS_Z: tl.constexpr):
    """(y + D * x) * silu(z); D broadcasts over rows."""
    if HAS_D:
        y += D * x.to(tl.float32)
    if HAS_Z:
        z = z.to(tl.float32)
        y = y * z / (1.0 + tl.exp2(-z * 1.4426950408889634))
    return y
