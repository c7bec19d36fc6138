"""Memory of compiled programs, from the compiler's own analysis: linear scans, caches updated in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from tests.harness import FLOAT16, FLOAT32, over_implementations, require

HEADS, HEADDIM, DSTATE, GROUPS = 32, 64, 128, 2


def scan_shapes(num_tokens, heads=HEADS):
    """The arrays of a scan, not allocated."""
    shapes = {
        "x": (1, num_tokens, heads, HEADDIM),
        "dt": (1, num_tokens, heads),
        "A": (heads,),
        "B": (1, num_tokens, GROUPS, DSTATE),
        "C": (1, num_tokens, GROUPS, DSTATE),
    }
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def forward(arrays, implementation):
    return jax_ssd.chunk_scan(**arrays, implementation=implementation)


def forward_and_backward(arrays, cotangents, implementation):
    result, pull = jax.vjp(functools.partial(forward, implementation=implementation), arrays)
    return result, pull(cotangents)


def analysis(function, *given):
    return jax.jit(function).lower(*given).compile().memory_analysis()


def both_analyses(implementation, num_tokens, heads=HEADS):
    arrays = scan_shapes(num_tokens, heads)
    require(implementation, "chunk_scan", **arrays)
    cotangents = jax.eval_shape(functools.partial(forward, implementation=implementation), arrays)
    return (
        analysis(functools.partial(forward, implementation=implementation), arrays),
        analysis(functools.partial(forward_and_backward, implementation=implementation), arrays, cotangents),
    )


@over_implementations
def test_peak_at_65536_tokens(implementation):
    """Forward, and forward with backward, each stay below 6 times the forward call's inputs plus outputs."""
    alone, both = both_analyses(implementation, 65536)
    inputs_and_outputs = alone.argument_size_in_bytes + alone.output_size_in_bytes
    for memory in (alone, both):
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert peak < 6 * inputs_and_outputs, f"{peak / inputs_and_outputs:.2f}"


@over_implementations
def test_temporaries_grow_linearly(implementation):
    """Four times the tokens take at most four times the temporaries and a constant, forward and backward."""
    small = both_analyses(implementation, 4096, heads=8)
    large = both_analyses(implementation, 16384, heads=8)
    constant = 2**24
    for few, many in zip(small, large, strict=True):
        assert many.temp_size_in_bytes <= 4 * few.temp_size_in_bytes + constant


POOL = (2048, 4, 64, 128)


def pool_bytes(dtype):
    return int(np.prod(POOL)) * np.dtype(dtype).itemsize


def assert_in_place(memory, dtype):
    """The pool's memory is the result's, and what else is needed is far smaller."""
    assert memory.alias_size_in_bytes >= pool_bytes(dtype)
    assert memory.temp_size_in_bytes < pool_bytes(dtype) / 10


@over_implementations
@pytest.mark.parametrize("dtype", (FLOAT16, FLOAT32), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("rounded", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("num_tokens", [None, 3])
def test_update_of_a_donated_pool_is_in_place(implementation, dtype, rounded, num_tokens):
    if rounded and dtype == FLOAT32:
        pytest.skip("a float32 state is not rounded")
    lead = (4,) if num_tokens is None else (4, num_tokens)
    arrays = {
        "x": np.zeros((*lead, 4, 64), np.float32),
        "dt": np.zeros((*lead, 4), np.float32),
        "A": np.zeros(4, np.float32),
        "B": np.zeros((*lead, 1, 128), np.float32),
        "C": np.zeros((*lead, 1, 128), np.float32),
        "read_slots": np.arange(4, dtype=np.int32),
    }
    if num_tokens:
        arrays["write_slots"] = np.arange(4, 16, dtype=np.int32).reshape(4, 3)
    state = jax.ShapeDtypeStruct(POOL, dtype)
    require(implementation, "selective_state_update", state=state, **arrays)

    def step(state, seeds, arrays):
        rounding = jax_ssd.StochasticRounding(seeds) if rounded else None
        return jax_ssd.selective_state_update(state, **arrays, rounding=rounding, implementation=implementation)

    compiled = jax.jit(step, donate_argnums=0).lower(state, np.zeros((1, 2), np.uint32), arrays).compile()
    assert_in_place(compiled.memory_analysis(), dtype)


@over_implementations
@pytest.mark.parametrize("dtype", (FLOAT16, FLOAT32), ids=lambda dtype: dtype.name)
def test_prefill_of_a_donated_pool_is_in_place(implementation, dtype):
    arrays = {
        "x": np.zeros((32, 4, 64), np.float32),
        "dt": np.zeros((32, 4), np.float32),
        "A": np.zeros(4, np.float32),
        "B": np.zeros((32, 1, 128), np.float32),
        "C": np.zeros((32, 1, 128), np.float32),
        "cu_seqlens": np.array([0, 20, 32], np.int32),
        "slots": np.array([3, 5], np.int32),
        "has_initial_state": np.array([True, False]),
        "checkpoint_positions": np.array([7], np.int32),
        "checkpoint_slots": np.array([9], np.int32),
    }
    cache = jax.ShapeDtypeStruct(POOL, dtype)
    require(implementation, "prefill", cache=cache, **arrays)

    def step(cache, arrays):
        return jax_ssd.prefill(cache, **arrays, implementation=implementation)

    compiled = jax.jit(step, donate_argnums=0).lower(cache, arrays).compile()
    assert_in_place(compiled.memory_analysis(), dtype)


@over_implementations
def test_a_decoding_loop_copies_no_pool(implementation):
    """Many steps in one jitted loop, the pool carried: still in place."""
    token = {
        "x": np.zeros((4, 4, 64), np.float32),
        "dt": np.zeros((4, 4), np.float32),
        "A": np.zeros(4, np.float32),
        "B": np.zeros((4, 1, 128), np.float32),
        "C": np.zeros((4, 1, 128), np.float32),
    }
    require(implementation, "selective_state_update", state=jax.ShapeDtypeStruct(POOL, FLOAT16), **token)

    def loop(state, token):
        def step(state, _):
            result = jax_ssd.selective_state_update(state, **token, implementation=implementation)
            return result.state, result.y

        return jax.lax.scan(step, state, length=8)

    compiled = jax.jit(loop, donate_argnums=0).lower(jax.ShapeDtypeStruct(POOL, FLOAT16), token).compile()
    assert_in_place(compiled.memory_analysis(), FLOAT16)
