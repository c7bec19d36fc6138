"""What every implementation does alike with replay caches: cursors, and folding a ring into its state."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_ssd import slots
from jax_ssd.problem import Array
from jax_ssd.replay import ReplayCache


class Tokens(NamedTuple):
    """What a ring keeps of its tokens."""

    x: Array  # (b,r,h,p)
    dt: Array  # (b,r,h)
    B: Array  # (b,r,g,n)


class Cursors(NamedTuple):
    """Where a ring's tokens are."""

    start: Array  # (b,)
    length: Array  # (b,)
    last: Array  # (b,)


def gather_rings(cache: ReplayCache, index: Array) -> tuple[Tokens, Cursors]:
    """Rings and cursors of slots `index (b,)`; empty for invalid slots."""
    tokens = Tokens(*(slots.gather(values, index) for values in (cache.x, cache.dt, cache.B)))
    return tokens, Cursors(*(slots.gather(values, index) for values in (cache.start, cache.length, cache.last)))


def in_order(ring: Tokens, cursors: Cursors) -> Tokens:
    """The ring's tokens, oldest first; zeros at and past `length`, whatever the ring holds there."""
    order = jnp.arange(ring.x.shape[1], dtype=jnp.int32)
    column = (cursors.start[:, None] + order) % ring.x.shape[1]
    used = order < cursors.length[:, None]

    def arrange(values: Array) -> Array:
        shape = (...,) + (None,) * (values.ndim - 2)
        return jnp.where(used[shape], jnp.take_along_axis(values, column[shape], axis=1), 0)

    return Tokens(*(arrange(values) for values in ring))


def appended(ring: Tokens, end: Array, tokens: Tokens) -> Tokens:
    """The ring with tokens (b,t,...) written from position `end (b,)` on.

    Whole rings are rewritten, not single tokens: what is stored then depends on what was read, so XLA updates in place.
    """
    ring_size, num_tokens = ring.x.shape[1], tokens.x.shape[1]
    token = (jnp.arange(ring_size, dtype=jnp.int32) - end[:, None]) % ring_size
    new = token < num_tokens
    source = jnp.minimum(token, num_tokens - 1)

    def write(old: Array, values: Array) -> Array:
        shape = (...,) + (None,) * (old.ndim - 2)
        return jnp.where(new[shape], jnp.take_along_axis(values.astype(old.dtype), source[shape], axis=1), old)

    return Tokens(*(write(old, values) for old, values in zip(ring, tokens, strict=True)))


def fold(states: Array, ring: Tokens, A: Array, count: Array) -> Array:
    """exp(total) S0 + sum_j dt_j exp(total - cum_j) x_j B_j^T over the oldest `count (b,)` tokens of ordered rings."""
    dtype = states.dtype
    batch, ring_size, num_heads, headdim = ring.x.shape
    groups, dstate = ring.B.shape[2:]
    counted = jnp.arange(ring_size, dtype=jnp.int32) < count[:, None]
    dt = jnp.where(counted[..., None], ring.dt.astype(dtype), 0)
    exponents = dt * A
    # Sums of what comes after each token, so that no digits are lost in differences.
    after = jnp.flip(jnp.cumsum(jnp.flip(exponents, 1), axis=1), 1)
    weight = dt * jnp.exp(jnp.minimum(after - exponents, 0))
    weighted = (ring.x.astype(dtype) * weight[..., None]).reshape(batch, ring_size, groups, -1, headdim)
    added = jnp.einsum("brgqp,brgn->bgqpn", weighted, ring.B.astype(dtype), precision=lax.Precision.HIGHEST)
    total = jnp.exp(jnp.sum(exponents, axis=1))
    return total[..., None, None] * states + added.reshape(batch, num_heads, headdim, dstate)


def rewind(cache: ReplayCache, index: Array, accepted: Array) -> ReplayCache:
    """Keep the first `accepted (b,)` tokens of the last call of slots `index (b,)`."""
    last = slots.gather(cache.last, index)
    kept = jnp.clip(accepted, 0, last)
    length = slots.gather(cache.length, index) - (last - kept)
    return cache._replace(
        length=slots.scatter(cache.length, index, length), last=slots.scatter(cache.last, index, kept)
    )


def materialize(cache: ReplayCache, A: Array, index: Array) -> Array:
    """The states (b,h,p,n) of slots `index (b,)` with all of their rings folded in."""
    ring, cursors = gather_rings(cache, index)
    states = slots.gather(cache.state, index).astype(A.dtype)
    return fold(states, in_order(ring, cursors), A, cursors.length)


def reset(cache: ReplayCache, index: Array) -> ReplayCache:
    """Empty the rings of slots `index (b,)`."""
    empty = jnp.zeros(index.shape, jnp.int32)
    return cache._replace(
        start=slots.scatter(cache.start, index, empty),
        length=slots.scatter(cache.length, index, empty),
        last=slots.scatter(cache.last, index, empty),
    )
