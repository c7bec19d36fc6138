"""Philox-4x32 and stochastic rounding of state tiles, in the project's bit layout (see `jax_ssd.philox`)."""

import triton
import triton.language as tl

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    """Four random words for each counter."""
    for _ in tl.static_range(ROUNDS):
        high0, low0 = tl.umulhi(c0, _MULTIPLIER_0), c0 * _MULTIPLIER_0
        high1, low1 = tl.umulhi(c2, _MULTIPLIER_1), c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def quarters(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns 0 1 2 3 modulo 4 of a tile (rows, columns); moves nothing where a thread holds 4 neighbours."""
    even, odd = tl.reshape(tile, (ROWS, COLUMNS // 4, 2, 2)).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@triton.jit
def together(first, second, third, fourth, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `quarters`."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (ROWS, COLUMNS))


@triton.jit
def narrowed(values, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """float32 rounded to nearest in DTYPE; Triton's interpreter would cut bfloat16 off instead."""
    if NATIVE or dtype != tl.bfloat16:
        return values.to(dtype)
    else:
        bits = values.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, nearest)
        return result.to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def rounded(values, random, dtype: tl.constexpr):
    """float32 to float16 or bfloat16 by adding random bits below the last place: the contract's formula in integers."""
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if dtype == tl.float16:
        exponent = magnitude >> 23
        shift = tl.where(exponent < 113, 113 - exponent, 0)
        subnormal = ((magnitude & 0x7FFFFF) | 0x800000) >> tl.minimum(shift, 31)
        scaled = tl.where(exponent >= 113, magnitude - (112 << 23), subnormal)
        result = tl.minimum((scaled + (random & 0x1FFF)) >> 13, 0x7C00)
        result = tl.where(magnitude > 0x7F800000, 0x7E00, result)
    else:
        result = (magnitude + (random & 0xFFFF)) >> 16
        result = tl.where(magnitude > 0x7F800000, 0x7FC0, result)
    return (result | ((bits >> 16) & 0x8000)).to(tl.uint16).to(dtype, bitcast=True)


@triton.constexpr_function
def _rounding_assembly(rounds, float16):
    """PTX of four neighbours' rounding, and its constraints: two packed pairs from four values and one counter."""
    multiply = "mul.wide.u32 product, {c}, {m}; mov.b64 {{{low}, {high}}}, product;"
    lines = [
        ".reg .b32 c0, c1, c2, c3, k0, k1, low0, high0, low1, high1, scaled, sum, whole;",
        ".reg .b64 product;",
        ".reg .b32 part0, part1;",
        "mov.b32 c0, $6; mov.b32 c1, $7; mov.b32 c2, $8; mov.b32 c3, 0; mov.b32 k0, $9; mov.b32 k1, $10;",
    ]
    for _ in range(rounds):
        lines += [
            multiply.format(c="c0", m="0xD2511F53", low="low0", high="high0"),
            multiply.format(c="c2", m="0xCD9E8D57", low="low1", high="high1"),
            "xor.b32 c0, high1, c1; xor.b32 c0, c0, k0; mov.b32 c1, low1;",
            "xor.b32 c2, high0, c3; xor.b32 c2, c2, k1; mov.b32 c3, low0;",
            "add.u32 k0, k0, 0x9E3779B9; add.u32 k1, k1, 0xBB67AE85;",
        ]
    for pair in range(2):
        for part in range(2):
            value, word = f"${2 + 2 * pair + part}", f"c{2 * pair + part}"
            lines += _one_rounding(value, word, f"part{part}", float16)
        lines.append(f"cvt.rn.{'f16x2' if float16 else 'bf16x2'}.f32 ${pair}, part1, part0;")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _one_rounding(value, word, result, float16):
    """PTX that leaves in `result` a float32 which float16 (bfloat16) holds exactly, or Inf or NaN."""
    # Scaling by 2^-112 towards zero turns float16's subnormal range into float32's: the bits are then the
    # contract's `scaled` at every exponent. Adding the scaled value back at the end is below the last place of
    # everything but NaN, which the addition of integers has destroyed.
    if float16:
        scale, mask, keep, back = f"mul.rz.f32 scaled, {value}, 0f07800000;", "0x1FFF", "0xFFFFE000", "0f77800000"
        tail = f"fma.rn.f32 {result}, whole, {back}, scaled;"
    else:
        scale, mask, keep = f"mov.b32 scaled, {value};", "0xFFFF", "0xFFFF0000"
        tail = f"fma.rn.f32 {result}, scaled, 0f1F800000, whole;"
    return [
        scale,
        f"and.b32 sum, {word}, {mask}; add.u32 sum, sum, scaled; and.b32 whole, sum, {keep};",
        tail,
    ]


@triton.jit
def key_of(seeds_ptr, layer_ptr, LAYERS: tl.constexpr):
    """The Philox key of a layer: its row of the table, indexed as JAX does (negative from the end, then clamped)."""
    layer = tl.load(layer_ptr).to(tl.int32)
    layer = tl.where(layer < 0, layer + LAYERS, layer)
    layer = tl.minimum(tl.maximum(layer, 0), LAYERS - 1)
    row = seeds_ptr + 2 * layer
    return tl.load(row).to(tl.uint32, bitcast=True), tl.load(row + 1).to(tl.uint32, bitcast=True)


@triton.jit
def counters(slot, head, rows, columns, HEADS, HEADDIM: tl.constexpr, DSTATE: tl.constexpr):
    """Philox counters (low, high words) of the elements of one slot and head at `rows`, `columns`, multiples of 4."""
    SIZE: tl.constexpr = HEADDIM * DSTATE
    base = (slot.to(tl.int64) * HEADS + head) * SIZE
    low, high = base.to(tl.uint32), (base >> 32).to(tl.uint32)
    within = (rows * DSTATE + columns).to(tl.uint32)
    counter = low + within
    # A size that divides 2^32 never carries.
    if SIZE & (SIZE - 1):
        high += (counter < within).to(tl.uint32)
    return counter, high


@triton.jit
def round_tile(tile, counter, high, step, k0, k1, dtype: tl.constexpr, ROUNDS: tl.constexpr, NATIVE: tl.constexpr):
    """A float32 tile (rows, columns) rounded to `dtype`; counters are (rows, columns / 4).

    NATIVE: in PTX, neighbours packed in uint32 (rows, columns / 2). Else in integers, what the interpreter can run.
    """
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    first, second, third, fourth = quarters(tile, ROWS, COLUMNS)
    if NATIVE:
        low, upper = tl.inline_asm_elementwise(
            _rounding_assembly(ROUNDS, dtype == tl.float16),
            "=r,=r,r,r,r,r,r,r,r,r,r",
            [first, second, third, fourth, counter, high, step, k0, k1],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        return tl.reshape(tl.join(low, upper), (ROWS, COLUMNS // 2))
    else:
        zero = tl.zeros_like(counter)
        w0, w1, w2, w3 = philox4x32(counter, high + zero, zero + step, zero, k0, k1, ROUNDS)
        first, second = rounded(first, w0, dtype), rounded(second, w1, dtype)
        third, fourth = rounded(third, w2, dtype), rounded(fourth, w3, dtype)
        return together(first, second, third, fourth, ROWS, COLUMNS)
