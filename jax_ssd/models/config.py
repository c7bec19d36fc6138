"""What a Mamba-2 model is made of: sizes, options, nothing that computes."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "headdim",
    "num_groups",
    "dstate",
    "conv_width",
)


def sum_dtype(dtype: Any) -> Any:
    """What sums of a dtype's values are made in: float32, and float64 for float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """Sizes and options of a Mamba-2 language model.

    Args:
        vocab_size, hidden_size, num_layers: the model around the mixers.
        num_heads, headdim, num_groups, dstate: h, p, g, n of the scan; the inner width is h * p.
        conv_width: taps of the causal convolution over x, B and C, the token itself included.
        conv_bias, proj_bias: whether the convolution and the two projections have a bias.
        time_step_limit: bounds that dt is clipped to after bias and softplus; the only bounds that a forward
            pass uses.
        time_step_min, time_step_max, time_step_floor: only for drawing the first dt_bias.
        norm_eps: epsilon of every norm.
        norm_groups: groups that the gated norm treats apart; None for num_groups, 1 for the whole width at
            once.
        norm_before_gate: normalise first and multiply with silu(z) after, instead of the reverse.
        tie_embeddings: whether the head is the embedding's transpose.
        dtype: what projections, convolution and scan compute in; parameters and the residual stream stay
            float32.
        chunk_size, implementation: handed to the scan; None lets it choose.

    Raises:
        ValueError: a size that is not positive, or sizes that do not divide.

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7, and the names of the published checkpoints.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    headdim: int = 64
    num_groups: int = 1
    dstate: int = 128
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    norm_eps: float = 1e-5
    norm_groups: int | None = None
    norm_before_gate: bool = False
    tie_embeddings: bool = True
    dtype: Any = jnp.float32
    chunk_size: int | None = None
    implementation: str | None = None

    def __post_init__(self):
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_groups must divide num_heads={self.num_heads}, got {self.num_groups}")
        if self.inner_size % self.gate_groups:
            raise ValueError(f"norm_groups must divide num_heads * headdim={self.inner_size}, got {self.gate_groups}")
        low, high = self.time_step_limit
        if not 0 <= low <= high:
            raise ValueError(f"time_step_limit must be (low, high) with 0 <= low <= high, got {self.time_step_limit}")

    @property
    def inner_size(self) -> int:
        """Width of x and z: h * p."""
        return self.num_heads * self.headdim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, B and C side by side, h * p + 2 * g * n."""
        return self.inner_size + 2 * self.num_groups * self.dstate

    @property
    def projection_size(self) -> int:
        """Width of the input projection: z, then x, B and C, then dt."""
        return self.inner_size + self.conv_size + self.num_heads

    @property
    def gate_groups(self) -> int:
        """Groups of the gated norm."""
        return self.num_groups if self.norm_groups is None else self.norm_groups
