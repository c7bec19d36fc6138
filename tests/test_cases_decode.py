"""Cases C27 and C28: padding slots and rollback in decode, each with its right value."""

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from tests.harness import FLOAT32, over_implementations, require, same_bits, update
from tests.scalars import over_sizes
from tests.tolerances import check

HALF = np.log(0.5)


def token_problem(rows, sizes, num_tokens=None):
    """Rows whose every head and channel is S = 0.5 S + 1, y = S, in column 0 of the state."""
    h, p, g, n = sizes.values()
    lead = (rows,) if num_tokens is None else (rows, num_tokens)
    first = np.zeros((*lead, g, n), np.float32)
    first[..., 0] = 1.0
    return {
        "x": np.ones((*lead, h, p), np.float32),
        "dt": np.ones((*lead, h), np.float32),
        "A": np.full(h, HALF, np.float32),
        "B": first,
        "C": first,
    }


def pool(values, sizes):
    h, p, _, n = sizes.values()
    state = np.zeros((len(values), h, p, n), np.float32)
    state[..., 0] = np.asarray(values, np.float32)[:, None, None]
    return state


def check_values(array, expected):
    """Every head and channel holds the scalar of its row; `array` is y, or column 0 of a state."""
    array = np.asarray(array, np.float64)
    expected = np.asarray(expected, np.float64)
    check(array, np.broadcast_to(expected[..., None, None], array.shape), FLOAT32, "value")


@over_implementations
@over_sizes
def test_C27_padding_is_not_the_last_row(implementation, sizes):
    arguments = token_problem(2, sizes) | {"state": pool([1.0, 2.0, 3.0], sizes)}
    result = update(implementation, **arguments, read_slots=np.array([0, -1], np.int32))
    check_values(result.state[..., 0], [1.5, 2.0, 3.0])
    assert same_bits(result.state[np.array([1, 2])], arguments["state"][1:])
    check_values(result.y, [1.5, 0.0])


@over_implementations
@over_sizes
def test_C27_a_slot_out_of_range(implementation, sizes):
    """Refused where the host has it; on a device a padding row."""
    arguments = token_problem(2, sizes) | {"state": pool([1.0, 2.0, 3.0], sizes)}
    slots = np.array([0, 7], np.int32)
    require(implementation, "selective_state_update", **arguments, read_slots=jnp.asarray(slots))
    with pytest.raises(ValueError, match=r"read_slots.*7"):
        jax_ssd.selective_state_update(**arguments, read_slots=slots, implementation=implementation)
    eager = jax_ssd.selective_state_update(**arguments, read_slots=jnp.asarray(slots), implementation=implementation)
    for result in (eager, update(implementation, **arguments, read_slots=jnp.asarray(slots))):
        check_values(result.state[..., 0], [1.5, 2.0, 3.0])
        assert same_bits(result.state[np.array([1, 2])], arguments["state"][1:])
        check_values(result.y, [1.5, 0.0])


@over_implementations
@over_sizes
def test_C28_a_step_after_accepted_drafts(implementation, sizes):
    arguments = token_problem(1, sizes, 4) | {"state": pool([0.0] * 6, sizes)}
    writes = np.array([[2, 3, 4, 5]], np.int32)
    drafted = update(implementation, **arguments, read_slots=np.array([0], np.int32), write_slots=writes)
    check_values(drafted.state[2:, ..., 0], [1.0, 1.5, 1.75, 1.875])
    check_values(drafted.y[0], [1.0, 1.5, 1.75, 1.875])
    plain = token_problem(1, sizes) | {"state": drafted.state}
    result = update(implementation, **plain, read_slots=writes[:, 1])
    check_values(result.y, [1.75])
    check_values(result.state[3:4, ..., 0], [1.75])


@over_implementations
@over_sizes
def test_C28_the_same_through_a_ring(implementation, sizes):
    cache = jax_ssd.ReplayCache.from_state(
        jnp.asarray(pool([0.0], sizes)), ring_size=8, num_groups=sizes["num_groups"], dtype=FLOAT32
    )
    arguments = token_problem(1, sizes, 4)
    require(implementation, "replay_update", cache=cache, **arguments)
    drafted = jax_ssd.replay_update(cache, **arguments, implementation=implementation)
    check_values(drafted.y[0], [1.0, 1.5, 1.75, 1.875])
    cache = jax_ssd.rewind(drafted.cache, np.array([0], np.int32), np.array([2], np.int32))
    result = jax_ssd.replay_update(cache, **token_problem(1, sizes), implementation=implementation)
    check_values(result.y, [1.75])
    check_values(jax_ssd.materialize(result.cache, arguments["A"])[..., 0], [1.75])
