"""The sequential oracle: the recurrence, one token after another, in float64.

    dt_t = clip(softplus(dt_t + dt_bias), *dt_limit)        softplus and bias optional
    S_t  = exp(dt_t * A) * S_{t-1} + dt_t * x_t B_t^T        S is (h, p, n); head i reads group i // (h / g)
    y_t  = S_t C_t + D * x_t;   y_t *= silu(z_t)             D and z optional

Names, options and shapes are those of the public functions. Nothing is validated, rounded or fast: results are float64
whatever the inputs are. Take gradients inside `with jax.enable_x64(True)`, so that cotangents are float64 too.
Source: Dao and Gu 2024 (arXiv 2405.21060), equation of the recurrent form in section 2.
"""

from functools import partial
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd.problem import PrefillResult, ScanResult, UpdateResult

_static = ("dt_softplus", "dt_limit")


class _Tokens(NamedTuple):
    """What is given per token: x z (..., h, p), dt (..., h), B C (..., g, n)."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: jax.Array
    z: jax.Array | None


class _Weights(NamedTuple):
    """What all tokens share: A dt_bias (h,), D (h,) or (h, p)."""

    A: jax.Array
    D: jax.Array | None
    dt_bias: jax.Array | None


def _clip(value, low, high):
    """clip whose gradient is 1 at the bounds inclusive, 0 outside."""
    return jnp.where((value >= low) & (value <= high), value, jax.lax.stop_gradient(jnp.clip(value, low, high)))


def _token(S, token, weights, dt_softplus, dt_limit):
    """One step of the recurrence: state (h, p, n) and one token -> the next state and y (h, p)."""
    x, dt, B, C, z = token
    if weights.dt_bias is not None:
        dt = dt + weights.dt_bias
    if dt_softplus:
        dt = jnp.logaddexp(dt, 0.0)
    dt = _clip(dt, *dt_limit)
    heads_per_group = x.shape[0] // B.shape[0]
    B, C = jnp.repeat(B, heads_per_group, axis=0), jnp.repeat(C, heads_per_group, axis=0)
    S = jnp.exp(dt * weights.A)[:, None, None] * S + jnp.einsum("h,hp,hn->hpn", dt, x, B)
    y = jnp.einsum("hpn,hn->hp", S, C)
    if weights.D is not None:
        y = y + weights.D.reshape(x.shape[0], -1) * x
    return S, y if z is None else y * z * jax.nn.sigmoid(z)


def _recurrence(tokens, weights, start_row, starts, dt_softplus, dt_limit):
    """All tokens in turn; before token t the state becomes starts[start_row[t]], unless that row is negative."""

    def step(S, token_and_row):
        token, row = token_and_row
        S, y = _token(jnp.where(row >= 0, starts[row], S), token, weights, dt_softplus, dt_limit)
        return S, (y, S)

    last, (y, states) = jax.lax.scan(step, starts[0], (tokens, start_row))
    return y, states, last


@partial(jax.jit, static_argnames=_static)
def _batched_scan(tokens, weights, initial_states, seq_idx, dt_softplus, dt_limit):
    def one_row(tokens, initial_state, documents):
        starts = jnp.stack([initial_state, jnp.zeros_like(initial_state)])
        previous = jnp.concatenate([documents[:1], documents[:-1]])
        start_row = jnp.where(documents != previous, 1, -1).at[:1].set(0)
        y, _, last = _recurrence(tokens, weights, start_row, starts, dt_softplus, dt_limit)
        return y, last

    return ScanResult(*jax.vmap(one_row)(tokens, initial_states, seq_idx), None)


@partial(jax.jit, static_argnames=_static)
def _packed_scan(tokens, weights, initial_states, cu_seqlens, checkpoint_positions, dt_softplus, dt_limit):
    num_tokens, end = tokens.x.shape[0], cu_seqlens[-1]
    position = jnp.arange(num_tokens)
    owner = jnp.searchsorted(cu_seqlens[1:], position, side="right")  # the number of sequences where it has none
    owned = position < end
    tokens = jax.tree.map(lambda a: jnp.where(owned.reshape(-1, *[1] * (a.ndim - 1)), a, 0.0), tokens)
    nothing = jnp.zeros((1, *initial_states.shape[1:]))
    starts = jnp.concatenate([initial_states, nothing])
    start_row = jnp.where(owned & (position == cu_seqlens[owner]), owner, -1)
    y, states, _ = _recurrence(tokens, weights, start_row, starts, dt_softplus, dt_limit)

    states = jnp.concatenate([states, nothing])  # row num_tokens: no state
    empty = cu_seqlens[1:] == cu_seqlens[:-1]
    last = states[jnp.where(empty, num_tokens, cu_seqlens[1:] - 1)]
    final_states = jnp.where(empty[:, None, None, None], initial_states, last)
    y = jnp.where(owned[:, None, None], y, 0.0)
    if checkpoint_positions is None:
        return ScanResult(y, final_states, None)
    given = (checkpoint_positions >= 0) & (checkpoint_positions < end)
    return ScanResult(y, final_states, states[jnp.where(given, checkpoint_positions, num_tokens)])


@partial(jax.jit, static_argnames=_static)
def _update(state, tokens, weights, read_slots, write_slots, dt_softplus, dt_limit):
    width = state.shape[0]
    exists = (read_slots >= 0) & (read_slots < width)

    def one_row(start, tokens):
        start_row = jnp.full(tokens.x.shape[:1], -1).at[:1].set(0)
        return _recurrence(tokens, weights, start_row, start[None], dt_softplus, dt_limit)[:2]

    y, after = jax.vmap(one_row)(state[jnp.where(exists, read_slots, 0)], tokens)
    if write_slots.ndim == 1:
        after, write_slots = after[:, -1:], write_slots[:, None]
    stored = exists[:, None] & (write_slots >= 0)
    state = state.at[jnp.where(stored, write_slots, width)].set(after, mode="drop")
    return UpdateResult(jnp.where(exists[:, None, None, None], y, 0.0), state)


def _float64(tree) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a).astype(jnp.float64), tree)


def _int64(array) -> Any:
    return None if array is None else jnp.asarray(array).astype(jnp.int64)


def chunk_scan(
    x,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0.0, inf),
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    checkpoint_positions=None,
):
    """The scan, batched, packed or with seq_idx; as `jax_ssd.chunk_scan`, in float64. Differentiable."""
    with jax.enable_x64(True):
        tokens, weights = _float64(_Tokens(x, dt, B, C, z)), _float64(_Weights(A, D, dt_bias))
        rows = tokens.x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        if initial_states is None:
            initial_states = jnp.zeros((rows, *tokens.x.shape[-2:], tokens.B.shape[-1]))
        initial_states = _float64(initial_states)
        if cu_seqlens is not None:
            return _packed_scan(
                tokens, weights, initial_states, _int64(cu_seqlens), _int64(checkpoint_positions), dt_softplus, dt_limit
            )
        seq_idx = jnp.zeros(tokens.x.shape[:2]) if seq_idx is None else seq_idx
        return _batched_scan(tokens, weights, initial_states, _int64(seq_idx), dt_softplus, dt_limit)


def prefill(
    cache,
    x,
    dt,
    A,
    B,
    C,
    *,
    cu_seqlens,
    slots,
    has_initial_state=None,
    checkpoint_positions=None,
    checkpoint_slots=None,
    **options,
):
    """Gather, scan, scatter; as `jax_ssd.prefill`, in float64 and without rounding."""
    with jax.enable_x64(True):
        cache, cu_seqlens, slots = _float64(cache), _int64(cu_seqlens), _int64(slots)
        width, num_tokens = cache.shape[0], x.shape[0]
        exists = (slots >= 0) & (slots < width)
        read = exists & (False if has_initial_state is None else jnp.asarray(has_initial_state))
        start = jnp.where(read[:, None, None, None], cache[jnp.where(read, slots, 0)], 0.0)
        y, final_states, checkpoints = chunk_scan(
            x,
            dt,
            A,
            B,
            C,
            cu_seqlens=cu_seqlens,
            initial_states=start,
            checkpoint_positions=checkpoint_positions,
            **options,
        )
        cache = cache.at[jnp.where(exists, slots, width)].set(final_states, mode="drop")
        if checkpoint_positions is not None:
            positions, checkpoint_slots = _int64(checkpoint_positions), _int64(checkpoint_slots)
            stored = (checkpoint_slots >= 0) & (positions >= 0) & (positions < cu_seqlens[-1])
            cache = cache.at[jnp.where(stored, checkpoint_slots, width)].set(checkpoints, mode="drop")
        owner = jnp.searchsorted(cu_seqlens[1:], jnp.arange(num_tokens), side="right")
        exists = jnp.concatenate([exists, jnp.zeros(1, bool)])
        return PrefillResult(jnp.where(exists[owner][:, None, None], y, 0.0), cache)


def selective_state_update(
    state,
    x,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0.0, inf),
    read_slots=None,
    write_slots=None,
):
    """One or several tokens a row; as `jax_ssd.selective_state_update`, in float64 and without rounding."""
    with jax.enable_x64(True):
        state, weights = _float64(state), _float64(_Weights(A, D, dt_bias))
        tokens = _float64(_Tokens(x, dt, B, C, z))
        single = tokens.x.ndim == 3
        if single:
            tokens = jax.tree.map(lambda a: a[:, None], tokens)
        read_slots = jnp.arange(tokens.x.shape[0]) if read_slots is None else _int64(read_slots)
        write_slots = read_slots if write_slots is None else _int64(write_slots)
        y, state = _update(state, tokens, weights, read_slots, write_slots, dt_softplus, dt_limit)
        return UpdateResult(y[:, 0] if single else y, state)
