"""Reading and writing rows by index where an index may be padding: negative or out of range never touches a row."""

from __future__ import annotations

import jax.numpy as jnp

from jax_ssd.philox import StochasticRounding
from jax_ssd.problem import Array


def rows_or_end(indices: Array, size: int) -> Array:
    """Indices with every invalid one moved to `size`, where gathers fill and scatters drop."""
    return jnp.where((indices >= 0) & (indices < size), indices, size)


def gather(values: Array, indices: Array) -> Array:
    """values[indices], zeros where an index is invalid."""
    if values.shape[0] == 0:
        return jnp.zeros((*indices.shape, *values.shape[1:]), values.dtype)
    return values.at[rows_or_end(indices, values.shape[0])].get(mode="fill", fill_value=0)


def scatter(values: Array, indices: Array, rows: Array) -> Array:
    """values with rows written at indices, in values' dtype; invalid indices write nothing."""
    if values.shape[0] == 0:
        return values
    return values.at[rows_or_end(indices, values.shape[0])].set(rows.astype(values.dtype), mode="drop")


def accumulate(values: Array, indices: Array, rows: Array) -> Array:
    """values with rows added at indices that occur once; invalid indices add nothing."""
    if values.shape[0] == 0:
        return values
    return values.at[rows_or_end(indices, values.shape[0])].add(rows.astype(values.dtype), mode="drop")


def store(
    pool: Array, indices: Array, states: Array, rounding: StochasticRounding | None, step: int | Array = 0
) -> Array:
    """The pool (w,h,p,n) with states (b,h,p,n) stored in its dtype, rounded to nearest or as `rounding` says."""
    if rounding is not None:
        states = rounding.round(states, indices, pool.dtype, step=step)
    return scatter(pool, indices, states)
