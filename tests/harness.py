"""What the tests of the operations share: implementations and skips, jitted calls, oracle results and gradients."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd

over_implementations = pytest.mark.parametrize("implementation", jax_ssd.implementations())

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = (jnp.dtype(name) for name in ("float32", "bfloat16", "float16", "float64"))
DTYPES = (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)

_STATIC = ("dt_softplus", "dt_limit", "chunk_size", "state_dtype", "implementation", "rounds")
_INTEGER = ("seq_idx", "cu_seqlens", "checkpoint_positions", "read_slots", "write_slots", "slots")


def x64_for(dtype):
    """64-bit mode where `dtype` needs it."""
    return jax.enable_x64(True) if np.dtype(dtype) == np.float64 else contextlib.nullcontext()


def require(implementation, op, /, **arguments):
    """Skip the test where `explain` gives a reason against `implementation` serving this call."""
    arguments.pop("implementation", None)
    wide = any(getattr(leaf, "dtype", None) == FLOAT64 for leaf in jax.tree.leaves(arguments))
    with x64_for(FLOAT64 if wide else FLOAT32):
        verdicts = jax_ssd.explain(op, **arguments)
    for verdict in verdicts:
        if verdict.name == implementation and verdict.reason is not None:
            pytest.skip(f"{implementation}: {verdict.reason}")


def split(arguments):
    """(arrays, sorted static options) of keyword arguments; absent ones (None) are dropped."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    static = tuple(sorted((name, arguments.pop(name)) for name in _STATIC if name in arguments))
    return arguments, static


def _called(function, static, arrays):
    return function(**arrays, **dict(static))


def _pulled_back(function, static, wanted, others, cotangents):
    result, pull = jax.vjp(lambda wanted: function(**wanted, **others, **dict(static)), wanted)
    return result, pull(cotangents)[0]


# LLVM's optimizer takes more than half of a compilation. The oracle and most gradients do without it; calls, gradients
# at the sizes of models and in half precision, and repetitions do not.
QUICKLY, FULLY = ({"xla_backend_optimization_level": level} for level in (0, 3))
_call = jax.jit(_called, static_argnums=(0, 1), compiler_options=FULLY)
_quick_call = jax.jit(_called, static_argnums=(0, 1), compiler_options=QUICKLY)
_pullback = jax.jit(_pulled_back, static_argnums=(0, 1), compiler_options=FULLY)
_quick_pullback = jax.jit(_pulled_back, static_argnums=(0, 1), compiler_options=QUICKLY)


def call(function, *, quick=False, **arguments):
    """`function(**arguments)` compiled, one compilation for each set of static options and shapes."""
    arrays, static = split(arguments)
    return (_quick_call if quick else _call)(function, static, arrays)


def scan(implementation, **arguments):
    """`chunk_scan` on a named implementation, compiled; skips where it cannot serve."""
    require(implementation, "chunk_scan", **arguments)
    return call(jax_ssd.chunk_scan, implementation=implementation, **arguments)


def update(implementation, **arguments):
    """`selective_state_update` on a named implementation, compiled; skips where it cannot serve."""
    require(implementation, "selective_state_update", **arguments)
    return call(jax_ssd.selective_state_update, implementation=implementation, **arguments)


def prefill(implementation, **arguments):
    """`prefill` on a named implementation, compiled; skips where it cannot serve."""
    arguments.setdefault("has_initial_state", None)
    require(implementation, "prefill", **arguments)
    return call(_prefill, implementation=implementation, **arguments)


def _prefill(*, has_initial_state=None, **arguments):
    """`has_initial_state` has no default in the public function, and `call` drops what is None."""
    return jax_ssd.prefill(has_initial_state=has_initial_state, **arguments)


def widened(arguments):
    """The same values in float64, for the oracle; options that only implementations know are dropped."""
    dropped = ("chunk_size", "state_dtype", "implementation", "rounding")
    return {
        name: value.astype(np.float64) if _is_float(value) else value
        for name, value in arguments.items()
        if name not in dropped and value is not None
    }


def _is_float(value):
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def oracle(function, **arguments):
    """The oracle's result, as NumPy arrays in float64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, call(function, quick=True, **widened(arguments)))


def random_cotangents(function, seed, **arguments):
    """Normal cotangents in the dtypes and shapes of the results."""
    arrays, static = split(arguments)
    draw = np.random.default_rng([7, seed])
    shapes = jax.eval_shape(lambda arrays: function(**arrays, **dict(static)), arrays)
    return jax.tree.map(lambda leaf: draw.normal(size=leaf.shape).astype(leaf.dtype), shapes)


def gradients(function, cotangents, *, quick=True, **arguments):
    """(results, gradients of every floating-point argument by name) for given cotangents, compiled."""
    arrays, static = split(arguments)
    wanted = {name: value for name, value in arrays.items() if _is_float(value)}
    others = {name: value for name, value in arrays.items() if name not in wanted}
    return (_quick_pullback if quick else _pullback)(function, static, wanted, others, cotangents)


def oracle_gradients(function, cotangents, **arguments):
    """The oracle's results and gradients for the same cotangents, as NumPy arrays in float64."""
    cotangents = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), cotangents)
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, gradients(function, cotangents, **widened(arguments)))


def bits(tree):
    """Every leaf as raw bytes and its shape and dtype, to compare results bit for bit."""
    return [(leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def same_bits(first, second):
    """Whether two trees of arrays are equal bit for bit; NaN equals the same NaN."""
    return bits(first) == bits(second)


def exact(arguments, seed=0):
    """The same call with values for which float32 states have no rounding error in any order of summation.

    Nothing decays, dt is 1, x lies on a grid of 1/128 and B is 1/512: up to 64 tokens change a state in [1, 2] by
    multiples of 2^-16. What is stored can then be compared bit for bit between differently compiled programs.
    """
    draw = np.random.default_rng(seed)
    changed = {name: value for name, value in arguments.items() if name not in ("dt_bias", "dt_softplus", "dt_limit")}
    for name, value in arguments.items():
        if name == "x":
            changed[name] = (draw.integers(-127, 128, value.shape) / 128.0).astype(value.dtype)
        elif name in ("A", "dt", "B"):
            changed[name] = np.full_like(value, {"A": 0.0, "dt": 1.0, "B": 1.0 / 512.0}[name])
        elif name in ("state", "cache"):
            grid = 1.0 + draw.integers(0, 128, value.shape) / 128.0
            changed[name] = np.where(np.isnan(value), value, grid.astype(value.dtype))
    return changed
