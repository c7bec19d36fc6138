"""`replay_update` against `selective_state_update`, across folds of the ring; rewind, materialize, reset, rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import ReplayCache, reference
from tests.cases import UpdateCase
from tests.harness import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    exact,
    oracle,
    over_implementations,
    require,
    same_bits,
    x64_for,
)
from tests.tolerances import check

RING = 8
SLOTS = np.array([4, 0, 2], np.int32)
TOKEN = UpdateCase("replayed", 4, 16, 2, 32, batch=3, slots=(4, 0, 2), dt_limit=(0.001, 0.4))
PLAIN = UpdateCase("exact", 4, 16, 2, 32, batch=3, slots=(4, 0, 2), D=None, z=False, dt_bias=False, dt_softplus=False)
KEYS = np.array([[123456789, 987654321]], np.uint32)


def drafts(num_tokens):
    return UpdateCase("drafted", 4, 16, 2, 32, batch=3, num_tokens=num_tokens, slots=(4, 0, 2))


def calls(case, count, dtype=FLOAT32):
    """The tokens of `count` calls in a row, and what the calls share."""
    sequence = []
    for seed in range(count):
        arguments = case.arrays(dtype, seed)
        sequence.append({name: arguments[name] for name in ("x", "dt", "B", "C", "z")})
    shared = {name: case.arrays(dtype)[name] for name in ("A", "D", "dt_bias")}
    return sequence, shared


def exact_calls(count):
    """Calls of one token whose states are exact in float32, and what they share."""
    made = [exact(PLAIN.arrays(FLOAT32, seed), seed) for seed in range(count)]
    return [{name: each[name] for name in ("x", "dt", "B", "C")} for each in made], {"A": made[0]["A"]}


def pool(dtype=FLOAT32):
    """Six slots; those that no row uses hold NaN."""
    state = np.random.default_rng(2).normal(size=(6, 4, 16, 32)).astype(np.float32)
    state[[1, 3, 5]] = np.nan
    return state.astype(dtype)


def new_cache(state, dtype=FLOAT32, ring_size=RING):
    return ReplayCache.from_state(jnp.asarray(state), ring_size=ring_size, num_groups=2, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("options", "implementation"))
def _replay(cache, tokens, shared, slots, rounding, options, implementation):
    return jax_ssd.replay_update(
        cache, **tokens, **shared, slots=slots, rounding=rounding, implementation=implementation, **dict(options)
    )


def replay(implementation, case, cache, tokens, shared, slots=SLOTS, rounding=None):
    options = tuple(sorted(case.options().items()))
    require(
        implementation,
        "replay_update",
        cache=cache,
        **tokens,
        **shared,
        slots=slots,
        rounding=rounding,
        **dict(options),
    )
    return _replay(cache, tokens, shared, jnp.asarray(slots), rounding, options, implementation)


def oracle_step(case, state, tokens, shared, slots=SLOTS):
    given = tokens | shared | case.options() | {"state": state, "read_slots": slots}
    return oracle(reference.selective_state_update, **given)


@over_implementations
@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16, FLOAT64), ids=lambda dtype: dtype.name)
def test_replay_is_update_token_by_token(implementation, dtype):
    """25 tokens through a ring of 8: every y, and the materialized state, also where the ring was just folded."""
    sequence, shared = calls(TOKEN, 25, dtype)
    with x64_for(dtype):
        state_dtype = FLOAT64 if dtype == FLOAT64 else FLOAT32
        cache, state = new_cache(pool(state_dtype), dtype), pool(state_dtype)
        for count, tokens in enumerate(sequence):
            result = replay(implementation, TOKEN, cache, tokens, shared)
            expected = oracle_step(TOKEN, state, tokens, shared)
            cache, state = result.cache, expected.state
            assert result.y.dtype == dtype
            check(result.y, expected.y, dtype, "value", name=f"y of call {count}")
            whole = jax_ssd.materialize(cache, shared["A"], slots=SLOTS)
            check(whole, state[SLOTS], dtype, "state", name=f"state after call {count}")
        assert same_bits(cache.state[np.array([1, 3, 5])], pool(state_dtype)[[1, 3, 5]])


@over_implementations
@pytest.mark.parametrize("num_tokens", [2, 3, 4])
def test_several_tokens_a_call(implementation, num_tokens):
    case = drafts(num_tokens)
    sequence, shared = calls(case, 7)
    cache, state = new_cache(pool()), pool()
    for tokens in sequence:
        result = replay(implementation, case, cache, tokens, shared)
        expected = oracle_step(case, state, tokens, shared)
        cache, state = result.cache, expected.state
        check(result.y, expected.y, FLOAT32, "value")
    check(jax_ssd.materialize(cache, shared["A"], slots=SLOTS), state[SLOTS], FLOAT32, "state")


@over_implementations
def test_rewind(implementation):
    """Each slot keeps another number of its drafts each time; what follows is as if the rest had never been."""
    case = drafts(3)
    sequence, shared = calls(case, 10)
    cache, state = new_cache(pool()), pool()
    draw = np.random.default_rng(0)
    for count, tokens in enumerate(sequence):
        result = replay(implementation, case, cache, tokens, shared)
        check(result.y, oracle_step(case, state, tokens, shared).y, FLOAT32, "value", name=f"y of call {count}")
        accepted = draw.integers(0, 4, 3).astype(np.int32)
        cache = jax_ssd.rewind(result.cache, SLOTS, accepted)
        for row, kept in enumerate(accepted):
            if kept:
                part = {name: value[row : row + 1, :kept] for name, value in tokens.items()}
                state = oracle_step(case, state, part, shared, SLOTS[row : row + 1]).state
        whole = jax_ssd.materialize(cache, shared["A"], slots=SLOTS)
        check(whole, state[SLOTS], FLOAT32, "state", name=f"state after call {count}")


@over_implementations
def test_rewind_touches_only_its_slots(implementation):
    case = drafts(3)
    sequence, shared = calls(case, 1)
    cache = replay(implementation, case, new_cache(pool()), sequence[0], shared).cache
    same = jax_ssd.rewind(cache, jnp.asarray([-1, 6, 2**31 - 1], jnp.int32), np.zeros(3, np.int32))
    assert same_bits(cache, same)
    less = jax_ssd.rewind(cache, np.array([0], np.int32), np.array([1], np.int32))
    before = jax_ssd.materialize(cache, shared["A"])
    after = jax_ssd.materialize(less, shared["A"])
    others = np.array([1, 2, 3, 4, 5])
    assert same_bits(before[others], after[others])
    assert not same_bits(before[0], after[0])
    whole = jax_ssd.rewind(cache, SLOTS, np.array([3, 3, 3], np.int32))
    assert same_bits(jax_ssd.materialize(whole, shared["A"]), before)


@over_implementations
def test_padding_rows_touch_nothing(implementation):
    """Slots that do not exist: y is 0 and no ring or state changes; NaN in the row's tokens does no harm."""
    sequence, shared = calls(TOKEN, 12)
    finite = np.nan_to_num(pool(), nan=3.0)  # NaN written over NaN would not show
    cache = alone = new_cache(finite)
    slots = jnp.asarray([4, -1, 2], jnp.int32)
    for count, tokens in enumerate(sequence):
        dirty = {name: value.copy() for name, value in tokens.items()}
        for value in dirty.values():
            value[1] = np.nan
        slots = slots.at[1].set([-1, 6, 2**31 - 1][count % 3])
        result = replay(implementation, TOKEN, cache, dirty, shared, slots)
        expected = replay(implementation, TOKEN, alone, tokens, shared)
        cache, alone = result.cache, expected.cache
        assert not np.asarray(result.y[1]).any()
        assert same_bits(result.y[np.array([0, 2])], expected.y[np.array([0, 2])])
    touched, others = np.array([4, 2]), np.array([0, 1, 3, 5])
    rows = lambda tree, index: jax.tree.map(lambda leaf: leaf[index], tree)  # noqa: E731
    assert same_bits(rows(cache, touched), rows(alone, touched))
    assert same_bits(rows(cache, others), rows(new_cache(finite), others))


