"""Set-up for every test: devices, strict promotion, seeds, and skips where a test's hardware is missing."""

import os

# The CPU shows four devices, so that sharding is tested anywhere; JAX reads this once, when it starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_enable_compilation_cache", False)

# Compilation makes the first example slow; a fixed order makes failures repeatable.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def num_gpus():
    try:
        return len(jax.devices("gpu"))
    except RuntimeError:
        return 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    marked = [
        item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")
    ]
    found = num_gpus() if marked else 0
    for item in marked:
        item.add_marker(pytest.mark.gpu)
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {found}"))


@pytest.fixture
def rng():
    """A NumPy generator that starts the same in every test."""
    return np.random.default_rng(0)
