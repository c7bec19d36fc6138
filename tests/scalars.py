"""Problems that repeat one scalar recurrence in every head and channel, and checks against the scalar's values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ssd
from tests.harness import FLOAT32, QUICKLY, require
from tests.tolerances import check

SCALAR = {"num_heads": 1, "headdim": 1, "num_groups": 1, "dstate": 1}
REAL = {"num_heads": 4, "headdim": 64, "num_groups": 2, "dstate": 128}
over_sizes = pytest.mark.parametrize("sizes", [SCALAR, REAL], ids=["scalar", "real"])


def scalar_problem(num_tokens, A, sizes, *, x=1.0, dt=1.0, S0=None, dtype=FLOAT32, **options):
    """One batch row whose every head and channel is the scalar problem; scalars or one value a token."""
    h, p, g, n = sizes.values()
    per_token = lambda values, ones: np.broadcast_to(values, num_tokens)[(None, slice(None), *[None] * ones)]  # noqa: E731
    first = np.zeros((1, num_tokens, g, n))
    first[..., 0] = 1.0
    arguments = {
        "x": per_token(x, 2) * np.ones((1, num_tokens, h, p)),
        "dt": per_token(dt, 1) * np.ones((1, num_tokens, h)),
        "B": first,
        "C": first,
    }
    arguments = {name: value.astype(dtype) for name, value in arguments.items()}
    arguments["A"] = np.full(h, A, np.float32)
    if S0 is not None:
        arguments["initial_states"] = np.zeros((1, h, p, n), np.float32)
        arguments["initial_states"][..., 0] = S0
    return arguments | options


def packed(arguments, *lengths):
    """The batched problem as one packed call."""
    flat = {name: arguments[name][0] for name in ("x", "dt", "B", "C")}
    return arguments | flat | {"cu_seqlens": np.cumsum([0, *lengths]).astype(np.int32)}


def check_y(result, expected, dtype=FLOAT32, at=slice(None)):
    """y of every head and channel at tokens `at`, batched or packed."""
    y = np.asarray(result.y, np.float64)
    y = y[0] if y.ndim == 4 else y
    expected = np.asarray(expected, np.float64)[:, None, None]
    check(y[at], np.broadcast_to(expected, y[at].shape), dtype, "value")


def check_state(result, expected, dtype=FLOAT32):
    states = np.asarray(result.final_states, np.float64)
    check(states[..., 0], np.full(states.shape[:-1], expected), dtype, "state")
    assert not states[..., 1:].any()


def slopes_of(implementation, loss, arguments):
    """d loss / d every float argument; loss takes a ScanResult. Channel 0 alone counts, so slopes are the scalar's."""
    require(implementation, "chunk_scan", **arguments)
    floats = {name: value for name, value in arguments.items() if hasattr(value, "dtype") and value.dtype.kind != "i"}

    def total(floats):
        return loss(jax_ssd.chunk_scan(**arguments | floats, implementation=implementation))

    return jax.jit(jax.grad(total), compiler_options=QUICKLY)(floats)


def sum_y(result):
    return jnp.sum(result.y[..., 0].astype(jnp.float32))
