"""A decode row as a jitted JAX call on the arrays of torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.update_rows import Row
from jax_ssd.implementations import triton_update
from jax_ssd.philox import StochasticRounding
from jax_ssd.problem import Parameters, Tokens, UpdateArrays


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy on JAX's device, in memory of JAX's own."""
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.view(torch.int16).cpu().numpy().view(jnp.bfloat16))
    return jnp.asarray(tensor.cpu().numpy())


def step_of(row: Row, arrays: dict[str, torch.Tensor]) -> tuple[Any, tuple[jax.Array, ...]]:
    """(jitted function of (state, layer, seeds, others) that gives y and the state, in place; its arguments)."""
    problem = row.problem()
    names = ("x", "dt", "B", "C", "A", "D", "dt_bias", "z", "read_slots")
    others = {name: to_jax(arrays[name]) for name in names}

    def step(state: jax.Array, layer: jax.Array, seeds: jax.Array, others: dict[str, jax.Array]) -> Any:
        tokens = Tokens(*(others[name] for name in ("x", "dt", "B", "C")), others["z"] if row.z else None)
        parameters = Parameters(
            others["A"], others["D"] if row.D != "none" else None, others["dt_bias"] if row.bias else None
        )
        rounding = None if row.rounds is None else StochasticRounding(seeds, layer, row.rounds)
        return triton_update.run(problem, UpdateArrays(tokens, parameters, state, others["read_slots"], None, rounding))

    seeds = jnp.asarray(arrays["seeds"].cpu().numpy().view(np.uint32))
    return jax.jit(step, donate_argnums=0), (to_jax(arrays["state"]), jnp.int32(row.layer), seeds, others)
