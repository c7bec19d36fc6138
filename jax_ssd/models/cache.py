"""What decoding remembers: for each layer a convolution window and a scan state per slot."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd.models.config import Mamba2Config


class LayerCache(NamedTuple):
    """One layer's pool: windows (w, conv_width - 1, h * p + 2 * g * n) and states (w, h, p, n)."""

    windows: jax.Array
    states: jax.Array


def init_cache(config: Mamba2Config, num_slots: int, *, state_dtype: Any = jnp.float32) -> tuple[LayerCache, ...]:
    """An empty cache, one `LayerCache` a layer: a pytree of arrays, to be donated and replaced.

    Args:
        config: the model's.
        num_slots: w, how many sequences (or draft positions) it holds.
        state_dtype: float32, float16 or bfloat16 for the scan's states; the windows have the model's dtype.

    Raises:
        ValueError: fewer than one slot.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}")
    windows = (num_slots, config.conv_width - 1, config.conv_size)
    states = (num_slots, config.num_heads, config.headdim, config.dstate)
    return tuple(
        LayerCache(jnp.zeros(windows, config.dtype), jnp.zeros(states, state_dtype)) for _ in range(config.num_layers)
    )


def read_windows(windows: jax.Array, slots: jax.Array, keep: jax.Array | None = None) -> jax.Array:
    """Rows (b, width - 1, d) of the pool; zeros for a slot out of range and where `keep` (b,) is False."""
    num_slots = windows.shape[0]
    valid = (slots >= 0) & (slots < num_slots)
    if keep is not None:
        valid = valid & keep
    rows = windows[jnp.clip(slots, 0, num_slots - 1)]
    return jnp.where(valid[:, None, None], rows, jnp.zeros_like(rows))


def write_windows(windows: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """The pool with rows written at slots (any shape, rows to match); a slot out of range writes nothing."""
    num_slots = windows.shape[0]
    target = jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots)
    return windows.at[target].set(rows.astype(windows.dtype), mode="drop")
