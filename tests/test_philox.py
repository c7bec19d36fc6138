"""Philox against Random123's answers and Python integers; rounding against the rule and measured bits."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import export

import jax_ssd
from jax_ssd.philox import (
    StochasticRounding,
    add_wide,
    element_words,
    multiply_wide,
    philox4x32,
    round_stochastically,
)

GOLDEN = Path(__file__).parent / "golden" / "ssu.npz"
KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
WORDS = st.integers(0, 2**32 - 1)
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
ONES = (0xFFFFFFFF,) * 6
ZEROS = (0,) * 6

# Random123's kat_vectors, lines "philox4x32 7" and "philox4x32 10": (counter and key, rounds, answer).
KNOWN_ANSWERS = [
    (ZEROS, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (ONES, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (PI, 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (ZEROS, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (ONES, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
over_x64 = pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
FLOAT16, BFLOAT16 = jnp.dtype("float16"), jnp.dtype("bfloat16")
over_rounded = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
DROPPED_BITS = {FLOAT16: 13, BFLOAT16: 16}


def philox_integers(counter, key, rounds):
    """Philox-4x32 on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def words_by_hand(slots, shape, rounds, step=0, head_offset=0, total_heads=None):
    """The contract's word of each element, one Python integer at a time."""
    result = np.empty((len(slots), *shape), np.uint32)
    num_heads, headdim, dstate = shape
    for place in np.ndindex(*result.shape):
        row, head, i, j = place
        head += head_offset
        e = ((int(slots[row]) * (total_heads or num_heads) + head) * headdim + i) * dstate + j
        aligned = e - e % 4
        counter = (aligned % 2**32, aligned >> 32, step, 0)
        result[place] = philox_integers(counter, [int(word) for word in KEY], rounds)[e % 4]
    return result


def rounded_by_hand(values, random, dtype):
    """Rounding as real arithmetic in float64: down to the grid after adding r 2^-bits of its spacing."""
    bits, digits, smallest, top = (13, 10, -14, 16) if dtype == FLOAT16 else (16, 7, -126, 128)
    size = np.abs(values.astype(np.float64))
    exponent = np.frexp(size)[1] - 1
    spacing = np.ldexp(1.0, np.maximum(exponent, smallest) - digits)
    with np.errstate(invalid="ignore"):
        steps = np.floor((np.floor(size / spacing * 2.0**bits) + random % 2**bits) / 2.0**bits)
        result = np.where(steps * spacing >= 2.0**top, np.inf, steps * spacing)
    return np.copysign(np.where(np.isinf(size), np.inf, result), values)


def as_float64(rounded):
    return np.asarray(rounded).astype(np.float64)


