"""The oracle itself: against the formula in NumPy, and differentiable under jit as well as outside."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import reference
from tests.cases import BY_NAME, UPDATES
from tests.harness import QUICKLY, oracle, widened
from tests.tolerances import check


def _numpy_scan(x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, np.inf), S=None):
    """The formula for one sequence, loops over tokens and heads, NumPy only."""
    num_tokens, num_heads, headdim = x.shape
    num_groups, dstate = B.shape[1:]
    S = np.zeros((num_heads, headdim, dstate)) if S is None else np.array(S)
    y = np.zeros(x.shape)
    for t in range(num_tokens):
        for i in range(num_heads):
            step = dt[t, i] + (0.0 if dt_bias is None else dt_bias[i])
            step = np.clip(np.logaddexp(step, 0.0) if dt_softplus else step, *dt_limit)
            group = i // (num_heads // num_groups)
            S[i] = np.exp(step * A[i]) * S[i] + step * np.outer(x[t, i], B[t, group])
            y[t, i] = S[i] @ C[t, group] + (0.0 if D is None else D[i]) * x[t, i]
            if z is not None:
                y[t, i] *= z[t, i] / (1.0 + np.exp(-z[t, i]))
    return y, S


def _solo(arguments, rows):
    """One sequence of a packed or batched call, as `_numpy_scan` takes it."""
    tokens = {name: arguments[name][rows] for name in ("x", "dt", "B", "C", "z") if name in arguments}
    shared = {name: arguments[name] for name in ("A", "D", "dt_bias", "dt_softplus", "dt_limit") if name in arguments}
    return tokens | shared


@pytest.mark.parametrize("name", ["everything", "channel_D"])
def test_batched(name):
    case = BY_NAME[name]
    arguments = widened(case.arrays(np.float64) | case.options())
    result = oracle(reference.chunk_scan, **arguments)
    for row in range(case.batch):
        start = arguments["initial_states"][row] if case.initial_states else None
        y, final = _numpy_scan(**_solo(arguments, row), S=start)
        check(result.y[row], y, np.float64, "value")
        check(result.final_states[row], final, np.float64, "state")


def test_packed_with_checkpoints():
    case = BY_NAME["packed"]
    arguments = widened(case.arrays(np.float64) | case.options())
    result = oracle(reference.chunk_scan, **arguments)
    ends = np.cumsum([0, *case.seqlens])
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        y, final = _numpy_scan(**_solo(arguments, slice(start, end)), S=arguments["initial_states"][i])
        check(result.y[start:end], y, np.float64, "value")
        check(result.final_states[i], final, np.float64, "state")
        for position, state in zip(case.checkpoints, result.checkpoint_states, strict=True):
            if start <= position < end:
                prefix = _solo(arguments, slice(start, position + 1))
                check(state, _numpy_scan(**prefix, S=arguments["initial_states"][i])[1], np.float64, "state")
            elif position < 0 or position >= ends[-1]:
                assert not state.any()
    assert not result.y[ends[-1] :].any()


def test_documents_are_separate_scans():
    case = BY_NAME["documents"]
    arguments = widened(case.arrays(np.float64) | case.options())
    result = oracle(reference.chunk_scan, **arguments)
    for row, lengths in enumerate(case.documents):
        start = 0
        for length in lengths:
            S = arguments["initial_states"][row] if start == 0 else None
            y, final = _numpy_scan(**_solo(arguments, (row, slice(start, start + length))), S=S)
            check(result.y[row, start : start + length], y, np.float64, "value")
            start += length
        check(result.final_states[row], final, np.float64, "state")


@pytest.mark.parametrize("case", UPDATES[:4], ids=lambda case: case.name)
def test_update_is_the_formula(case):
    arguments = widened(case.arrays(np.float64) | case.options())
    result = oracle(reference.selective_state_update, **arguments)
    slots = range(case.batch) if case.slots is None else case.slots
    for row, slot in enumerate(slots):
        if slot < 0:
            assert not result.y[row].any()
            continue
        rows = row if case.num_tokens else slice(row, row + 1)
        y, final = _numpy_scan(**_solo(arguments, rows), S=arguments["state"][slot])
        check(result.y[row], y if case.num_tokens else y[0], np.float64, "value")
        check(result.state[slot], final, np.float64, "state")
    untouched = sorted(set(range(case.num_slots)) - set(slots))
    np.testing.assert_array_equal(result.state[untouched], arguments["state"][untouched])


@pytest.mark.parametrize("name", ["everything", "documents", "packed"])
def test_gradient_is_the_slope(name):
    """Central differences along a random direction of every argument."""
    case = BY_NAME[name]
    arguments = widened(case.arrays(np.float64) | case.options())
    floats = {key: value for key, value in arguments.items() if getattr(value, "dtype", None) == np.float64}
    draw = np.random.default_rng(1)

    def loss(values):
        result = reference.chunk_scan(**(arguments | values))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(result))

    with jax.enable_x64(True):
        slopes = jax.jit(jax.grad(loss), compiler_options=QUICKLY)(floats)
        value_of = jax.jit(loss, compiler_options=QUICKLY)
        for key, value in floats.items():
            direction, step = draw.normal(size=value.shape), 1e-6
            up, down = (value_of(floats | {key: value + sign * step * direction}) for sign in (1, -1))
            found, expected = float(jnp.sum(slopes[key] * direction)), float(up - down) / (2 * step)
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), key


def test_clip_counts_its_bounds_as_inside():
    with jax.enable_x64(True):

        def loss(dt):
            one = jnp.ones((1, 3, 1, 1))
            return reference.chunk_scan(one, dt, -jnp.ones(1), one, one, dt_limit=(0.1, 0.5)).y.sum()

        slope = np.asarray(jax.grad(loss)(jnp.array([[[0.1], [0.5], [0.6]]])))
    assert slope[0, 0, 0] != 0.0
    assert slope[0, 1, 0] != 0.0
    assert slope[0, 2, 0] == 0.0
