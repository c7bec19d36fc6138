"""`selective_state_update` against the oracle and against the scan: values, slots, rollback, padding and rounding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import reference
from tests.cases import BY_NAME, UPDATES
from tests.harness import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FULLY,
    call,
    exact,
    oracle,
    over_dtypes,
    over_implementations,
    require,
    same_bits,
    update,
    x64_for,
)
from tests.tolerances import HALF_ULP, check

TOKENS = next(case for case in UPDATES if case.name == "tokens")
TOKEN = next(case for case in UPDATES if case.name == "token")
KEYS = np.array([[123456789, 987654321], [5, 6], [7, 8]], np.uint32)
over_stored = pytest.mark.parametrize("state_dtype", (FLOAT16, BFLOAT16), ids=lambda dtype: dtype.name)


def arguments_of(case, dtype=FLOAT32, **changes):
    return case.arrays(dtype, **changes) | case.options()


def one_token(arguments, index):
    """The single-token arguments of token `index`."""
    return {
        name: value[:, index] if name in ("x", "dt", "B", "C", "z") and value is not None else value
        for name, value in arguments.items()
    }


def rows_of(case):
    return np.arange(case.batch) if case.slots is None else np.array(case.slots)


@over_implementations
@over_dtypes
@pytest.mark.parametrize("case", UPDATES, ids=lambda case: case.name)
def test_value_and_state(implementation, dtype, case):
    """y, the written slots, and every other slot (full of NaN) bit for bit as it was."""
    arguments = arguments_of(case, dtype, state_dtype=FLOAT64 if dtype == FLOAT64 else FLOAT32)
    with x64_for(dtype):
        result = update(implementation, **arguments)
        expected = oracle(reference.selective_state_update, **arguments)
        assert result.y.dtype == dtype and result.state.dtype == arguments["state"].dtype
        check(result.y, expected.y, dtype, "value", name="y")
        slots = rows_of(case)[rows_of(case) >= 0]
        check(result.state[slots], expected.state[slots], dtype, "state", name="state")
        others = np.setdiff1d(np.arange(case.num_slots), slots)
        assert same_bits(result.state[others], arguments["state"][others])


@over_implementations
@over_stored
@pytest.mark.parametrize("case", [TOKEN, TOKENS], ids=lambda case: case.name)
def test_stored_state_is_rounded_to_nearest(implementation, state_dtype, case):
    """The stored state is the float32 one rounded once, after all tokens; y is that of the float32 state."""
    arguments = exact(arguments_of(case, state_dtype=state_dtype))
    wide = arguments | {"state": arguments["state"].astype(np.float32)}
    stored, unrounded = update(implementation, **arguments), update(implementation, **wide)
    slots = rows_of(case)
    check(stored.y, unrounded.y, FLOAT32, "value")
    expected = unrounded.state[slots].astype(state_dtype)
    assert same_bits(stored.state[slots], expected)
    assert not same_bits(expected.astype(np.float32), unrounded.state[slots]), "nothing to round"


@over_implementations
@over_stored
@pytest.mark.parametrize("case", [TOKEN, TOKENS], ids=lambda case: case.name)
def test_rounding_is_applied_to_what_is_stored(implementation, state_dtype, case):
    """What is stored is `rounding.round` of the float32 state, for the slot written and the token's step."""
    arguments = exact(arguments_of(case, state_dtype=state_dtype))
    rounding = jax_ssd.StochasticRounding(jnp.asarray(KEYS), layer=2)
    each = {}
    if case.num_tokens is not None:
        arguments["state"] = np.concatenate([arguments["state"]] * 2)
        each = {"write_slots": np.array([[4, 6, 7, 8], [0, 9, 10, 11], [2, 3, 1, -1]], np.int32)}
    wide = arguments | {"state": arguments["state"].astype(np.float32)}
    rounded = update(implementation, **arguments, **each, rounding=rounding)
    unrounded = update(implementation, **wide, **each)
    check(rounded.y, unrounded.y, FLOAT32, "value")
    writes = each.get("write_slots", rows_of(case)[:, None])
    for step in range(writes.shape[1]):
        slots = writes[:, step][writes[:, step] >= 0]
        expected = rounding.round(unrounded.state[slots], jnp.asarray(slots), state_dtype, step=step)
        assert same_bits(rounded.state[slots], expected), f"step {step}"


