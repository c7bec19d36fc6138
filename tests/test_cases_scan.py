"""Cases C01 to C16 that a CPU can run: failures that users of other scans met, each with its right value.

Rows give scalars; `sizes` runs them as such and broadcast to a real shape, where B and C are 1 in their first column
only, so that every head and channel repeats the scalar problem.
"""

import dataclasses
import hashlib
import itertools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import DeviceInfo, reference
from tests.cases import BY_NAME, ScanCase
from tests.harness import (
    BFLOAT16,
    FLOAT32,
    gradients,
    oracle,
    oracle_gradients,
    over_implementations,
    random_cotangents,
    require,
    same_bits,
    scan,
    update,
)
from tests.scalars import SCALAR, check_state, check_y, over_sizes, packed, scalar_problem, slopes_of, sum_y
from tests.tolerances import check

over_wide_dtypes = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=lambda dtype: dtype.name)


@over_implementations
@over_sizes
@over_wide_dtypes
@pytest.mark.parametrize(("num_tokens", "slope"), [(8, 7.877464e-7), (64, 7.089718e-6)])
def test_C01_no_overflow_in_the_masked_triangle(implementation, sizes, dtype, num_tokens, slope):
    arguments = scalar_problem(num_tokens, -16.0, sizes, dtype=dtype, chunk_size=num_tokens)
    result = scan(implementation, **arguments)
    check_y(result, [1.0, 1.0000001125], dtype, at=np.array([0, 7]))
    check_state(result, 1.0000001125, dtype)
    found = slopes_of(implementation, sum_y, arguments)
    check(found["A"], np.full(sizes["num_heads"], slope), dtype, "gradient")
    check(found["dt"][0, 3], np.full(sizes["num_heads"], 0.99999831), dtype, "gradient")
    assert all(np.isfinite(np.asarray(value, np.float32)).all() for value in found.values())


@over_implementations
@over_wide_dtypes
def test_C01_with_every_option(implementation, dtype):
    """Again with D, z and an initial state: nothing overflows in any gradient."""
    case = ScanCase("C01", 2, 64, 1, 128, num_tokens=64, chunk_size=64, D="head", z=True, initial_states=True)
    arguments = case.arrays(dtype) | {"A": np.full(2, -16.0, np.float32), "chunk_size": 64}
    arguments["dt"] = np.ones_like(arguments["dt"])
    require(implementation, "chunk_scan", **arguments)
    cotangents = random_cotangents(jax_ssd.chunk_scan, 0, **arguments)
    _, found = gradients(jax_ssd.chunk_scan, cotangents, implementation=implementation, **arguments)
    _, expected = oracle_gradients(reference.chunk_scan, cotangents, **arguments)
    for name, slope in found.items():
        assert np.isfinite(np.asarray(slope, np.float32)).all(), name
        check(slope, expected[name], dtype, "gradient", decay=16.0 * 64, name=name)


@over_implementations
@over_sizes
@pytest.mark.parametrize("chunk_size", [64, 128, 256, 100])
def test_C02_initial_state_decays_by_its_own_row(implementation, sizes, chunk_size):
    arguments = scalar_problem(300, -0.02, sizes, x=0.0, S0=1.0, chunk_size=chunk_size)
    at = np.array([0, 63, 64, 127, 128, 255, 256, 299])
    expected = [0.980199, 0.278037, 0.272532, 0.077305, 0.075774, 0.00597602, 0.00585769, 0.00247875]
    result = scan(implementation, **arguments)
    check_y(result, expected, at=at)
    check_state(result, 0.00247875)
    np.testing.assert_allclose(expected, np.exp(-0.02 * (at + 1.0)), rtol=1e-5)


@over_implementations
@over_sizes
def test_C02_one_chunk(implementation, sizes):
    arguments = scalar_problem(128, -0.02, sizes, x=0.0, S0=1.0, chunk_size=128)
    check_y(scan(implementation, **arguments), [0.980199, 0.278037, 0.272532, 0.077305], at=np.array([0, 63, 64, 127]))


@over_implementations
@over_sizes
def test_C03_initial_state_of_a_single_row(implementation, sizes):
    arguments = scalar_problem(4, -0.5, sizes, x=0.0, S0=2.0)
    for given in (arguments, packed(arguments, 4)):
        result = scan(implementation, **given)
        check_y(result, [1.213061, 0.735759, 0.446260, 0.270671])
        check_state(result, 2.0 * math.exp(-2.0))


