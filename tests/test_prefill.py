"""`prefill` is gather, scan, scatter on a cache: slots, checkpoints, stale slots, rounding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import reference
from tests.cases import BY_NAME
from tests.harness import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    exact,
    oracle,
    over_implementations,
    prefill,
    require,
    same_bits,
    scan,
    widened,
)
from tests.tolerances import check

CASE = dataclasses.replace(BY_NAME["packed"], initial_states=False, checkpoints=None)
SLOTS = np.array([5, 1, 3, 0], np.int32)
FLAGS = np.array([True, False, False, True])
WRITTEN, UNTOUCHED = np.array([0, 1, 3, 5]), np.array([2, 4, 6])
KEYS = np.array([[123456789, 987654321], [5, 6]], np.uint32)


def arguments_of(dtype=FLOAT32, cache_dtype=FLOAT32, case=CASE, **changes):
    """A pool of 7 slots; those that no sequence starts from hold NaN."""
    draw = np.random.default_rng(3)
    cache = draw.normal(size=(7, case.num_heads, case.headdim, case.dstate))
    cache[[1, 2, 3, 4, 6]] = np.nan
    arguments = case.arrays(dtype) | case.options()
    given = {"cache": cache.astype(cache_dtype), "slots": SLOTS, "has_initial_state": FLAGS}
    return arguments | given | changes


def gathered(arguments):
    """The scan that the prefill stands for: its initial states read from the cache."""
    flags = arguments["has_initial_state"]
    start = np.where(flags[:, None, None, None], np.asarray(arguments["cache"], np.float32)[arguments["slots"]], 0.0)
    only = ("cache", "slots", "has_initial_state", "checkpoint_slots", "rounding")
    return {name: value for name, value in arguments.items() if name not in only} | {
        "initial_states": start.astype(np.float32)
    }


@over_implementations
@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("cache_dtype", (FLOAT32, BFLOAT16, FLOAT16), ids=lambda dtype: f"cache_{dtype.name}")
def test_is_gather_scan_scatter(implementation, dtype, cache_dtype):
    """Values and states as from a scan, NaN in unread slots notwithstanding; the other slots keep their bits."""
    arguments = arguments_of(dtype, cache_dtype)
    result = prefill(implementation, **arguments)
    expected = oracle(reference.chunk_scan, **gathered(arguments))
    assert result.y.dtype == dtype and result.cache.dtype == cache_dtype
    check(result.y, expected.y, dtype, "value")
    check(result.cache[SLOTS], expected.final_states, cache_dtype, "state")
    assert same_bits(result.cache[UNTOUCHED], arguments["cache"][UNTOUCHED])
    assert same_bits(result.cache[1], np.zeros_like(arguments["cache"][1])), "an empty sequence without a state"


@over_implementations
@pytest.mark.parametrize("cache_dtype", (BFLOAT16, FLOAT16), ids=lambda dtype: dtype.name)
def test_final_state_is_rounded_to_nearest(implementation, cache_dtype):
    """The bits of a scan's float32 final state, rounded."""
    arguments = exact(arguments_of(FLOAT32, cache_dtype))
    wide = arguments | {"cache": arguments["cache"].astype(np.float32)}
    narrow, unrounded = prefill(implementation, **arguments), prefill(implementation, **wide)
    check(narrow.y, unrounded.y, FLOAT32, "value")
    assert same_bits(narrow.cache[WRITTEN], unrounded.cache[WRITTEN].astype(cache_dtype))