@over_x64
@pytest.mark.parametrize(("words", "rounds", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(words, rounds, answer, x64):
    with jax.enable_x64(x64):
        result = philox4x32(words[:4], words[4:], rounds)
        assert [f"{int(word):08x}" for word in result] == answer.split()
        assert {word.dtype for word in result} == {np.dtype(np.uint32)}


@pytest.mark.parametrize("rounds", [1, 2, 5, 7, 10, 13])
def test_philox_equals_integers_for_any_rounds(rounds, rng):
    words = rng.integers(0, 2**32, (6, 50), dtype=np.uint32)
    compiled = jax.jit(functools.partial(philox4x32, rounds=rounds))
    expected = [philox_integers(map(int, column[:4]), map(int, column[4:]), rounds) for column in words.T]
    np.testing.assert_array_equal(np.stack(compiled(tuple(words[:4]), tuple(words[4:])), 1), expected)
    mapped = jax.vmap(compiled, in_axes=((0, None, 0, 0), (None, 0)))
    words[1], words[4] = words[1, 0], words[4, 0]
    result = mapped((words[0], words[1, 0], words[2], words[3]), (words[4, 0], words[5]))
    expected = [philox_integers(map(int, column[:4]), map(int, column[4:]), rounds) for column in words.T]
    np.testing.assert_array_equal(np.stack(result, 1), expected)


def test_philox_words_have_the_common_shape():
    result = philox4x32((np.zeros((3, 1), np.uint32), np.zeros((1, 2), np.uint32), 0, 0), KEY, 1)
    assert [word.shape for word in result] == [(3, 2)] * 4


@given(WORDS, WORDS, WORDS)
def test_wide_arithmetic_equals_integers(a, b, c):
    low, high = multiply_wide(a, jnp.asarray(b, jnp.uint32))
    assert int(low) + (int(high) << 32) == a * b
    assert [int(word) for word in multiply_wide(a, b)] == [int(low), int(high)]
    low, high = add_wide(a, b, c)
    assert int(low) + (int(high) << 32) == (a + (b << 32) + c) % 2**64


@over_x64
@pytest.mark.parametrize("shape", [(2, 4, 8), (3, 2, 6), (2, 3, 5), (3, 1, 1), (1, 5, 4)], ids=str)
def test_element_words_equal_integers(shape, x64):
    # Offsets of the last slots need more than 32 bits; odd sizes start heads in the middle of a block of 4.
    slots = [0, 7, 2**27 + 3, 2**31 - 1]
    with jax.enable_x64(x64):
        words = jax.jit(
            lambda slots, key, step: element_words(slots, shape, key, rounds=7, step=step)
        )(np.array(slots, np.int32), KEY, 3)  # fmt: skip
        np.testing.assert_array_equal(words, words_by_hand(slots, shape, 7, step=3))
    assert words.dtype == np.uint32


@over_x64
def test_offsets_use_64_bits(x64):
    slots, shape = [2**31 - 1, 2**31, 2**31 - 2], (2, 64, 64)
    with jax.enable_x64(x64):
        words = element_words(np.array(slots, np.uint32), shape, KEY, rounds=10, head_offset=254, total_heads=256)
    e = ((2**31 - 1) * 256 + 255) * 64 * 64 + 63 * 64 + 62
    assert e > 2**50
    counter = ((e - e % 4) % 2**32, e >> 32, 0, 0)
    assert int(words[0, 1, 63, 62]) == philox_integers(counter, map(int, KEY), 10)[e % 4]
    assert int(words[1, 0, 0, 0]) == philox_integers(
        (254 * 4096, 2**31 * 256 * 4096 >> 32, 0, 0), map(int, KEY), 10
    )[0]  # fmt: skip


@pytest.mark.parametrize("shape", [(6, 2, 4), (6, 1, 3)], ids=str)
def test_a_shard_of_heads_has_the_whole_models_words(shape):
    slots = np.array([3, 2**30], np.int32)
    whole = element_words(slots, shape, KEY, rounds=5)
    np.testing.assert_array_equal(whole, words_by_hand(slots, shape, 5))
    part = jax.jit(
        lambda head_offset: element_words(slots, (2, *shape[1:]), KEY, rounds=5, head_offset=head_offset, total_heads=6)
    )
    for first in (0, 2, 4):
        np.testing.assert_array_equal(part(first), whole[:, first : first + 2])


def test_steps_may_differ_by_row():
    slots, steps = np.array([1, 1, 2], np.int32), np.array([0, 4, 4], np.int32)
    words = element_words(slots, (1, 2, 2), KEY, rounds=7, step=steps)
    for row in range(3):
        alone = element_words(slots[row : row + 1], (1, 2, 2), KEY, rounds=7, step=int(steps[row]))
        np.testing.assert_array_equal(words[row : row + 1], alone)
    assert not np.array_equal(words[0], words[1])


def test_one_philox_call_serves_four_elements():
    shape = (2, 8, 16)
    trace = jax.make_jaxpr(lambda slots: element_words(slots, shape, KEY, rounds=10))(np.arange(3))
    products = [eqn.outvars[0].aval.size for eqn in trace.eqns if eqn.primitive.name == "mul"]
    assert len(products) > 10
    assert max(products) == 3 * int(np.prod(shape)) // 4


# Counts over all 8192 values of r, as the rule gives them by hand.
ROUNDING_TABLE = [
    (1 + 2.0**-12, {0x3C00: 6144, 0x3C01: 2048}),
    (2.0**-25, {0x0000: 4096, 0x0001: 4096}),
    (1e-7, {0x0001: 2641, 0x0002: 5551}),
    (1e-9, {0x0000: 8055, 0x0001: 137}),
    (2.0**-37, {0x0000: 8191, 0x0001: 1}),
    (2.0**-38, {0x0000: 8192}),
    (2.0**-140, {0x0000: 8192}),
    (0.0, {0x0000: 8192}),
    (65504.0, {0x7BFF: 8192}),
    (65520.0, {0x7BFF: 4096, 0x7C00: 4096}),
    (65536.0, {0x7C00: 8192}),
    (3.4e38, {0x7C00: 8192}),
    (np.inf, {0x7C00: 8192}),
]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("value", "counts"), ROUNDING_TABLE)
def test_float16_counts_over_every_r(value, counts, sign):
    random = np.arange(8192, dtype=np.uint32)
    bits = np.asarray(round_stochastically(np.float32(sign * value), random, FLOAT16)).view(np.uint16)
    expected = {pattern | (0x8000 if sign < 0 else 0): count for pattern, count in counts.items()}
    assert dict(zip(*np.unique(bits, return_counts=True), strict=True)) == expected


@over_rounded
def test_rounding_equals_real_arithmetic_on_any_bits(dtype, rng):
    bits = rng.integers(0, 2**32, 400_000, dtype=np.uint32)
    # Half of the values in and around float16's range, which random bits seldom meet.
    bits[::2] = (bits[::2] & 0x807FFFFF) | (rng.integers(80, 150, bits[::2].size, dtype=np.uint32) << 23)
    values, random = bits.view(np.float32), rng.integers(0, 2**32, bits.size, dtype=np.uint32)
    values = np.where(np.isnan(values), np.float32(1), values)
    rounded = jax.jit(round_stochastically, static_argnums=2)(values, random, dtype)
    assert rounded.dtype == dtype
    expected = rounded_by_hand(values, random, dtype)
    np.testing.assert_array_equal(as_float64(rounded), expected)
    np.testing.assert_array_equal(np.signbit(as_float64(rounded)), np.signbit(values))


@over_rounded
@pytest.mark.parametrize("largest", [False, True])
def test_exact_values_never_change(dtype, largest):
    bits = np.arange(2**16, dtype=np.uint16)
    exact = bits[(bits & 0x7FFF) < np.array(np.inf, dtype).view(np.uint16)].view(dtype)
    random = np.uint32(2 ** DROPPED_BITS[dtype] - 1 if largest else 0)
    rounded = np.asarray(round_stochastically(exact.astype(np.float32), random, dtype))
    np.testing.assert_array_equal(rounded.view(np.uint16), exact.view(np.uint16))


@over_rounded
def test_nan_and_infinity_stay(dtype):
    # Payloads in the low bits only, which truncation would lose, and full ones, which a carry would spill.
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    for random in (0, 1, 0x1FFF, 0xFFFF, 0xFFFFFFFF):
        assert np.isnan(as_float64(round_stochastically(nans, np.uint32(random), dtype))).all()
        infinities = np.array([np.inf, -np.inf], np.float32)
        result = round_stochastically(infinities, np.uint32(random), dtype)
        np.testing.assert_array_equal(as_float64(result), infinities)


@over_rounded
def test_only_the_low_bits_of_a_word_count(dtype, rng):
    values = rng.standard_normal(1000).astype(np.float32)
    random = rng.integers(0, 2**32, 1000, dtype=np.uint32)
    low = random & np.uint32(2 ** DROPPED_BITS[dtype] - 1)
    np.testing.assert_array_equal(round_stochastically(values, random, dtype), round_stochastically(values, low, dtype))


def golden_call(name):
    """The call's arrays, floats as float32, and the exact float32 pool that its rows hold before rounding."""
    with np.load(GOLDEN) as file:
        arrays = {key.split("/")[1]: file[key] for key in file.files if key.startswith(f"{name}/")}
    for key in ("x", "y", "dt", "B", "C", "D", "dt_bias"):
        arrays[key] = (arrays[key].astype(np.uint32) << 16).view(np.float32)
    state = arrays["state_in"].view(np.float16).astype(np.float32)
    idx, x, B = arrays["idx"], arrays["x"], arrays["B"]
    if x.ndim == 3:
        x, B = x[:, None], B[:, None]
    assert not arrays["A"].any() and (arrays["dt"] == 1).all()
    B = np.repeat(B, x.shape[2] // B.shape[2], axis=2)
    return arrays, state[idx] + np.einsum("bthp,bthn->bhpn", x, B)


def golden_words(name, meta, idx, shape):
    """The random word of each element, laid out as the kernel of each call does."""
    num_heads, headdim, dstate = shape
    slots, head, row, column = np.ix_(idx, *(np.arange(size) for size in shape))
    width = 2 if name in ("stp_simple_n64_r10", "stp_vertical_n128_r5") else 4
    offset = ((slots * num_heads + head) * headdim + row) * dstate + column // width * width
    words = jnp.stack(philox4x32((offset.astype(np.uint32), 0, 0, 0), meta[:2], int(meta[2])))
    lane = column % width if name != "mtp3_simple_n128_r5" else column % 4 // 2
    chosen = np.take_along_axis(np.asarray(words), np.broadcast_to(lane, offset.shape)[None], 0)[0]
    return chosen >> (16 * (column % 2)).astype(np.uint32) if name == "mtp3_simple_n128_r5" else chosen


@pytest.mark.parametrize(
    "name", ["stp_simple_n128_r10", "stp_simple_n64_r10", "stp_vertical_n128_r5", "mtp3_simple_n128_r5"]
)
def test_flashinfers_states_are_reproduced(name):
    arrays, exact = golden_call(name)
    words = golden_words(name, arrays["meta"], arrays["idx"], exact.shape[1:])
    expected = arrays["state_in"].copy()
    expected[arrays["idx"]] = np.asarray(round_stochastically(exact, words, FLOAT16)).view(np.uint16)
    np.testing.assert_array_equal(expected, arrays["state_out"])
    nearest = exact.astype(np.float16).view(np.uint16)
    assert (nearest != arrays["state_out"][arrays["idx"]]).mean() > 0.2


def test_the_public_update_reproduces_flashinfers_call():
    arrays, _ = golden_call("stp_simple_n128_r10")
    inputs = {key: jnp.asarray(arrays[key], jnp.bfloat16) for key in ("x", "dt", "B", "C", "D", "dt_bias")}
    rounding = StochasticRounding(arrays["meta"][None, :2], rounds=int(arrays["meta"][2]))
    y, state = jax.jit(jax_ssd.selective_state_update)(
        arrays["state_in"].view(np.float16),
        A=arrays["A"],
        read_slots=arrays["idx"],
        rounding=rounding,
        **inputs,
    )
    np.testing.assert_array_equal(np.asarray(state).view(np.uint16), arrays["state_out"])
    np.testing.assert_array_equal(np.asarray(y).astype(np.float32), arrays["y"])


SEEDS = np.array([[1, 2], [3, 4], [5, 6]], np.uint32)
VALUES_SHAPE = (2, 4, 2, 8)


@over_rounded
def test_a_rounding_uses_its_layers_row_and_its_step(dtype, rng):
    values, slots = rng.standard_normal(VALUES_SHAPE).astype(np.float32), np.array([4, 0], np.int32)
    traces, seen = [], set()

    @jax.jit
    def compiled(rounding, step):
        traces.append(rounding)
        return rounding.round(values, slots, dtype, step=step)

    for layer in range(3):
        for step in range(2):
            words = element_words(slots, VALUES_SHAPE[1:], SEEDS[layer], rounds=6, step=step)
            expected = np.asarray(round_stochastically(values, words, dtype)).view(np.uint16)
            result = compiled(StochasticRounding(SEEDS, layer, 6), step)
            np.testing.assert_array_equal(np.asarray(result).view(np.uint16), expected)
            seen.add(expected.tobytes())
    assert len(seen) == 6
    assert len(traces) == 1


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 7, 10])
@pytest.mark.parametrize("shape", [(3, 4, 2, 8), (3, 3, 3, 5), (1, 1, 1, 1), (0, 2, 2, 2), (2, 0, 2, 2)], ids=str)
def test_rows_round_with_their_elements_words(shape, rounds, rng):
    values, slots = rng.standard_normal(shape).astype(np.float32), np.arange(2**31 - shape[0], 2**31)
    slots, steps = slots.astype(np.uint32), np.arange(shape[0], dtype=np.int32)
    place = dict(head_offset=3, total_heads=9)
    words = element_words(slots, shape[1:], SEEDS[2], rounds=rounds, step=steps, **place)
    rounded = StochasticRounding(SEEDS, 2, rounds, **place).round(values, slots, FLOAT16, step=steps)
    np.testing.assert_array_equal(rounded, round_stochastically(values, words, FLOAT16))