@over_implementations
@pytest.mark.parametrize(
    "option", ["D", "z", "dt_bias", "dt_softplus", "dt_limit", "seq_idx", "chunk_size", "state_dtype"]
)
def test_C03_no_option_ignores_a_given_state(implementation, option):
    """With every option alone: other initial states give other results."""
    arguments = scalar_problem(4, -0.5, SCALAR, x=0.0, S0=2.0)
    value = {
        "D": np.ones(1, np.float32),
        "z": np.ones((1, 4, 1, 1), np.float32),
        "dt_bias": np.zeros(1, np.float32),
        "dt_softplus": True,
        "dt_limit": (0.0, 2.0),
        "seq_idx": np.zeros((1, 4), np.int32),
        "chunk_size": 2,
        "state_dtype": FLOAT32,
    }[option]
    given = scan(implementation, **arguments, **{option: value})
    without = scan(implementation, **arguments | {"initial_states": None}, **{option: value})
    assert np.asarray(given.y).all() and np.asarray(given.final_states).all()
    assert not np.asarray(without.y).any() and not np.asarray(without.final_states).any()


@over_implementations
@over_sizes
@pytest.mark.parametrize("chunk_size", [8, 5, 32])
def test_C04_states_cross_chunks(implementation, sizes, chunk_size):
    arguments = scalar_problem(32, -0.05, sizes, x=np.eye(32)[0], chunk_size=chunk_size)
    result = scan(implementation, **arguments)
    check_y(result, np.exp(-0.05 * np.arange(32)))
    np.testing.assert_allclose(np.exp(-0.05 * np.array([8, 31])), [0.670320, 0.212248], rtol=1e-6)
    check_state(result, math.exp(-0.05 * 31))


@over_implementations
@pytest.mark.parametrize("headdim", [1, 64])
def test_C05_heads_read_their_own_group(implementation, headdim):
    ones = np.ones((1, 1, 4, headdim), np.float32)
    B = np.array([[1.0, 0.0], [0.0, 0.0]], np.float32)[None, None]
    arguments = {
        "x": ones,
        "dt": np.ones((1, 1, 4), np.float32),
        "A": -np.ones(4, np.float32),
        "B": B,
        "C": np.ones((1, 1, 2, 2), np.float32),
    }
    result = scan(implementation, **arguments)
    np.testing.assert_array_equal(result.y[0, 0, :, 0], [1.0, 1.0, 0.0, 0.0])
    found = slopes_of(implementation, sum_y, arguments)
    np.testing.assert_array_equal(found["B"][0, 0], [[2.0, 2.0], [2.0, 2.0]])
    np.testing.assert_array_equal(found["C"][0, 0], [[2.0, 0.0], [0.0, 0.0]])


@over_implementations
@over_sizes
@pytest.mark.parametrize(
    ("bias", "A", "state", "slope"), [(5.0, -1.0, 5.0404503, 0.966265), (0.0, -0.01, 6.068709, 4.257676)]
)
def test_C06_rows_past_the_end_do_not_exist(implementation, sizes, bias, A, state, slope):
    """9 tokens in a chunk of 16: bias and softplus make dt positive in rows that are not there."""
    heads = sizes["num_heads"]
    arguments = scalar_problem(9, A, sizes, dt=0.0, chunk_size=16, dt_softplus=True)
    arguments["dt_bias"] = np.full(heads, bias, np.float32)
    for given in (arguments, packed(arguments, 9)):
        check_state(scan(implementation, **given), state)
        found = slopes_of(implementation, lambda result: jnp.sum(result.final_states[..., 0, 0]), given)
        check(found["dt_bias"], np.full(heads, slope), FLOAT32, "gradient")


@over_implementations
@over_sizes
@over_wide_dtypes
@pytest.mark.parametrize(("raw", "expected"), [(100.0, 100.0), (1000.0, 1000.0), (-100.0, 0.0)])
def test_C07_softplus_of_large_arguments(implementation, sizes, dtype, raw, expected):
    arguments = scalar_problem(2, -1.0, sizes, dt=raw, dtype=dtype, dt_softplus=True)
    y = np.asarray(scan(implementation, **arguments).y, np.float32)
    np.testing.assert_allclose(y, expected, rtol=1e-2 if dtype == BFLOAT16 else 1e-6, atol=1e-42)
    shape = (1, sizes["num_heads"], sizes["headdim"], sizes["dstate"])
    state = np.zeros(shape, np.float32)
    for token in range(2):
        given = {name: arguments[name][:, token] for name in ("x", "dt", "B", "C")}
        result = update(implementation, state=state, A=arguments["A"], dt_softplus=True, **given)
        state = result.state
        np.testing.assert_array_equal(np.asarray(result.y, np.float32), y[:, token])


