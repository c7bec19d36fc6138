"""PyTorch and JAX on the same memory."""

from bridge.call import Wrapped, cache_clear, cache_info, torch_call, wrap
from bridge.program import CacheInfo
from bridge.reverse import jax_call
from bridge.streams import collect, record_stream

__all__ = [
    "CacheInfo",
    "Wrapped",
    "cache_clear",
    "cache_info",
    "collect",
    "jax_call",
    "record_stream",
    "torch_call",
    "wrap",
]
