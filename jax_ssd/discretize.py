"""The step size: from dt as given to dt as the recurrence uses it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssd.problem import Array, StepSize


def step_size(dt: Array, dt_bias: Array | None, step: StepSize, dtype: Any) -> Array:
    """clip(softplus(dt + dt_bias), *limit); the gradient of clip counts its bounds as inside, as torch.clamp does."""
    dt = dt.astype(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias
    if step.softplus:
        dt = jax.nn.softplus(dt)
    low, high = step.limit
    inside = (dt >= low) & (dt <= high)
    return jnp.where(inside, dt, lax.stop_gradient(jnp.clip(dt, low, high)))