def test_rounding_under_vmap_is_a_loop(rng):
    values = rng.standard_normal((3, *VALUES_SHAPE)).astype(np.float32)
    slots = np.array([[0, 1], [5, 2], [9, 9]], np.int32)
    seeds = rng.integers(0, 2**32, (3, 2, 2), dtype=np.uint32)

    def one(seeds, layer, values, slots):
        return StochasticRounding(seeds, layer).round(values, slots, FLOAT16)

    layers = np.array([0, 1, 1], np.int32)
    mapped = jax.vmap(one)(seeds, layers, values, slots)
    looped = jnp.stack([one(*row) for row in zip(seeds, layers, values, slots, strict=True)])
    np.testing.assert_array_equal(mapped, looped)

    objects = jax.vmap(StochasticRounding)(seeds, layers)
    assert objects.seeds.shape == (3, 2, 2)
    mapped = jax.vmap(lambda rounding, *rest: rounding.round(*rest, FLOAT16))(objects, values, slots)
    np.testing.assert_array_equal(mapped, looped)


def test_rounding_crosses_jit_checkpoint_scan_and_export(rng):
    values, slots = rng.standard_normal(VALUES_SHAPE).astype(np.float32), np.arange(2, dtype=np.int32)
    rounding = StochasticRounding(jnp.asarray(SEEDS), 1, 7, head_offset=4, total_heads=8)

    def function(rounding, values):
        return rounding.round(values, slots, FLOAT16)

    expected = function(rounding, values)
    np.testing.assert_array_equal(jax.jit(function)(rounding, values), expected)
    np.testing.assert_array_equal(jax.checkpoint(function)(rounding, values), expected)
    _, stacked = jax.lax.scan(lambda carry, _: (carry, function(carry, values)), rounding, length=2)
    np.testing.assert_array_equal(stacked[1], expected)
    exported = export.export(jax.jit(function))(rounding, values)
    np.testing.assert_array_equal(exported.call(rounding, values), expected)
    shape = jax.eval_shape(function, StochasticRounding(jax.ShapeDtypeStruct((3, 2), jnp.uint32)), values)
    assert shape.dtype == jnp.float16


