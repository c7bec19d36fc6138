"""The kernels of the scan by the names that a plan calls them."""

from jax_ssd.kernels.triton.scan_fwd import scan, segment_states
from jax_ssd.kernels.triton.scan_prepare import prepare

__all__ = ["prepare", "scan", "segment_states"]