@over_implementations
@pytest.mark.parametrize("cache_dtype", (BFLOAT16, FLOAT16), ids=lambda dtype: dtype.name)
def test_rounding(implementation, cache_dtype):
    """Final states and checkpoints are rounded with step 0 at the slot written."""
    positions, slots = np.array([3, 25], np.int32), np.array([2, 6], np.int32)
    arguments = exact(arguments_of(FLOAT32, cache_dtype, checkpoint_positions=positions, checkpoint_slots=slots))
    rounding = jax_ssd.StochasticRounding(jnp.asarray(KEYS), layer=1)
    wide = arguments | {"cache": arguments["cache"].astype(np.float32)}
    rounded = prefill(implementation, **arguments, rounding=rounding)
    unrounded = prefill(implementation, **wide)
    check(rounded.y, unrounded.y, FLOAT32, "value")
    written = np.array([0, 3, 5, 2, 6])
    expected = rounding.round(unrounded.cache[written], jnp.asarray(written), cache_dtype, step=0)
    assert same_bits(rounded.cache[written], expected)
    assert not same_bits(rounded.cache[written], unrounded.cache[written].astype(cache_dtype))
    assert same_bits(rounded.cache[4], arguments["cache"][4])


@over_implementations
def test_no_sequence_has_a_state(implementation):
    """has_initial_state None: slots full of NaN are not read."""
    arguments = arguments_of(has_initial_state=None)
    arguments["cache"] = np.full_like(arguments["cache"], np.nan)
    result = prefill(implementation, **arguments)
    clean = arguments | {"cache": np.zeros_like(arguments["cache"])}
    expected = prefill(implementation, **clean)
    assert same_bits((result.y, result.cache[WRITTEN]), (expected.y, expected.cache[WRITTEN]))
    assert np.isfinite(result.cache[WRITTEN]).all()
    assert np.isnan(result.cache[UNTOUCHED]).all()


@over_implementations
@pytest.mark.parametrize("outside", [-1, -9, 7, 2**31 - 1])
def test_padding_sequences_touch_nothing(implementation, outside):
    """A sequence whose slot does not exist, NaN in its tokens: y is 0, nothing is written, others keep their bits."""
    arguments = arguments_of()
    arguments["cache"] = np.nan_to_num(arguments["cache"], nan=3.0)  # NaN written over NaN would not show
    alone = prefill(implementation, **arguments)
    padded = arguments | {"slots": jnp.asarray([5, 1, outside, 0], jnp.int32)}
    for name in ("x", "dt", "B", "C", "z"):
        padded[name] = padded[name].copy()
        padded[name][7:20] = np.nan
    result = prefill(implementation, **padded)
    assert not np.asarray(result.y[7:20]).any()
    others = np.r_[0:7, 20:59]
    assert same_bits(result.y[others], alone.y[others])
    assert same_bits(result.cache[np.array([0, 1, 5])], alone.cache[np.array([0, 1, 5])])
    assert same_bits(result.cache[np.array([2, 3, 4, 6])], arguments["cache"][np.array([2, 3, 4, 6])])


@over_implementations
def test_checkpoints_are_stored(implementation):
    """Only checkpoints with a slot and a position are written, wherever the position is."""
    positions = np.array([3, 25, -1, 30, 50, 2**31 - 1, 19], np.int32)
    slots = np.array([2, 6, 4, -1, 4, 4, 4], np.int32)
    keep = np.array([0, 1, 3, 6])
    arguments = arguments_of(checkpoint_positions=positions[keep], checkpoint_slots=slots[keep])
    expected = oracle(reference.prefill, **arguments)
    result = prefill(implementation, **arguments)
    check(result.cache, expected.cache, FLOAT32, "state")

    arguments |= {"checkpoint_positions": positions[:6], "checkpoint_slots": jnp.asarray(slots[:6])}
    result = prefill(implementation, **arguments)
    check(result.cache[np.array([2, 6])], expected.cache[np.array([2, 6])], FLOAT32, "state")
    assert same_bits(result.cache[4], arguments["cache"][4])


@over_implementations
def test_checkpoint_slots_outside_touch_nothing(implementation):
    arguments = arguments_of(
        checkpoint_positions=np.array([3, 25, 40], np.int32),
        checkpoint_slots=jnp.asarray([7, -3, 2**31 - 1], jnp.int32),
    )
    result = prefill(implementation, **arguments)
    assert same_bits(result.cache[UNTOUCHED], arguments["cache"][UNTOUCHED])