def test_a_rounding_can_be_serialised(rng):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")
    values, slots = rng.standard_normal(VALUES_SHAPE).astype(np.float32), np.arange(2, dtype=np.int32)
    rounding = StochasticRounding(jnp.asarray(SEEDS), 1, 7, head_offset=4, total_heads=8)
    exported = export.export(jax.jit(lambda rounding: rounding.round(values, slots, FLOAT16)))(rounding)
    restored = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(restored.call(rounding), rounding.round(values, slots, FLOAT16))


def compiled_rounding(rows, rounds):
    """A loop that rounds a pool again and again, compiled: XLA's fusion is at its worst there."""
    rounding = StochasticRounding(jnp.asarray(SEEDS), rounds=rounds)

    def step(pool, layer):
        values, slots = pool.astype(jnp.float32) * 1.5, jnp.arange(rows)
        pool = dataclasses.replace(rounding, layer=layer).round(values, slots, FLOAT16)
        return pool, pool

    pool = jax.ShapeDtypeStruct((rows, 8, 16, 64), FLOAT16)
    return jax.jit(lambda pool: jax.lax.scan(step, pool, jnp.arange(3))).lower(pool).compile()


def test_rounds_are_a_loop_on_a_cpu():
    multiplications = [compiled_rounding(2, rounds).as_text().count(" multiply(") for rounds in (6, 20)]
    assert multiplications[0] == multiplications[1] > 0