@over_implementations
@over_sizes
@pytest.mark.parametrize(
    ("limit", "expected"),
    [((0.0, math.inf), [1e-5, 0.0500095, 3.00249]), ((0.001, 0.1), [0.001, 0.0509512, 0.146103])],
)
def test_C08_dt_limit(implementation, sizes, limit, expected):
    arguments = scalar_problem(3, -1.0, sizes, dt=[1e-5, 0.05, 3.0])
    check_y(scan(implementation, **arguments, dt_limit=limit), expected)
    state = np.zeros((1, sizes["num_heads"], sizes["headdim"], sizes["dstate"]), np.float32)
    for token in range(3):
        given = {name: arguments[name][:, token] for name in ("x", "dt", "B", "C")}
        result = update(implementation, state=state, A=arguments["A"], dt_limit=limit, **given)
        state = result.state
        check(result.y, np.full(result.y.shape, expected[token]), FLOAT32, "value")


@over_implementations
def test_C08_bias_then_softplus_then_clip(implementation):
    """Order matters: dt = clip(softplus(-1 + 1), 0.5, 0.6) = 0.6, and in any other order something else."""
    arguments = scalar_problem(1, -1.0, SCALAR, dt=-1.0, dt_softplus=True, dt_limit=(0.5, 0.6))
    arguments["dt_bias"] = np.ones(1, np.float32)
    check_y(scan(implementation, **arguments), [0.6])
    given = {name: arguments[name][:, 0] for name in ("x", "dt", "B", "C")}
    shared = {name: arguments[name] for name in ("A", "dt_bias", "dt_softplus", "dt_limit")}
    result = update(implementation, state=np.zeros((1, 1, 1, 1), np.float32), **given, **shared)
    check(result.y, np.full((1, 1, 1), 0.6), FLOAT32, "value")


@over_implementations
@pytest.mark.parametrize(("chunk_size", "dstate", "headdim"), [(128, 64, 32), (64, 128, 64), (16, 256, 64)])
@pytest.mark.parametrize("heads_per_group", [1, 2, 5])
def test_C09_sizes_that_all_differ(implementation, chunk_size, dstate, headdim, heads_per_group):
    case = ScanCase(
        f"C09_{chunk_size}_{heads_per_group}",
        2 * heads_per_group,
        headdim,
        2,
        dstate,
        seqlens=(chunk_size + 3, 20),
        z=True,
        chunk_size=chunk_size,
    )
    arguments = case.arrays(FLOAT32) | case.options()
    result, expected = scan(implementation, **arguments), oracle(reference.chunk_scan, **arguments)
    check(result.y, expected.y, FLOAT32, "value", decay=case.decay())
    check(result.final_states, expected.final_states, FLOAT32, "state", decay=case.decay())


@over_implementations
@over_sizes
def test_C10_final_state_carries_gradients(implementation, sizes):
    """d(sum(y) + 3 final)/dS0, packed and batched; a loss on the final state alone; one gradient a sequence."""
    arguments = scalar_problem(4, -0.5, sizes, x=0.0, S0=2.0)

    def loss(result):
        return sum_y(result) + 3.0 * jnp.sum(result.final_states[..., 0, 0])

    def final_only(result):
        return jnp.sum(result.final_states[..., 0, 0] * jnp.arange(1.0, result.final_states.shape[0] + 1)[:, None])

    for given in (arguments, packed(arguments, 4)):
        slope = slopes_of(implementation, loss, given)["initial_states"]
        check(slope[..., 0, 0], np.full(slope.shape[:2], 1.7388814), FLOAT32, "gradient")
    two = packed(arguments, 1, 3) | {"initial_states": np.concatenate([arguments["initial_states"]] * 2)}
    slope = slopes_of(implementation, final_only, two)["initial_states"]
    expected = np.exp([-0.5, -1.5])[:, None] * np.array([1.0, 2.0])[:, None]
    check(slope[..., 0, 0], np.broadcast_to(expected, slope.shape[:2]), FLOAT32, "gradient")


@over_implementations
@pytest.mark.parametrize("chunks", [3, 4, 5])
def test_C12_more_than_two_chunks(implementation, chunks):
    case = ScanCase(f"C12_{chunks}", 2, 64, 1, 64, num_tokens=8 * chunks, chunk_size=8)
    arguments = case.arrays(FLOAT32) | case.options()
    result, expected = scan(implementation, **arguments), oracle(reference.chunk_scan, **arguments)
    assert np.isfinite(result.y).all()
    check(result.y, expected.y, FLOAT32, "value")
    check(result.final_states, expected.final_states, FLOAT32, "state")


