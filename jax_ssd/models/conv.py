"""Causal depthwise convolution: batched, packed with a cache, and token by token.

Letters beyond the legend of `jax_ssd.problem`: `d` channel, `j` tap; `width` taps, so a window holds `width -
1` tokens.
"""

import jax
import jax.numpy as jnp

from jax_ssd.models.config import sum_dtype


def batched_conv(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, seq_idx: jax.Array | None = None
) -> jax.Array:
    """y_t = bias + sum_j weight_j x_{t - (width - 1) + j}, tokens of other documents left out.

    Args:
        x: (b, t, d). weight: (width, d), the last tap is the token itself. bias: (d,) or None.
        seq_idx: (b, t) int32; a document is a run of equal values.

    Returns:
        (b, t, d) in x's dtype, summed in float32 (float64 where x is).
    """
    age = None
    if seq_idx is not None:
        first = jnp.concatenate([jnp.ones_like(seq_idx[:, :1], bool), seq_idx[:, 1:] != seq_idx[:, :-1]], axis=1)
        position = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        age = position - jax.lax.cummax(jnp.where(first, position, 0), axis=1)
    return _with_bias(_shifted_sum(x, weight, age), bias, x.dtype)


def packed_conv(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, windows: jax.Array, cu_seqlens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same over packed sequences, each continuing from its window.

    Args:
        x: (t, d), sequences end to end; tokens past `cu_seqlens[-1]` may hold anything.
        weight, bias: as in `batched_conv`.
        windows: (s, width - 1, d), the tokens before each sequence, zeros where there are none.
        cu_seqlens: (s + 1,) int32.

    Returns:
        y (t, d), zero past the end, and the windows (s, width - 1, d) after each sequence.
    """
    width, num_tokens = weight.shape[0], x.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    starts, lengths = cu_seqlens[:-1], cu_seqlens[1:] - cu_seqlens[:-1]
    inside = token < cu_seqlens[-1]
    x = jnp.where(inside[:, None], x, jnp.zeros_like(x))
    # A token's sequence is the last one that starts at or before it: empty ones before it own no token.
    sequence = jnp.clip(jnp.searchsorted(cu_seqlens, token, side="right") - 1, 0, starts.shape[0] - 1)
    total = _shifted_sum(x[None], weight, (token - starts[sequence])[None])[0]
    carried = _carried_sum(windows, weight)
    offset = jnp.arange(width - 1, dtype=jnp.int32)[None]
    target = jnp.where(offset < lengths[:, None], starts[:, None] + offset, num_tokens)
    total = total.at[target].add(carried.astype(total.dtype), mode="drop")
    y = _with_bias(total, bias, x.dtype)
    return jnp.where(inside[:, None], y, jnp.zeros_like(y)), _next_windows(x, windows, starts, lengths)


def step_conv(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, windows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The same for a few tokens of each row.

    Args:
        x: (b, t, d). weight, bias: as in `batched_conv`. windows: (b, width - 1, d).

    Returns:
        y (b, t, d), and the windows (b, t, width - 1, d) after each token.
    """
    width, num_tokens = weight.shape[0], x.shape[1]
    history = jnp.concatenate([windows.astype(x.dtype), x], axis=1)
    dtype = sum_dtype(x.dtype)
    weight = weight.astype(dtype)[:, None, None]
    taps = [history[:, j : j + num_tokens].astype(dtype) * weight[j] for j in range(width)]
    after = [history[:, i + 1 : i + width] for i in range(num_tokens)]
    return _with_bias(sum(taps[1:], taps[0]), bias, x.dtype), jnp.stack(after, axis=1)


def _shifted_sum(x, weight, age):
    """The sum over taps in float32; age (b, t) is a token's index in its document, None for one document."""
    dtype = sum_dtype(x.dtype)
    width, num_tokens = weight.shape[0], x.shape[1]
    weight = weight.astype(dtype)[:, None, None]
    total = x.astype(dtype) * weight[-1]
    for back in range(1, width):
        shifted = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :num_tokens]
        if age is not None:
            shifted = jnp.where((age >= back)[..., None], shifted, jnp.zeros_like(shifted))
        total = total + shifted.astype(dtype) * weight[-1 - back]
    return total


def _carried_sum(windows, weight):
    """What the windows add to the first width - 1 tokens, (s, width - 1, d)."""
    width = weight.shape[0]
    dtype = sum_dtype(windows.dtype)
    history = jnp.pad(windows.astype(dtype), ((0, 0), (0, width - 1), (0, 0)))
    weight = weight.astype(dtype)[:, None, None]
    taps = [history[:, j : j + width - 1] * weight[j] for j in range(width)]
    return sum(taps[1:], taps[0])


def _next_windows(x, windows, starts, lengths):
    """The last width - 1 tokens of each sequence, older ones taken from its window."""
    size = windows.shape[1]
    index = lengths[:, None] - size + jnp.arange(size, dtype=jnp.int32)[None]
    fresh = x[jnp.clip(starts[:, None] + index, 0, max(x.shape[0] - 1, 0))] if x.shape[0] else windows.astype(x.dtype)
    old = jnp.take_along_axis(windows, jnp.clip(index + size, 0, size - 1)[..., None], axis=1).astype(x.dtype)
    return jnp.where((index >= 0)[..., None], fresh, old)


def _with_bias(total, bias, dtype):
    """(..., d) plus bias (d,)."""
    if bias is not None:
        total = total + bias.astype(total.dtype).reshape(*[1] * (total.ndim - 1), -1)
    return total.astype(dtype)