def test_rounding_needs_memory_for_one_row():
    rows, row_bytes = 16, 8 * 16 * 64 * np.dtype(np.uint32).itemsize
    stats = compiled_rounding(rows, 10).memory_analysis()
    assert stats.temp_size_in_bytes - stats.output_size_in_bytes < 4 * row_bytes


@pytest.mark.parametrize("names", [(None, "i"), ("i", None)], ids=["heads", "slots"])
def test_shards_round_as_the_whole(names, rng):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    values, slots = rng.standard_normal((4, 8, 2, 8)).astype(np.float32), np.array([3, 9, 0, 4], np.int32)

    def shard(seeds, values, slots):
        head_offset = jax.lax.axis_index("i") * 2 if names[1] else 0
        rounding = StochasticRounding(seeds, 1, head_offset=head_offset, total_heads=8)
        return rounding.round(values, slots, FLOAT16)

    spec, rows = jax.P(*names), jax.P(names[0])
    sharded = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(jax.P(), spec, rows), out_specs=spec))
    whole = StochasticRounding(SEEDS, 1).round(values, slots, FLOAT16)
    np.testing.assert_array_equal(sharded(SEEDS, values, slots), whole)


FAULTS = [
    (lambda: StochasticRounding([[1, 2]]), TypeError, "seeds"),
    (lambda: StochasticRounding(None), TypeError, "seeds"),
    (lambda: StochasticRounding(SEEDS.astype(np.int32)), ValueError, "seeds"),
    (lambda: StochasticRounding(SEEDS[0]), ValueError, "seeds"),
    (lambda: StochasticRounding(SEEDS[:, :1]), ValueError, "seeds"),
    (lambda: StochasticRounding(SEEDS[:0]), ValueError, "seeds"),
    (lambda: StochasticRounding(SEEDS, 3), ValueError, "layer"),
    (lambda: StochasticRounding(SEEDS, -1), ValueError, "layer"),
    (lambda: StochasticRounding(SEEDS, np.array(3)), ValueError, "layer"),
    (lambda: StochasticRounding(SEEDS, 1.0), TypeError, "layer"),
    (lambda: StochasticRounding(SEEDS, True), TypeError, "layer"),
    (lambda: StochasticRounding(SEEDS, jnp.zeros(2, jnp.int32)), ValueError, "layer"),
    (lambda: StochasticRounding(SEEDS, jnp.float32(1)), TypeError, "layer"),
    (lambda: StochasticRounding(SEEDS, 0, 0), ValueError, "rounds"),
    (lambda: StochasticRounding(SEEDS, 0, 2.5), TypeError, "rounds"),
    (lambda: StochasticRounding(SEEDS, 0, jnp.int32(7)), TypeError, "rounds"),
    (lambda: StochasticRounding(SEEDS, total_heads=0), ValueError, "total_heads"),
    (lambda: StochasticRounding(SEEDS, total_heads=8.0), TypeError, "total_heads"),
    (lambda: StochasticRounding(SEEDS, head_offset=4), ValueError, "total_heads"),
    (lambda: StochasticRounding(SEEDS, head_offset=jnp.int32(4)), ValueError, "total_heads"),
    (lambda: StochasticRounding(SEEDS, head_offset=-1, total_heads=8), ValueError, "head_offset"),
    (lambda: StochasticRounding(SEEDS, head_offset=9, total_heads=8), ValueError, "total_heads"),
    (
        lambda: StochasticRounding(SEEDS, head_offset=5, total_heads=8).check_heads(4),
        ValueError,
        "total_heads",
    ),
    (lambda: StochasticRounding(SEEDS).round(np.zeros((1, 1, 1)), [0], FLOAT16), ValueError, "values"),
    (
        lambda: StochasticRounding(SEEDS).round(np.zeros(VALUES_SHAPE), np.arange(3), FLOAT16),
        ValueError,
        "slots",
    ),
    (
        lambda: StochasticRounding(SEEDS).round(np.zeros(VALUES_SHAPE), np.zeros(2), FLOAT16),
        TypeError,
        "slots",
    ),
    (
        lambda: StochasticRounding(SEEDS).round(np.zeros(VALUES_SHAPE), np.arange(2), "float32"),
        ValueError,
        "dtype",
    ),
    (lambda: round_stochastically(np.float32(1), np.uint32(0), jnp.float32), ValueError, "dtype"),
    (lambda: philox4x32((0, 0, 0), (0, 0)), ValueError, "counter"),
    (lambda: philox4x32((0, 0, 0, 0), (0, 0), 0), ValueError, "rounds"),
]


@pytest.mark.parametrize(("fault", "error", "name"), FAULTS)
def test_faults_are_named(fault, error, name):
    with pytest.raises(error, match=name):
        fault()