@over_implementations
@pytest.mark.parametrize("dtype", (FLOAT32, FLOAT64), ids=lambda dtype: dtype.name)
def test_scan_is_updates_token_by_token(implementation, dtype):
    case = dataclasses.replace(BY_NAME["everything"], num_tokens=21)
    arguments = {name: value for name, value in (case.arrays(dtype) | case.options()).items() if name != "chunk_size"}
    with x64_for(dtype):
        expected = oracle(reference.chunk_scan, **arguments)
        state = arguments.pop("initial_states")
        for token in range(case.num_tokens):
            result = update(implementation, state=state, **one_token(arguments, token))
            state = result.state
            check(result.y, expected.y[:, token], dtype, "value", name=f"y of token {token}")
        check(state, expected.final_states, dtype, "state")


@over_implementations
@over_stored
def test_several_tokens_are_one_by_one_in_float32(implementation, state_dtype):
    """Several tokens in a call equal single calls on a float32 state; the narrow state is rounded at the end only."""
    arguments = arguments_of(TOKENS, state_dtype=state_dtype)
    together = update(implementation, **arguments)
    state = arguments["state"].astype(np.float32)
    for token in range(TOKENS.num_tokens):
        single = update(implementation, **one_token(arguments, token) | {"state": state})
        state = single.state
        check(together.y[:, token], single.y, FLOAT32, "value")
    slots = np.array(TOKENS.slots)
    difference = np.abs(np.asarray(together.state[slots], np.float64) - np.asarray(state[slots], np.float64))
    assert (difference <= 1.01 * HALF_ULP[state_dtype.name] * np.abs(state[slots]) + 2.0**-25).all()


@over_implementations
def test_state_after_each_token(implementation):
    """write_slots (b, t) stores every step where it is asked for, and only there."""
    arguments = arguments_of(dataclasses.replace(TOKENS, num_slots=14, slots=(4, 0, 2)))
    writes = np.array([[4, 5, 6, 7], [8, -1, 9, -2], [10, 11, 12, 2]], np.int32)
    result = update(implementation, **arguments, write_slots=writes)
    expected = oracle(reference.selective_state_update, **arguments, write_slots=writes)
    written = writes[writes >= 0]
    check(result.y, expected.y, FLOAT32, "value")
    check(result.state[written], expected.state[written], FLOAT32, "state")
    others = np.setdiff1d(np.arange(14), written)
    assert same_bits(result.state[others], arguments["state"][others])


@over_implementations
def test_state_after_the_last_token_elsewhere(implementation):
    """write_slots (b,) stores the last state; the slot read keeps its bits."""
    arguments = arguments_of(TOKENS)
    result = update(implementation, **arguments, write_slots=np.array([1, 3, -1], np.int32))
    expected = oracle(reference.selective_state_update, **arguments)
    check(result.y, expected.y, FLOAT32, "value")
    check(result.state[np.array([1, 3])], expected.state[np.array([4, 0])], FLOAT32, "state")
    others = np.array([0, 2, 4, 5])
    assert same_bits(result.state[others], arguments["state"][others])


@over_implementations
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_rollback(implementation, accepted):
    """Reading from write_slots[i, a - 1] goes on after `a` accepted tokens."""
    arguments = arguments_of(dataclasses.replace(TOKENS, num_slots=18))
    writes = np.arange(6, 18, dtype=np.int32).reshape(3, 4)
    drafted = update(implementation, **arguments, write_slots=writes)
    following = one_token(arguments, 0) | {"state": drafted.state, "read_slots": writes[:, accepted - 1]}
    result = update(implementation, **following)

    state = arguments["state"]
    for token in range(accepted):
        state = oracle(reference.selective_state_update, **one_token(arguments, token) | {"state": state}).state
    expected = oracle(reference.selective_state_update, **one_token(arguments, 0) | {"state": state})
    check(result.y, expected.y, FLOAT32, "value")
    check(result.state[writes[:, accepted - 1]], expected.state[np.array(TOKENS.slots)], FLOAT32, "state")


@over_implementations
@pytest.mark.parametrize("outside", [-1, -7, 6, 7, 2**31 - 1])
def test_slots_outside_touch_nothing(implementation, outside):
    """A row that reads a slot that does not exist: y is 0, the pool keeps its bits, the other rows their values."""
    arguments = arguments_of(TOKEN)
    arguments["state"] = np.nan_to_num(arguments["state"], nan=3.0)  # NaN written over NaN would not show
    alone = update(implementation, **arguments)
    slots = jnp.asarray([4, outside, 2], jnp.int32)
    padded = arguments | {"read_slots": slots}
    for name in ("x", "dt", "B", "C", "z"):
        padded[name] = padded[name].copy()
        padded[name][1] = np.nan
    result = update(implementation, **padded)
    assert not np.asarray(result.y[1]).any()
    assert same_bits(result.y[np.array([0, 2])], alone.y[np.array([0, 2])])
    assert same_bits(result.state[np.array([4, 2])], alone.state[np.array([4, 2])])
    others = np.array([0, 1, 3, 5])
    assert same_bits(result.state[others], arguments["state"][others])


