"""One good call of every operation in every form, as keyword arguments that tests of bad input then spoil."""

import functools

import jax.numpy as jnp
import numpy as np

from jax_ssd import ReplayCache

T, H, P, G, N, W, S = 10, 4, 8, 2, 16, 6, 3
F = np.float32


def batched():
    return {
        "x": np.zeros((2, T, H, P), F),
        "dt": np.ones((2, T, H), F),
        "A": -np.ones(H, F),
        "B": np.zeros((2, T, G, N), F),
        "C": np.zeros((2, T, G, N), F),
        "D": np.ones(H, F),
        "z": np.zeros((2, T, H, P), F),
        "dt_bias": np.zeros(H, F),
        "initial_states": np.zeros((2, H, P, N), F),
        "seq_idx": np.zeros((2, T), np.int32),
    }


def packed():
    arguments = {
        name: value[0] if name in ("x", "dt", "B", "C", "z") else value
        for name, value in batched().items()
        if name != "seq_idx"
    }
    return arguments | {
        "initial_states": np.zeros((S, H, P, N), F),
        "cu_seqlens": np.array([0, 4, 4, 9], np.int32),
        "checkpoint_positions": np.array([1, 3], np.int32),
    }


def prefill():
    arguments = packed()
    del arguments["initial_states"]
    return arguments | {
        "cache": np.zeros((W, H, P, N), F),
        "slots": np.array([1, 0, -1], np.int32),
        "has_initial_state": np.array([True, False, True]),
        "checkpoint_slots": np.array([3, 4], np.int32),
    }


def tokens(several):
    lead = (3, 2) if several else (3,)
    return {
        "x": np.zeros((*lead, H, P), F),
        "dt": np.ones((*lead, H), F),
        "A": -np.ones(H, F),
        "B": np.zeros((*lead, G, N), F),
        "C": np.zeros((*lead, G, N), F),
        "D": np.ones(H, F),
        "z": np.zeros((*lead, H, P), F),
        "dt_bias": np.zeros(H, F),
    }


def update(several=False):
    return tokens(several) | {
        "state": np.zeros((W, H, P, N), F),
        "read_slots": np.array([0, 1, 2], np.int32),
        "write_slots": np.array([3, 4, 5], np.int32),
    }


def replay(several=False):
    cache = ReplayCache.from_state(jnp.zeros((W, H, P, N)), ring_size=4, num_groups=G, dtype=F)
    return tokens(several) | {"cache": cache, "slots": np.array([0, 1, 2], np.int32)}


CALLS = {
    "chunk_scan": {"batched": batched, "packed": packed},
    "prefill": {"packed": prefill},
    "selective_state_update": {"one": update, "several": functools.partial(update, True)},
    "replay_update": {"one": replay, "several": functools.partial(replay, True)},
}
