"""`chunk_scan` against the oracle: values, states, every gradient, repeatability, and what must not matter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from jax_ssd import reference
from tests.cases import BY_NAME, MODELS, SMALL
from tests.harness import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    gradients,
    oracle,
    oracle_gradients,
    over_implementations,
    random_cotangents,
    require,
    same_bits,
    scan,
    x64_for,
)
from tests.tolerances import check


def _check_scan(result, expected, dtype, decay):
    check(result.y, expected.y, dtype, "value", decay=decay, name="y")
    state_dtype = FLOAT64 if dtype == FLOAT64 else FLOAT32
    assert result.y.dtype == dtype and result.final_states.dtype == state_dtype
    check(result.final_states, expected.final_states, dtype, "state", decay=decay, name="final_states")
    assert (result.checkpoint_states is None) == (expected.checkpoint_states is None)
    if expected.checkpoint_states is not None:
        check(result.checkpoint_states, expected.checkpoint_states, dtype, "state", decay=decay, name="checkpoints")


@over_implementations
@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT16), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_value_and_state_in_half_precision(implementation, dtype, case):
    arguments = case.arrays(dtype) | case.options()
    result = scan(implementation, **arguments)
    _check_scan(result, oracle(reference.chunk_scan, **arguments), dtype, case.decay())


@over_implementations
@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_value_and_state_at_model_sizes(implementation, dtype, case):
    arguments = case.arrays(dtype) | case.options()
    result = scan(implementation, **arguments)
    _check_scan(result, oracle(reference.chunk_scan, **arguments), dtype, case.decay())


def _check_gradients(implementation, case, dtype, quick=True):
    """Values, states and the gradient of every floating-point argument, for random cotangents of every result."""
    arguments = case.arrays(dtype) | case.options()
    require(implementation, "chunk_scan", **arguments)
    with x64_for(dtype):
        cotangents = random_cotangents(jax_ssd.chunk_scan, 0, **arguments)
        result, found = gradients(
            jax_ssd.chunk_scan, cotangents, quick=quick, implementation=implementation, **arguments
        )
        expected, slopes = oracle_gradients(reference.chunk_scan, cotangents, **arguments)
        _check_scan(result, expected, dtype, case.decay())
        assert set(found) == set(slopes)
        for name, gradient in found.items():
            assert gradient.dtype == arguments[name].dtype and gradient.shape == arguments[name].shape
            check(gradient, slopes[name], dtype, "gradient", decay=case.decay(), name=f"gradient of {name}")


@over_implementations
@pytest.mark.parametrize("dtype", (FLOAT64, FLOAT32), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_value_state_and_every_gradient(implementation, dtype, case):
    _check_gradients(implementation, case, dtype)


@over_implementations
@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT16), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", ["everything", "packed"])
def test_every_gradient_in_half_precision(implementation, dtype, name):
    _check_gradients(implementation, BY_NAME[name], dtype, quick=False)


@over_implementations
@pytest.mark.parametrize("name", ["nano_v2", "irregular", "falcon_h1"])
def test_every_gradient_at_model_sizes(implementation, name):
    _check_gradients(implementation, BY_NAME[name], FLOAT32, quick=False)


@over_implementations
@pytest.mark.parametrize("name", ["everything", "packed", "documents"])
def test_repeatable_bit_for_bit(implementation, name):
    """The same call with the same random cotangent, ten times."""
    case = BY_NAME[name]
    arguments = case.arrays(FLOAT32) | case.options() | {"implementation": implementation}
    require(implementation, "chunk_scan", **arguments)
    cotangents = random_cotangents(jax_ssd.chunk_scan, 3, **arguments)
    first = gradients(jax_ssd.chunk_scan, cotangents, quick=False, **arguments)
    for _ in range(9):
        assert same_bits(first, gradients(jax_ssd.chunk_scan, cotangents, quick=False, **arguments))


@over_implementations
@pytest.mark.parametrize("chunk_size", [1, 2, 7, 16, 64, 100, 256])
def test_chunk_size_does_not_matter(implementation, chunk_size):
    case = dataclasses.replace(BY_NAME["packed"], chunk_size=chunk_size)
    arguments = case.arrays(FLOAT32) | case.options()
    _check_scan(scan(implementation, **arguments), oracle(reference.chunk_scan, **arguments), FLOAT32, 0.0)


@over_implementations
@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT16), ids=lambda dtype: dtype.name)
def test_dt_may_be_float32(implementation, dtype):
    case = BY_NAME["plain"]
    arguments = case.arrays(dtype) | case.options()
    arguments["dt"] = case.arrays(FLOAT32)["dt"]
    _check_scan(scan(implementation, **arguments), oracle(reference.chunk_scan, **arguments), dtype, 0.0)


@over_implementations
@pytest.mark.parametrize("dtype", (BFLOAT16, FLOAT16), ids=lambda dtype: dtype.name)
def test_parameters_and_states_of_any_float_dtype(implementation, dtype):
    """A, D, dt_bias and states in half precision are used in float32: the tokens are float32, and so is the error."""
    case = BY_NAME["everything"]
    arguments = case.arrays(FLOAT32) | case.options()
    for name in ("A", "D", "dt_bias", "initial_states"):
        arguments[name] = arguments[name].astype(dtype)
    _check_scan(scan(implementation, **arguments), oracle(reference.chunk_scan, **arguments), FLOAT32, 0.0)


@over_implementations
@pytest.mark.parametrize("state_dtype", (FLOAT32, BFLOAT16, FLOAT16), ids=lambda dtype: dtype.name)
def test_state_dtype(implementation, state_dtype):
    case = BY_NAME["packed"]
    arguments = case.arrays(BFLOAT16) | case.options()
    exact = scan(implementation, **arguments)
    stored = scan(implementation, state_dtype=state_dtype, **arguments)
    assert stored.final_states.dtype == state_dtype and stored.checkpoint_states.dtype == state_dtype
    check(stored.final_states, oracle(reference.chunk_scan, **arguments).final_states, state_dtype, "state")
    check(stored.checkpoint_states, exact.checkpoint_states, state_dtype, "state")


@over_implementations
@pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_padding_may_hold_anything(implementation, dtype, value):
    """Tokens past the end hold NaN or Inf: y and gradients are 0 there, and everything else keeps its bits."""
    case = BY_NAME["packed"]
    arguments = case.arrays(dtype) | case.options() | {"implementation": implementation}
    require(implementation, "chunk_scan", **arguments)
    cotangents = random_cotangents(jax_ssd.chunk_scan, 5, **arguments)
    end = sum(case.seqlens)
    dirty = {
        name: np.concatenate([array[:end], np.full_like(array[end:], value)])
        if name in ("x", "dt", "B", "C", "z")
        else array
        for name, array in arguments.items()
    }
    dirty_cotangents = cotangents._replace(
        y=np.concatenate([cotangents.y[:end], np.full_like(cotangents.y[end:], value)])
    )
    clean_result = gradients(jax_ssd.chunk_scan, cotangents, **arguments)
    dirty_result = gradients(jax_ssd.chunk_scan, dirty_cotangents, **dirty)
    assert same_bits(clean_result, dirty_result)
    for name in ("x", "dt", "B", "C", "z"):
        assert not np.asarray(dirty_result[1][name][end:]).any()
    assert not np.asarray(dirty_result[0].y[end:]).any()


@over_implementations
@pytest.mark.parametrize("A", [0.0, -1e-30, -16.0, -1e4])
@pytest.mark.parametrize("dt", [1e-30, 1.0, 1e4])
def test_finite_at_any_decay(implementation, A, dt):
    """No NaN or Inf in a value or a gradient, however slowly or fast the state decays."""
    case = dataclasses.replace(BY_NAME["plain"], num_heads=2, headdim=8, num_groups=1, dstate=8, chunk_size=16)
    arguments = case.arrays(FLOAT32) | case.options() | {"implementation": implementation}
    arguments |= {"A": np.full(2, A, np.float32), "dt": np.full((2, 37, 2), dt, np.float32)}
    require(implementation, "chunk_scan", **arguments)
    cotangents = random_cotangents(jax_ssd.chunk_scan, 5, **arguments)
    for leaf in jax.tree.leaves(gradients(jax_ssd.chunk_scan, cotangents, **arguments)):
        assert np.isfinite(leaf).all()


@over_implementations
def test_no_tokens(implementation):
    """T of 0: an empty y, and the final state is the initial state."""
    for name in ("everything", "documents", "packed"):
        case = BY_NAME[name]
        if case.seqlens is None:
            case = dataclasses.replace(case, num_tokens=0, documents=None)
        else:
            case = dataclasses.replace(case, seqlens=(0, 0), padding=0, checkpoints=(0, -1))
        arguments = case.arrays(FLOAT32) | case.options()
        result = scan(implementation, **arguments)
        assert result.y.shape == arguments["x"].shape
        np.testing.assert_array_equal(result.final_states, arguments["initial_states"])
        if case.checkpoints is not None:
            assert not np.asarray(result.checkpoint_states).any()
        cotangents = random_cotangents(jax_ssd.chunk_scan, 0, **arguments)
        _, found = gradients(jax_ssd.chunk_scan, cotangents, implementation=implementation, **arguments)
        np.testing.assert_array_equal(found["initial_states"], cotangents.final_states)


@over_implementations
def test_no_sequences(implementation):
    """A packed call of no sequence: y is 0 and there is no state."""
    case = dataclasses.replace(BY_NAME["packed_plain"], seqlens=(), padding=5)
    result = scan(implementation, **case.arrays(FLOAT32) | case.options())
    assert not np.asarray(result.y).any()
    assert result.final_states.shape == (0, case.num_heads, case.headdim, case.dstate)


@over_implementations
def test_no_batch(implementation):
    case = dataclasses.replace(BY_NAME["plain"], batch=0)
    result = scan(implementation, **case.arrays(FLOAT32) | case.options())
    assert result.y.shape == (0, 37, 4, 16)
    assert result.final_states.shape == (0, 4, 16, 32)


@over_implementations
def test_eager_is_jitted(implementation):
    """A call outside jit gives what a call inside gives."""
    case = BY_NAME["packed"]
    arguments = case.arrays(FLOAT32) | case.options()
    compiled = scan(implementation, **arguments)
    eager = jax_ssd.chunk_scan(**arguments, implementation=implementation)
    _check_scan(eager, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), compiled), FLOAT32, 0.0)


@over_implementations
def test_second_derivatives_or_a_clear_refusal(implementation):
    arguments = BY_NAME["one_token"].arrays(FLOAT64)
    direction = np.random.default_rng(0).normal(size=arguments["x"].shape)

    def curvature(function, **options):
        slope = jax.grad(lambda x: jnp.sum(function(**(arguments | options | {"x": x})).y ** 3))
        return jax.jit(jax.grad(lambda x: jnp.sum(slope(x) * direction)))(arguments["x"])

    with jax.enable_x64(True):
        require(implementation, "chunk_scan", **arguments)
        try:
            found = curvature(jax_ssd.chunk_scan, implementation=implementation)
        except NotImplementedError as refusal:
            found, message = None, str(refusal)
        if found is None:
            assert "derivative" in message
        else:
            check(found, curvature(reference.chunk_scan), FLOAT64, "gradient")