OPTIONS = ("D", "z", "dt_bias", "initial_states", "seq_idx")


@over_implementations
@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=5)), ids=str)
def test_C13_every_combination_has_every_gradient(implementation, present):
    case = dataclasses.replace(BY_NAME["documents"], headdim=8, dstate=8, num_tokens=20, documents=((7, 13), (20,)))
    arguments = case.arrays(FLOAT32) | case.options()
    for name, given in zip(OPTIONS, present, strict=True):
        if not given:
            del arguments[name]
    require(implementation, "chunk_scan", **arguments)
    cotangents = random_cotangents(jax_ssd.chunk_scan, 0, **arguments)
    _, found = gradients(jax_ssd.chunk_scan, cotangents, implementation=implementation, **arguments)
    _, expected = oracle_gradients(reference.chunk_scan, cotangents, **arguments)
    wanted = {"x", "dt", "A", "B", "C"} | {name for name, given in zip(OPTIONS[:4], present, strict=False) if given}
    assert set(found) == wanted
    for name, slope in found.items():
        assert slope.shape == arguments[name].shape and slope.dtype == arguments[name].dtype
        check(slope, expected[name], FLOAT32, "gradient", name=name)


def repeated_gradients(implementation):
    """Results and gradients of one call with a random cotangent."""
    arguments = BY_NAME["documents"].arrays(BFLOAT16) | BY_NAME["documents"].options()
    require(implementation, "chunk_scan", **arguments)
    arguments["implementation"] = implementation
    cotangents = random_cotangents(jax_ssd.chunk_scan, 11, **arguments)
    return gradients(jax_ssd.chunk_scan, cotangents, quick=False, **arguments)


def gradient_digest(implementation):
    """A hash of every bit of `repeated_gradients`."""
    leaves = jax.tree.leaves(repeated_gradients(implementation))
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


@over_implementations
def test_C14_gradients_repeat(implementation):
    """20 repeats with a random cotangent, half of them with the other calls' memory in between."""
    first = repeated_gradients(implementation)
    for _ in range(20):
        assert same_bits(first, repeated_gradients(implementation))


@over_implementations
def test_C14_a_second_process_gives_the_same_gradients(implementation):
    expected = gradient_digest(implementation)
    program = f"from tests import conftest, test_cases_scan as t; print(t.gradient_digest({implementation!r}))"
    second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert second.stdout.split()[-1] == expected


SHAPES = {
    "nemotron_8b": (128, 64, 8, 128),
    "nemotron_nano_30b": (64, 64, 8, 128),
    "nano_v2": (128, 80, 8, 128),
    "codestral": (128, 64, 8, 128),
    "bamba": (128, 64, 1, 128),
    "granite_4": (48, 64, 1, 128),
    "granite_350m": (48, 32, 1, 128),
    "falcon_h1_small": (24, 64, 1, 256),
    "falcon_h1": (48, 128, 2, 256),
    "zamba2_small": (64, 64, 1, 64),
    "zamba2": (112, 64, 2, 64),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)])
@pytest.mark.parametrize("op", ["chunk_scan", "selective_state_update"])
def test_C16_a_gpu_with_little_shared_memory(name, capability, op):
    """With 99 KiB a block every implementation has a configuration that fits or a reason, and None finds one."""
    h, p, g, n = SHAPES[name]
    device = DeviceInfo("gpu", capability, multiprocessors=82, shared_memory_per_block=99 * 1024)
    lead = (1, 4096) if op == "chunk_scan" else (8,)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, BFLOAT16)  # noqa: E731
    arguments = {
        "x": shape(*lead, h, p),
        "dt": shape(*lead, h),
        "A": jax.ShapeDtypeStruct((h,), FLOAT32),
        "B": shape(*lead, g, n),
        "C": shape(*lead, g, n),
    }
    if op == "selective_state_update":
        arguments["state"] = jax.ShapeDtypeStruct((64, h, p, n), FLOAT32)
    verdicts = jax_ssd.explain(op, **arguments, device=device)
    assert verdicts[0].reason is None
    for verdict in verdicts:
        if verdict.reason is None:
            assert verdict.configuration.get("shared_memory", 0) <= 99 * 1024
        else:
            assert verdict.reason.strip() and not verdict.configuration
