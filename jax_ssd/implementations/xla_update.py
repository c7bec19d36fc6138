"""Decode in plain JAX: the state update and the replay of a ring, on slots gathered from a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssd import replay_ops, slots, varying
from jax_ssd.discretize import step_size
from jax_ssd.implementations.xla_chunk import PRECISION, gated, masked_exp, not_above_zero
from jax_ssd.problem import Array, Parameters, ReplayArrays, Tokens, UpdateArrays, UpdateProblem, UpdateResult
from jax_ssd.replay import ReplayCache, ReplayResult


def selective_state_update(problem: UpdateProblem, arrays: UpdateArrays) -> UpdateResult:
    """Serve `selective_state_update`: one token after another on the float32 states of the slots read."""
    pool, parameters = arrays.state, arrays.parameters
    live = (arrays.read_slots >= 0) & (arrays.read_slots < pool.shape[0])
    states = slots.gather(pool, arrays.read_slots).astype(parameters.A.dtype)
    write = arrays.read_slots if arrays.write_slots is None else arrays.write_slots
    write = jnp.where(live if write.ndim == 1 else live[:, None], write, -1)
    each = problem.write_slots == "each"
    tokens = jax.tree.map(lambda value: value.swapaxes(0, 1), arrays.tokens)

    def one_token(carried: tuple[Array, Array], token: tuple[Tokens, Array | None, Array]):
        states, pool = carried
        inputs, where, step = token
        states, y = _recur(problem, parameters, states, inputs)
        if where is not None:
            pool = slots.store(pool, where, states, arrays.rounding, step=step)
        return (states, pool), y

    steps = jnp.arange(problem.num_tokens, dtype=jnp.uint32)
    columns = write.T if each else None
    carried, per_token = varying.together(((states, pool), (tokens, columns, steps)))
    (states, pool), y = lax.scan(one_token, carried, per_token)
    if not each and problem.num_tokens:
        pool = slots.store(pool, write, states, arrays.rounding, step=steps[-1])
    y = jnp.where(live[:, None, None, None], y.swapaxes(0, 1), 0)
    return UpdateResult(y.astype(arrays.tokens.x.dtype), pool)


def replay_update(problem: UpdateProblem, arrays: ReplayArrays) -> ReplayResult:
    """Serve `replay_update`: y from the state and the ring, a fold where the ring would overflow, new tokens."""
    cache, parameters = arrays.cache, arrays.parameters
    if problem.num_tokens == 0:
        return ReplayResult(arrays.tokens.x, cache)
    live = (arrays.slots >= 0) & (arrays.slots < cache.state.shape[0])
    index = jnp.where(live, arrays.slots, -1)
    dtype = parameters.A.dtype
    new_dt = step_size(arrays.tokens.dt, parameters.dt_bias, problem.step_size, dtype)
    stored_ring, cursors = replay_ops.gather_rings(cache, index)
    ring = replay_ops.in_order(stored_ring, cursors)
    states = slots.gather(cache.state, index).astype(dtype)
    y = _replay(problem, parameters, states, ring, arrays.tokens, new_dt)
    y = jnp.where(live[:, None, None, None], y, 0).astype(arrays.tokens.x.dtype)

    overflows = live & (cursors.length + problem.num_tokens > cache.x.shape[1])
    folded = jnp.where(overflows, cursors.length - cursors.last, 0)
    states = replay_ops.fold(states, ring, parameters.A, folded)
    state = slots.store(cache.state, jnp.where(overflows, index, -1), states, arrays.rounding)
    new = replay_ops.Tokens(arrays.tokens.x, new_dt, arrays.tokens.B)
    rings = replay_ops.appended(stored_ring, cursors.start + cursors.length, new)
    x, dt, B = (slots.scatter(old, index, new) for old, new in zip(cache[1:4], rings, strict=True))
    cache = ReplayCache(
        state=state,
        x=x,
        dt=dt,
        B=B,
        start=slots.scatter(cache.start, index, (cursors.start + folded) % cache.x.shape[1]),
        length=slots.scatter(cache.length, index, cursors.length - folded + problem.num_tokens),
        last=slots.scatter(cache.last, index, jnp.full_like(index, problem.num_tokens)),
    )
    return ReplayResult(y, cache)


def _recur(problem: UpdateProblem, parameters: Parameters, states: Array, token: Tokens) -> tuple[Array, Array]:
    """One token: states (b,h,p,n) and x (b,h,p) to the next states and y (b,h,p)."""
    dtype = states.dtype
    heads_per_group = problem.sizes.num_heads // problem.sizes.num_groups
    x = token.x.astype(dtype)
    B, C = (jnp.repeat(value.astype(dtype), heads_per_group, axis=1) for value in (token.B, token.C))
    dt = step_size(token.dt, parameters.dt_bias, problem.step_size, dtype)
    decay = jnp.exp(dt * parameters.A)
    states = decay[..., None, None] * states + (dt[..., None] * x)[..., None] * B[:, :, None, :]
    y = jnp.sum(states * C[:, :, None, :], axis=-1)
    return states, gated(y, x, parameters.D, token.z)


def _replay(
    problem: UpdateProblem,
    parameters: Parameters,
    states: Array,
    ring: replay_ops.Tokens,
    tokens: Tokens,
    new_dt: Array,
) -> Array:
    """y (b,t,h,p) of the new tokens from the stored states (b,h,p,n), the ring (b,r,...) and the tokens themselves."""
    dtype, groups = states.dtype, problem.sizes.num_groups
    ring_size = ring.x.shape[1]
    x = jnp.concatenate([ring.x, tokens.x], axis=1).astype(dtype)
    B = jnp.concatenate([ring.B, tokens.B], axis=1).astype(dtype)
    C = tokens.C.astype(dtype)
    dt = jnp.concatenate([ring.dt, new_dt.astype(ring.dt.dtype)], axis=1).astype(dtype)
    sums = jnp.cumsum(dt * parameters.A, axis=1).swapaxes(1, 2)  # (b,h,r+t), 0 contributed by unused ring entries
    at_new = sums[..., ring_size:]
    causal = jnp.arange(x.shape[1]) <= ring_size + jnp.arange(problem.num_tokens)[:, None]
    decay = masked_exp(causal, not_above_zero(at_new[..., :, None] - sums[..., None, :]))
    scores = jnp.einsum("blgn,bmgn->bglm", C, B, precision=PRECISION)
    weights = (decay * dt.swapaxes(1, 2)[..., None, :]).reshape(x.shape[0], groups, -1, *decay.shape[2:])
    weights = weights * scores[:, :, None]
    by_group = x.reshape(*x.shape[:2], groups, -1, x.shape[-1])
    within = jnp.einsum("bgrlm,bmgrp->blgrp", weights, by_group, precision=PRECISION)
    stored = states.reshape(states.shape[0], groups, -1, *states.shape[2:])
    across = jnp.einsum("blgn,bgrpn->blgrp", C, stored, precision=PRECISION)
    shape = (x.shape[0], problem.num_tokens, *x.shape[2:])
    y = within.reshape(shape) + across.reshape(shape) * jnp.exp(at_new.swapaxes(1, 2))[..., None]
    return gated(y, x[:, ring_size:], parameters.D, tokens.z)
