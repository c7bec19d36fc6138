"""The mathematics of a block of chunks, as differentiable functions of arrays that fit one step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ssd.discretize import step_size
from jax_ssd.problem import Array, Parameters, StepSize, Tokens

# XLA may otherwise use tensor cores with 10 or 8 bits of mantissa for float32 products.
PRECISION = lax.Precision.HIGHEST


class BlockTable(NamedTuple):
    """What is known of the rows of a block. Documents are None without seq_idx."""

    valid: Array  # (c,l) bool
    first: Array  # (c,) bool: the chunk begins a sequence
    document: Array | None  # (c,l) int32
    entering_document: Array | None  # (c,) int32: of the token before the chunk


class BlockResult(NamedTuple):
    """y of a block, the state after it, and the states before and after each of its chunks."""

    y: Array  # (c,l,h,p)
    state: Array  # (h,p,n)
    entering: Array  # (c,h,p,n)
    leaving: Array  # (c,h,p,n)


def gated(y: Array, x: Array, D: Array | None, z: Array | None) -> Array:
    """(y + D * x) * silu(z)."""
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]) * x
    return y if z is None else y * jax.nn.silu(z.astype(y.dtype))


def not_above_zero(difference: Array) -> Array:
    """min(difference, 0) with the gradient of the difference: what is above 0 is rounding of a sum that is not."""
    return difference - lax.stop_gradient(jnp.maximum(difference, 0))


def sums_between(later: Array, earlier: Array, apart: Array) -> Array:
    """Sums of dt * A between two rows, 0 where they are one row.

    There the difference is 0 whatever the sums are. Its two large cotangents would cancel only up to rounding, which
    can exceed the whole gradient of A.
    """
    return jnp.where(apart, not_above_zero(later - earlier), 0)


def masked_exp(mask: Array | None, exponent: Array) -> Array:
    """exp where the mask is set, else 0 with a gradient of 0."""
    return jnp.exp(exponent if mask is None else jnp.where(mask, exponent, -jnp.inf))


def sums_since(dtA: Array, document: Array | None) -> Array:
    """Inclusive sums of dt * A (c,l,h) -> (c,h,l) from the start of the chunk, or of the document in it."""
    length = dtA.shape[1]
    causal = jnp.tril(jnp.ones((length, length), jnp.bool_))
    if document is None:
        return jnp.einsum("lm,cmh->chl", causal.astype(dtA.dtype), dtA, precision=PRECISION)
    mask = causal & same_document(document, document)
    return jnp.einsum("clm,cmh->chl", mask.astype(dtA.dtype), dtA, precision=PRECISION)


def same_document(left: Array, right: Array) -> Array:
    """(c,l), (c,m) -> (c,l,m)."""
    return left[:, :, None] == right[:, None, :]


def leaving_contribution(x: Array, dt: Array, B: Array, sums: Array, kept: Array | None) -> Array:
    """sum_m exp(sums_last - sums_m) dt_m x_m B_m^T: (c,m,h,p), (c,m,h), (c,m,g,n), (c,h,m) -> (c,h,p,n)."""
    mask = None if kept is None else kept[:, None, :]
    apart = jnp.arange(sums.shape[-1]) < sums.shape[-1] - 1
    weight = masked_exp(mask, sums_between(sums[..., -1:], sums, apart)) * dt.swapaxes(1, 2)
    weighted = _grouped(x * weight.swapaxes(1, 2)[..., None], B.shape[2])
    states = jnp.einsum("cmgrp,cmgn->cgrpn", weighted, B, precision=PRECISION)
    return states.reshape(states.shape[0], -1, *states.shape[3:])


def block(
    parameters: Parameters, state: Array, fresh: Array | None, tokens: Tokens, table: BlockTable, step: StepSize
) -> BlockResult:
    """A block of chunks in order: state (h,p,n) enters, `fresh (c,h,p,n)` replaces it where a sequence begins."""
    dtype = state.dtype
    x, B, C = (value.astype(dtype) for value in (tokens.x, tokens.B, tokens.C))
    dt = step_size(tokens.dt, parameters.dt_bias, step, dtype)
    dt = jnp.where(table.valid[..., None], dt, 0)
    sums = sums_since(dt * parameters.A, table.document)
    kept = leaves = arrives = None
    if table.document is not None and table.entering_document is not None:
        kept = table.document == table.document[:, -1:]
        arrives = table.document == table.entering_document[:, None]
        leaves = arrives[:, -1:]
    contribution = leaving_contribution(x, dt, B, sums, kept)
    decay = masked_exp(leaves, not_above_zero(sums[..., -1]))
    state, entering, leaving = _pass_states(state, fresh, table.first, decay, contribution)
    y = _within(x, dt, B, C, sums, table.document) + _across(C, sums, entering, arrives)
    return BlockResult(gated(y, x, parameters.D, tokens.z), state, entering, leaving)


def partial_state(parameters: Parameters, entering: Array, tokens: Tokens, valid: Array, step: StepSize) -> Array:
    """The state (h,p,n) after the valid rows (l,) of one chunk that starts with `entering (h,p,n)`."""
    dtype = entering.dtype
    dt = step_size(tokens.dt, parameters.dt_bias, step, dtype)
    dt = jnp.where(valid[:, None], dt, 0)[None]
    sums = sums_since(dt * parameters.A, None)
    contribution = leaving_contribution(tokens.x.astype(dtype)[None], dt, tokens.B.astype(dtype)[None], sums, None)
    return jnp.exp(not_above_zero(sums[0, :, -1]))[:, None, None] * entering + contribution[0]


def _within(x: Array, dt: Array, B: Array, C: Array, sums: Array, document: Array | None) -> Array:
    """sum_{m<=l} exp(sums_l - sums_m) dt_m (C_l . B_m) x_m -> (c,l,h,p)."""
    length, groups = x.shape[1], B.shape[2]
    mask = jnp.tril(jnp.ones((length, length), jnp.bool_))
    apart = jnp.tril(mask, -1)
    if document is not None:
        mask = (mask & same_document(document, document))[:, None]
    decay = masked_exp(mask, sums_between(sums[..., :, None], sums[..., None, :], apart))
    scores = jnp.einsum("clgn,cmgn->cglm", C, B, precision=PRECISION)
    weights = (decay * dt.swapaxes(1, 2)[..., None, :]).reshape(x.shape[0], groups, -1, length, length)
    weights = weights * scores[:, :, None]
    y = jnp.einsum("cgrlm,cmgrp->clgrp", weights, _grouped(x, groups), precision=PRECISION)
    return y.reshape(x.shape)


def _across(C: Array, sums: Array, entering: Array, arrives: Array | None) -> Array:
    """exp(sums_l) C_l S_entering -> (c,l,h,p)."""
    chunks, length, groups, _ = C.shape
    states = entering.reshape(chunks, groups, -1, *entering.shape[2:])
    y = jnp.einsum("clgn,cgrpn->clgrp", C, states, precision=PRECISION)
    decay = masked_exp(None if arrives is None else arrives[:, None, :], not_above_zero(sums))
    return y.reshape(chunks, length, *entering.shape[1:3]) * decay.swapaxes(1, 2)[..., None]


def _pass_states(
    state: Array, fresh: Array | None, first: Array, decay: Array, contribution: Array
) -> tuple[Array, Array, Array]:
    """S = decay * S + contribution, chunk by chunk; a select, not a product, starts a sequence."""
    starts = jnp.zeros_like(contribution) if fresh is None else fresh

    def one_chunk(carried: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        begins, start, chunk_decay, chunk_contribution = chunk
        entering = jnp.where(begins, start, carried)
        leaving = chunk_decay[:, None, None] * entering + chunk_contribution
        return leaving, (entering, leaving)

    state, (entering, leaving) = lax.scan(one_chunk, state, (first, starts, decay, contribution))
    return state, entering, leaving


def _grouped(x: Array, groups: int) -> Array:
    """(c,l,h,p) -> (c,l,g,h/g,p)."""
    return x.reshape(*x.shape[:2], groups, -1, x.shape[-1])
