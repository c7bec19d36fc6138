"""Set-up for every test: devices, strict promotion, seeds, and skips where a test's hardware is missing."""

import os
import pathlib

# The CPU shows four devices, so that sharding is tested anywhere; JAX reads this once, when it starts.
# Programs here run once or twice, so LLVM's optimizer costs more than it saves; harness.py says where it is on.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)

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
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
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


# Every compiled program holds memory maps, and XLA crashes when a process runs out of them (65,530 on Linux).
MAPS_KEPT = 15_000
TESTS_BETWEEN_LOOKS = 10
_tests_since_look = 0


@pytest.fixture(autouse=True)
def _few_compiled_programs():
    """Forget compiled programs before the process holds too many of them."""
    global _tests_since_look
    yield
    _tests_since_look += 1
    maps = pathlib.Path("/proc/self/maps")
    if _tests_since_look < TESTS_BETWEEN_LOOKS or not maps.exists():
        return
    _tests_since_look = 0
    if maps.read_bytes().count(b"\n") > MAPS_KEPT:
        jax.clear_caches()
