"""jax-ssd: Mamba-2's state space duality for JAX and PyTorch."""

import jax_ssd.implementations  # noqa: F401  before the function of that name, which then keeps it
from jax_ssd import parallel
from jax_ssd.api import (
    chunk_scan,
    explain,
    implementations,
    materialize,
    prefill,
    replay_update,
    reset,
    rewind,
    selective_state_update,
)
from jax_ssd.philox import StochasticRounding
from jax_ssd.problem import DeviceInfo, PrefillResult, ScanResult, UpdateResult, Verdict
from jax_ssd.replay import ReplayCache, ReplayResult
from jax_ssd.seeds import SeedStream, TorchSeedStream

__version__ = "0.1.0"

__all__ = [
    "DeviceInfo",
    "PrefillResult",
    "ReplayCache",
    "ReplayResult",
    "ScanResult",
    "SeedStream",
    "StochasticRounding",
    "TorchSeedStream",
    "UpdateResult",
    "Verdict",
    "chunk_scan",
    "explain",
    "implementations",
    "materialize",
    "parallel",
    "prefill",
    "replay_update",
    "reset",
    "rewind",
    "selective_state_update",
]
