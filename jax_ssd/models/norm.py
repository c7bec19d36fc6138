"""The gated norm that stands between the scan and the output projection."""

import jax
import jax.numpy as jnp

from jax_ssd.models.config import sum_dtype


def gated_rms_norm(
    x: jax.Array,
    z: jax.Array,
    scale: jax.Array,
    *,
    num_groups: int = 1,
    eps: float = 1e-5,
    norm_before_gate: bool = False,
    axis_name: str | None = None,
) -> jax.Array:
    """Root-mean-square norm of a gated value, each group of columns on its own.

        v = x * silu(z);   out = v / sqrt(mean over the group of v^2 + eps) * scale

    With `norm_before_gate` it is `norm(x) * scale * silu(z)`.

    Args:
        x, z: (..., width), one dtype; computed in float32 (float64 where they are).
        scale: (width,).
        num_groups: groups of the whole width; with `axis_name`, of the width of all shards together.
        eps: added to the mean square.
        norm_before_gate: the order of norm and gate.
        axis_name: mesh axis, under `shard_map`, over which the width is split. A group inside one shard costs
            no communication; otherwise one sum a group and token is added up over the axis.

    Returns:
        (..., width) in x's dtype.

    Raises:
        ValueError: groups that do not divide the width.
    """
    shards = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    total = x.shape[-1] * shards
    if total % num_groups:
        raise ValueError(f"num_groups must divide the width {total}, got {num_groups}")
    dtype = sum_dtype(x.dtype)
    value, gate = x.astype(dtype), jax.nn.silu(z.astype(dtype))
    if not norm_before_gate:
        value = value * gate
    scale = scale.astype(dtype).reshape(*[1] * (value.ndim - 1), -1)
    value = value * _inverse_rms(value, total // num_groups, num_groups, eps, axis_name) * scale
    if norm_before_gate:
        value = value * gate
    return value.astype(x.dtype)


def _inverse_rms(value, group_size, num_groups, eps, axis_name):
    """1 / rms of each column's group, (..., width)."""
    width = value.shape[-1]
    if width % group_size == 0:
        groups = value.reshape(*value.shape[:-1], width // group_size, group_size)
        mean = jnp.mean(groups * groups, axis=-1)
        return jnp.repeat(jax.lax.rsqrt(mean + eps), group_size, axis=-1)
    column = jax.lax.axis_index(axis_name) * width + jnp.arange(width)
    member = jax.nn.one_hot(column // group_size, num_groups, dtype=value.dtype)
    sums = jnp.einsum("...d,dg->...g", value * value, member, precision="highest")
    mean = jax.lax.psum(sums, axis_name) / group_size
    return jax.lax.rsqrt(mean + eps)[..., column // group_size]