@over_implementations
def test_split_prompt_is_whole_prompt(implementation):
    """A prompt prefilled in two calls through its slot is the prompt prefilled in one."""
    case = dataclasses.replace(CASE, seqlens=(40,), padding=0)
    draw = case.arrays(FLOAT32) | case.options()
    cache = np.full((3, case.num_heads, case.headdim, case.dstate), np.nan, np.float32)
    common = {"slots": np.array([1], np.int32)}
    whole = prefill(implementation, cache=cache, **draw, **common, has_initial_state=np.array([False]))
    outputs, flag = [], False
    for rows in (slice(0, 13), slice(13, 40)):
        part = {name: draw[name][rows] for name in ("x", "dt", "B", "C", "z")}
        part["cu_seqlens"] = np.array([0, rows.stop - rows.start], np.int32)
        result = prefill(implementation, cache=cache, **draw | part, **common, has_initial_state=np.array([flag]))
        cache, flag = result.cache, True
        outputs.append(result.y)
    check(np.concatenate(outputs), whole.y, FLOAT32, "value")
    check(cache[1], whole.cache[1], FLOAT32, "state")


@over_implementations
def test_prefill_is_repeatable(implementation):
    arguments = arguments_of(BFLOAT16, FLOAT16)
    first = prefill(implementation, **arguments)
    for _ in range(3):
        assert same_bits(first, prefill(implementation, **arguments))


@over_implementations
def test_no_tokens(implementation):
    """Nothing to scan: a continued sequence keeps its state, a new one gets zeros."""
    case = dataclasses.replace(CASE, seqlens=(0, 0, 0, 0), padding=0)
    arguments = arguments_of(case=case)
    result = prefill(implementation, **arguments)
    assert result.y.shape == arguments["x"].shape
    assert same_bits(result.cache[np.array([0, 5])], arguments["cache"][np.array([0, 5])])
    assert not np.asarray(result.cache[np.array([1, 3])]).any()


@over_implementations
def test_decoding_goes_on_from_the_slot(implementation):
    """Prefill, then one update, is a scan of one more token."""
    case = dataclasses.replace(CASE, seqlens=(14,), padding=0)
    whole = case.arrays(FLOAT32) | case.options()
    expected = scan(implementation, **whole)
    part = {name: whole[name][:13] for name in ("x", "dt", "B", "C", "z")}
    last = {name: whole[name][13:] for name in ("x", "dt", "B", "C", "z")}
    cache = np.full((3, case.num_heads, case.headdim, case.dstate), np.nan, np.float32)
    filled = prefill(
        implementation,
        **whole | part | {"cu_seqlens": np.array([0, 13], np.int32), "cache": cache, "slots": np.array([2], np.int32)},
    )
    shared = {name: value for name, value in whole.items() if name not in ("cu_seqlens", "chunk_size", *last)}
    require(implementation, "selective_state_update", state=filled.cache, **last, **shared)
    result = jax_ssd.selective_state_update(
        filled.cache, **last, **shared, read_slots=np.array([2], np.int32), implementation=implementation
    )
    check(result.y, expected.y[13:], FLOAT32, "value")
    check(result.state[2], expected.final_states[0], FLOAT32, "state")


def test_a_gradient_of_prefill_is_the_scan_of_it_or_refused():
    """Where `prefill` is differentiable its gradient is the oracle's; where not, the error is clear."""
    arguments = arguments_of()

    def slope(function, given):
        return jax.jit(jax.grad(lambda x: jnp.sum(function(**given | {"x": x}).y ** 2)))(given["x"])

    try:
        found = slope(jax_ssd.prefill, arguments)
    except NotImplementedError as refusal:
        message = str(refusal)
        assert "derivative" in message or "differentiable" in message
        return
    with jax.enable_x64(True):
        expected = slope(reference.chunk_scan, widened(gathered(arguments)))
        check(found, expected, FLOAT32, "gradient")