@over_implementations
def test_reset_forgets_the_ring(implementation):
    """After a prefill wrote a slot, reset starts it from that state; other slots keep theirs."""
    sequence, shared = calls(TOKEN, 6)
    cache = new_cache(pool())
    for tokens in sequence[:5]:
        cache = replay(implementation, TOKEN, cache, tokens, shared).cache
    before = jax_ssd.materialize(cache, shared["A"])
    fresh = np.random.default_rng(8).normal(size=(4, 16, 32)).astype(np.float32)
    cache = cache._replace(state=cache.state.at[0].set(fresh))
    cache = jax_ssd.reset(cache, jnp.asarray([0, -1, 6], jnp.int32))
    after = jax_ssd.materialize(cache, shared["A"])
    assert same_bits(after[0], fresh)
    others = np.array([1, 2, 3, 4, 5])
    assert same_bits(after[others], before[others])
    state = np.asarray(before).copy()
    state[0] = fresh
    result = replay(implementation, TOKEN, cache, sequence[5], shared)
    check(result.y, oracle_step(TOKEN, state, sequence[5], shared).y, FLOAT32, "value")


@over_implementations
@pytest.mark.parametrize("state_dtype", (FLOAT16, BFLOAT16), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("rounded", [False, True], ids=["nearest", "stochastic"])
def test_fold_rounds_what_it_stores(implementation, state_dtype, rounded):
    """A narrow state changes only when the ring folds, then by one rounding of the float32 fold, Philox step 0."""
    sequence, shared = exact_calls(RING + 1)
    rounding = jax_ssd.StochasticRounding(jnp.asarray(KEYS)) if rounded else None
    start = exact({"state": pool(state_dtype)})["state"]
    narrow, wide = new_cache(start), new_cache(start.astype(np.float32))
    for tokens in sequence[:-1]:
        narrow = replay(implementation, PLAIN, narrow, tokens, shared, rounding=rounding).cache
        wide = replay(implementation, PLAIN, wide, tokens, shared).cache
        assert same_bits(narrow.state, start)
    narrow = replay(implementation, PLAIN, narrow, sequence[-1], shared, rounding=rounding).cache
    wide = replay(implementation, PLAIN, wide, sequence[-1], shared).cache
    folded = wide.state[SLOTS]
    expected = folded.astype(state_dtype)
    if rounding is not None:
        assert not same_bits(narrow.state[SLOTS], expected)
        expected = rounding.round(folded, jnp.asarray(SLOTS), state_dtype, step=0)
    assert same_bits(narrow.state[SLOTS], expected)
    assert same_bits(narrow.state[np.array([1, 3, 5])], start[[1, 3, 5]])


@over_implementations
def test_default_slots_and_materialize_everything(implementation):
    sequence, shared = calls(TOKEN, 2)
    state = np.random.default_rng(2).normal(size=(3, 4, 16, 32)).astype(np.float32)
    require(implementation, "replay_update", cache=new_cache(state), **sequence[0], **shared, **TOKEN.options())
    first = jax_ssd.replay_update(
        new_cache(state), **sequence[0], **shared, **TOKEN.options(), implementation=implementation
    )
    expected = oracle_step(TOKEN, state, sequence[0], shared, None)
    check(first.y, expected.y, FLOAT32, "value")
    check(jax_ssd.materialize(first.cache, shared["A"]), expected.state, FLOAT32, "state")
    chosen = jax_ssd.materialize(first.cache, shared["A"], slots=jnp.asarray([2, -1, 3, 0], jnp.int32))
    check(chosen[np.array([0, 3])], expected.state[np.array([2, 0])], FLOAT32, "state")
    assert not np.asarray(chosen[np.array([1, 2])]).any()


@over_implementations
def test_state_is_not_copied_between_folds(implementation):
    """Donated, the state pool is neither copied nor rewritten into new memory."""
    sequence, shared = calls(TOKEN, 1)
    state = np.zeros((512, 4, 16, 32), np.float32)
    cache = new_cache(state)
    require(implementation, "replay_update", cache=cache, **sequence[0], **shared, slots=SLOTS)

    def step(cache, tokens):
        return jax_ssd.replay_update(cache, **tokens, **shared, slots=jnp.asarray(SLOTS), implementation=implementation)

    memory = jax.jit(step, donate_argnums=0).lower(cache, sequence[0]).compile().memory_analysis()
    pools = sum(leaf.nbytes for leaf in cache)
    assert memory.alias_size_in_bytes >= pools
    assert memory.temp_size_in_bytes < pools / 10