@over_implementations
@pytest.mark.parametrize("outside", [-1, 6, 2**31 - 1])
@pytest.mark.parametrize("shape", ["last", "each"])
def test_writes_outside_are_not_stored(implementation, outside, shape):
    """A step whose slot does not exist is not stored; y of the row is right all the same."""
    arguments = arguments_of(TOKENS)
    writes = np.array([[1], [3], [outside]], np.int32)
    if shape == "each":
        writes = np.concatenate([np.full((3, 3), outside, np.int32), writes], axis=1)
    writes = writes[:, 0] if shape == "last" else writes
    expected = update(implementation, **arguments)
    result = update(implementation, **arguments, write_slots=jnp.asarray(writes))
    assert same_bits(result.y, expected.y)
    assert same_bits(result.state[np.array([1, 3])], expected.state[np.array([4, 0])])
    others = np.array([0, 2, 4, 5])
    assert same_bits(result.state[others], arguments["state"][others])


@over_implementations
def test_padding_row_with_slots_to_write(implementation):
    """A padding row touches nothing, whatever its write_slots say."""
    arguments = arguments_of(TOKENS) | {"read_slots": np.array([4, -1, 2], np.int32)}
    writes = jnp.asarray([4, 3, 2], jnp.int32)
    result = update(implementation, **arguments, write_slots=writes)
    assert not np.asarray(result.y[1]).any()
    assert same_bits(result.state[np.array([0, 1, 3, 5])], arguments["state"][np.array([0, 1, 3, 5])])


@over_implementations
def test_rows_are_alone(implementation):
    """A row has the same bits beside other rows, in another place, and when its neighbours are NaN."""
    arguments = arguments_of(TOKENS)
    order = np.array([2, 0, 1])
    shuffled = {
        name: value[order] if name in ("x", "dt", "B", "C", "z", "read_slots") else value
        for name, value in arguments.items()
    }
    shuffled["x"][1] = np.nan
    first, second = update(implementation, **arguments), update(implementation, **shuffled)
    assert same_bits(first.y[np.array([2, 1])], second.y[np.array([0, 2])])
    assert same_bits(first.state[np.array([2, 0])], second.state[np.array([2, 0])])


@over_implementations
def test_rows_may_share_a_slot_that_none_writes(implementation):
    """Two continuations of one state read the same slot and write different ones."""
    arguments = arguments_of(TOKEN) | {"read_slots": np.array([4, 4, 4], np.int32)}
    writes = np.array([0, 1, 2], np.int32)
    result = update(implementation, **arguments, write_slots=writes)
    expected = oracle(reference.selective_state_update, **arguments, write_slots=writes)
    check(result.y, expected.y, FLOAT32, "value")
    check(result.state[writes], expected.state[writes], FLOAT32, "state")


@over_implementations
def test_no_rows(implementation):
    case = dataclasses.replace(TOKEN, batch=0, slots=())
    arguments = arguments_of(case)
    result = update(implementation, **arguments)
    assert result.y.shape == (0, 4, 16)
    assert same_bits(result.state, arguments["state"])


@over_implementations
def test_repeatable_bit_for_bit(implementation):
    arguments = arguments_of(TOKENS, BFLOAT16, state_dtype=FLOAT16)
    rounding = jax_ssd.StochasticRounding(jnp.asarray(KEYS))
    first = update(implementation, **arguments, rounding=rounding)
    for _ in range(3):
        assert same_bits(first, update(implementation, **arguments, rounding=rounding))


@over_implementations
def test_layer_and_seeds_may_be_traced(implementation):
    """One compilation serves every layer and every seed, and each layer reads its own row."""
    arguments = arguments_of(TOKEN, state_dtype=FLOAT16)
    require(implementation, "selective_state_update", **arguments)

    traces = []

    @functools.partial(jax.jit, compiler_options=FULLY)
    def rounded(seeds, layer, arrays):
        traces.append(layer)
        rounding = jax_ssd.StochasticRounding(seeds, layer)
        return jax_ssd.selective_state_update(
            **arrays, **TOKEN.options(), rounding=rounding, implementation=implementation
        )

    arrays = TOKEN.arrays(FLOAT32, state_dtype=FLOAT16)
    results = [rounded(jnp.asarray(KEYS), jnp.int32(layer), arrays) for layer in range(3)]
    assert len(traces) == 1
    for layer, result in enumerate(results):
        row = jax_ssd.StochasticRounding(jnp.asarray(KEYS[layer : layer + 1]))
        alone = call(jax_ssd.selective_state_update, **arguments, rounding=row, implementation=implementation)
        assert same_bits(result, alone)
    assert not same_bits(results[0].state, results[1].state)
