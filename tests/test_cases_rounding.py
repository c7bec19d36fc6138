"""Case C29: stale non-finite values must not poison a rounded state, and seeds must be renewed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import ReplayCache, SeedStream, StochasticRounding, TorchSeedStream
from jax_ssd.philox import round_stochastically
from tests.harness import over_implementations, prefill, same_bits, update

POOL = (1, 8, 64, 128)
SEEDS = np.array([[11, 12], [13, 14], [15, 16]], np.uint32)
EVERY_R = np.arange(2**13, dtype=np.uint32)
STREAMS = {
    "split": lambda: SeedStream(jax.random.key(3), 2),
    "identical": lambda: TorchSeedStream(3, 2),
    "one_draw": lambda: TorchSeedStream(3, 2, mode="one_draw"),
}
over_streams = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
# Grid spacing of the numbers just above 1.
SPACING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def add(state, addend, **options):
    """Arguments of an update whose float32 state is state + addend: decay exp(0) = 1, dt = 1, B = 1."""
    width, num_heads, headdim, dstate = state.shape
    return dict(
        state=state,
        x=np.broadcast_to(np.asarray(addend, np.float32), (width, num_heads, headdim)),
        dt=np.ones((width, num_heads), np.float32),
        A=np.zeros(num_heads, np.float32),
        B=np.ones((width, 1, dstate), np.float32),
        C=np.zeros((width, 1, dstate), np.float32),
        **options,
    )


def random_tokens(rng, *rows, num_heads=4, headdim=8, dstate=16):
    """x, dt, A, B, C of a packed prefill or of an update with these leading sizes."""
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    return dict(
        x=draw((*rows, num_heads, headdim)),
        dt=rng.uniform(0.1, 0.9, (*rows, num_heads)).astype(np.float32),
        A=-rng.uniform(0.1, 2.0, num_heads).astype(np.float32),
        B=draw((*rows, 2, dstate)),
        C=draw((*rows, 2, dstate)),
    )


@over_implementations
@pytest.mark.parametrize("dtype", SPACING)
def test_C29_a_a_quarter_is_rounded_up(implementation, dtype):
    state = np.ones(POOL, jnp.dtype(dtype))
    spacing = SPACING[dtype]
    for layer in range(3):
        rounding = StochasticRounding(SEEDS, layer)
        result = update(implementation, **add(state, spacing / 4, rounding=rounding)).state
        stored = np.asarray(result).astype(np.float64)
        assert set(np.unique(stored)) == {1.0, 1.0 + spacing}
        five_sigma = 5 * np.sqrt(0.25 * 0.75 / state.size)
        assert abs((stored > 1).mean() - 0.25) < five_sigma


@over_implementations
@pytest.mark.parametrize("dtype", SPACING)
def test_C29_b_exact_values_never_change(implementation, dtype):
    every = np.arange(2**16, dtype=np.uint16)
    infinity = np.array(np.inf, jnp.dtype(dtype)).view(np.uint16)
    # Not -0 (the update adds 0 to it), nor bfloat16 that is subnormal in float32, which CPUs flush to 0.
    smallest = np.array(2.0**-126 if dtype == "bfloat16" else 0.0, jnp.dtype(dtype)).view(np.uint16)
    magnitude = every & 0x7FFF
    kept = (magnitude < infinity) & (magnitude >= smallest) & (every != 0x8000)
    state = np.where(kept, every, 0).reshape(POOL).view(jnp.dtype(dtype))
    for layer in range(3):
        rounding = StochasticRounding(SEEDS, layer)
        result = update(implementation, **add(state, 0.0, rounding=rounding)).state
        np.testing.assert_array_equal(np.asarray(result).view(np.uint16), state.view(np.uint16))


@over_implementations
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_C29_c_specials_and_overflow(implementation, sign):
    # Columns of p: Inf, NaN and 65504 as they are, then 65504 + 16 = 65520 and 65504 + 32 = 65536.
    start = sign * np.array([np.inf, np.nan, 65504, 65504, 65504], np.float32)
    addend = sign * np.array([0, 0, 0, 16, 32], np.float32)
    state = np.broadcast_to(start[:, None], (1, 8, 5, 128)).astype(np.float16)
    result = update(implementation, **add(state, addend, rounding=StochasticRounding(SEEDS))).state
    infinite, nan, largest, between, above = np.moveaxis(np.asarray(result), 2, 0)
    assert (infinite == sign * np.inf).all()
    assert np.isnan(nan).all()
    assert (largest == sign * 65504).all()
    assert set(np.unique(between).tolist()) == {sign * 65504, sign * np.inf}
    assert (above == sign * np.inf).all()
    rounded = np.asarray(round_stochastically(np.float32(sign * 65520), EVERY_R, jnp.float16))
    assert (rounded == sign * np.inf).sum() == 4096
    assert (rounded == sign * 65504).sum() == 4096


def exact_tokens(rng, batch, num_heads=4, headdim=8, dstate=16):
    """Tokens that add multiples of 2^-16 to a state: exact in float32, whatever program computes it."""
    x = rng.integers(-127, 128, (batch, num_heads, headdim)).astype(np.float32)
    state = np.zeros((batch, num_heads, headdim, dstate), np.float16)
    return {name: array for name, array in add(state, x * np.float32(2.0**-16)).items() if name != "state"}


@jax.jit
def seeds_of(stream, step):
    return stream.seeds(step)


def run(stream, steps, state, tokens, implementation):
    """The pool after each step, layer 1 of the stream, in a Python loop."""
    pools = []
    for step in steps:
        rounding = StochasticRounding(seeds_of(stream, step), 1)
        state = update(implementation, state=state, rounding=rounding, **tokens).state
        pools.append(np.asarray(state))
    return np.stack(pools)


@over_implementations
@over_streams
def test_C29_d_equal_seeds_repeat_and_steps_differ(implementation, stream, rng):
    tokens = exact_tokens(rng, 2)
    start = rng.uniform(1.25, 1.75, (2, 4, 8, 16)).astype(np.float16)
    first = run(stream(), range(4), start, tokens, implementation)
    assert same_bits(run(stream(), range(4), start, tokens, implementation), first)

    @jax.jit
    def loop(stream, state, tokens):
        def body(state, step):
            rounding = StochasticRounding(stream.seeds(step), 1)
            state = jax_ssd.selective_state_update(
                state, rounding=rounding, implementation=implementation, **tokens
            ).state
            return state, state

        return jax.lax.scan(body, state, jnp.arange(4))[1]

    assert same_bits(np.asarray(loop(stream(), start, tokens)), first)
    assert same_bits(np.asarray(loop(stream(), start, tokens)), first)
    one_step = [run(stream(), [step], start, tokens, implementation).tobytes() for step in range(8)]
    assert len(set(one_step)) == 8


@over_implementations
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e4])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("flags", [None, [False, False]], ids=["none", "false"])
def test_C29_e_a_reused_slot_forgets_its_state(implementation, poison, dtype, flags, rng):
    tokens = random_tokens(rng, 7)
    options = dict(
        cu_seqlens=np.array([0, 3, 7], np.int32),
        slots=np.array([2, 0], np.int32),
        has_initial_state=None if flags is None else np.array(flags),
        rounding=StochasticRounding(SEEDS, 1),
        **tokens,
    )
    clean, stale = np.zeros((4, 4, 8, 16), dtype), np.zeros((4, 4, 8, 16), dtype)
    stale[[0, 2]] = poison
    fresh = prefill(implementation, cache=clean, **options)
    reused = prefill(implementation, cache=stale, **options)
    assert np.isfinite(np.asarray(reused.cache).astype(np.float32)).all()
    assert same_bits(reused, fresh)
    decode = random_tokens(rng, 2) | dict(read_slots=options["slots"], rounding=StochasticRounding(SEEDS, 2))
    assert same_bits(
        update(implementation, state=reused.cache, **decode),
        update(implementation, state=fresh.cache, **decode),
    )


@over_implementations
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_C29_e_a_slot_that_is_only_written_forgets_its_state(implementation, poison, rng):
    state = rng.standard_normal((4, 4, 8, 16)).astype(np.float16)
    stale = state.copy()
    stale[[1, 3]] = poison
    state[[1, 3]] = 0
    options = random_tokens(rng, 2) | dict(
        read_slots=np.array([0, 2], np.int32),
        write_slots=np.array([3, 1], np.int32),
        rounding=StochasticRounding(SEEDS),
    )
    reused = update(implementation, state=stale, **options)
    assert np.isfinite(np.asarray(reused.state)).all()
    assert same_bits(reused, update(implementation, state=state, **options))


def test_C29_e_a_reset_ring_forgets_its_tokens(rng):
    rounding = StochasticRounding(SEEDS)
    step = jax.jit(functools.partial(jax_ssd.replay_update, rounding=rounding))
    state = rng.standard_normal((2, 4, 8, 16)).astype(np.float16)
    empty = ReplayCache.from_state(jnp.asarray(state), ring_size=4, num_groups=2, dtype=jnp.float32)
    poisoned = random_tokens(rng, 2)
    poisoned["x"] = poisoned["x"] * np.float32(np.nan)
    used = step(empty, **poisoned).cache
    cache = jax_ssd.reset(used._replace(state=jnp.asarray(state)), np.arange(2, dtype=np.int32))
    for _ in range(6):
        tokens = random_tokens(rng, 2)
        (y, cache), (expected, empty) = step(cache, **tokens), step(empty, **tokens)
        assert same_bits(y, expected)
    assert same_bits(cache.state, empty.state)
    assert np.isfinite(np.asarray(cache.state)).all()
