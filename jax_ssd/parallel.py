"""The scan over several devices: batch rows and heads apart, sequences by passing states between neighbours."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jax_ssd import api, discretize
from jax_ssd.problem import Array, ScanResult, StepSize

_OPTIONAL = ("D", "z", "dt_bias", "initial_states", "seq_idx")


def chunk_scan(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    mesh: Mesh,
    batch_axis: str | None = None,
    head_axis: str | None = None,
    sequence_axis: str | None = None,
    **options: Any,
) -> ScanResult:
    """`jax_ssd.chunk_scan` in batched form, with its arrays split over the axes of a mesh.

    Batch rows and heads need no communication. A split token axis costs one all-gather of a state and a decay for each
    device, and a second pass over the tokens: S_in = sum_i (product of the decays between) S_i.

    Args:
      x, dt, A, B, C, options: as in `jax_ssd.chunk_scan`, batched: x (b,t,h,p). Global arrays; how they are placed
        beforehand does not matter.
      mesh: jax.sharding.Mesh.
      batch_axis: mesh axis, or None, that divides b.
      head_axis: mesh axis that divides h. Groups are divided too, or each shard takes its one group.
      sequence_axis: mesh axis that divides t; seq_idx is then not supported.

    Returns:
      ScanResult; y is split like x, final_states over batch and heads.

    Raises:
      ValueError: an axis that the mesh lacks, or a size that an axis does not divide; also what `chunk_scan` raises.
      NotImplementedError: seq_idx with sequence_axis, packed sequences.

    Source: Dao and Gu 2024, arXiv 2405.21060, section 8.2 (sequence parallelism).
    """
    _check(x, B, mesh, {"batch_axis": batch_axis, "sequence_axis": sequence_axis, "head_axis": head_axis}, options)
    groups = _group_axis(B.shape[2], mesh, head_axis)
    tokens = PartitionSpec(batch_axis, sequence_axis, head_axis)
    grouped = PartitionSpec(batch_axis, sequence_axis, groups)
    states = PartitionSpec(batch_axis, head_axis)
    by_head = PartitionSpec(head_axis)
    specs = {
        "D": by_head,
        "z": tokens,
        "dt_bias": by_head,
        "initial_states": states,
        "seq_idx": PartitionSpec(batch_axis, sequence_axis),
    }
    arrays = {name: options.pop(name) for name in _OPTIONAL if options.get(name) is not None}
    local = functools.partial(
        _local_scan, head_axis=head_axis if groups is None else None, sequence_axis=sequence_axis, options=options
    )
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(tokens, tokens, by_head, grouped, grouped, {name: specs[name] for name in arrays}),
        out_specs=ScanResult(tokens, states, None),
    )
    return sharded(x, dt, A, B, C, arrays)


def _local_scan(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    arrays: dict[str, Array],
    *,
    head_axis: str | None,
    sequence_axis: str | None,
    options: dict[str, Any],
) -> ScanResult:
    """One shard's scan; with `head_axis`, B and C hold all groups and the shard's own is taken out."""
    if head_axis is not None and B.shape[2] > 1:
        shards = lax.axis_size(head_axis)
        own = lax.axis_index(head_axis) * B.shape[2] // shards
        B, C = (lax.dynamic_slice_in_dim(value, own, 1, axis=2) for value in (B, C))
    if sequence_axis is not None:
        incoming = _incoming_states(x, dt, A, B, C, arrays, sequence_axis, options)
        arrays = {**arrays, "initial_states": incoming}
    result = api.chunk_scan(x, dt, A, B, C, **arrays, **options)
    if sequence_axis is not None:
        last = lax.axis_index(sequence_axis) == lax.axis_size(sequence_axis) - 1
        final = lax.psum(jnp.where(last, result.final_states, 0), sequence_axis)
        result = result._replace(final_states=final)
    return result


def _incoming_states(
    x: Array, dt: Array, A: Array, B: Array, C: Array, arrays: dict[str, Array], axis: str, options: dict[str, Any]
) -> Array:
    """The state (b,h,p,n) that enters this shard's tokens: those before it, each decayed by the shards between."""
    given = {name: value for name, value in arrays.items() if name == "dt_bias"}
    own = api.chunk_scan(x, dt, A, B, C, **given, **{**options, "state_dtype": None}).final_states
    step = StepSize(options.get("dt_softplus", False), options.get("dt_limit", (0.0, jnp.inf)))
    bias = None if arrays.get("dt_bias") is None else arrays["dt_bias"].astype(own.dtype)
    total = jnp.sum(discretize.step_size(dt, bias, step, own.dtype) * A.astype(own.dtype), axis=1)
    states, decays = lax.all_gather((own, jnp.exp(total)), axis)
    here = lax.axis_index(axis)
    initial = arrays.get("initial_states")
    incoming = jnp.zeros_like(own) if initial is None else initial.astype(own.dtype)
    for shard in range(lax.axis_size(axis)):
        passed = decays[shard][..., None, None] * incoming + states[shard]
        incoming = jnp.where(shard < here, passed, incoming)
    return incoming


def _group_axis(num_groups: int, mesh: Mesh, head_axis: str | None) -> str | None:
    """The axis that splits the groups; None where every shard reads one group of a whole array."""
    if head_axis is None:
        return None
    shards = mesh.shape[head_axis]
    if num_groups % shards == 0:
        return head_axis
    if shards % num_groups:
        raise ValueError(f"head_axis: expected {shards} shards to divide {num_groups} groups, or the reverse.")
    return None


def _check(x: Array, B: Array, mesh: Mesh, axes: dict[str, str | None], options: dict[str, Any]) -> None:
    """Refuse what has no meaning here before anything is traced."""
    for name, axis in axes.items():
        if axis is not None and axis not in mesh.shape:
            raise ValueError(f"{name}: expected one of the mesh's axes {tuple(mesh.shape)}, got {axis!r}.")
    if options.get("cu_seqlens") is not None or getattr(x, "ndim", 4) != 4 or getattr(B, "ndim", 4) != 4:
        raise NotImplementedError("cu_seqlens: `parallel.chunk_scan` takes the batched form only, x (b, t, h, p).")
    if options.get("seq_idx") is not None and axes["sequence_axis"] is not None:
        raise NotImplementedError("seq_idx: not supported together with sequence_axis.")
    for dimension, name in enumerate(axes):
        axis = axes[name]
        if axis is not None and x.shape[dimension] % mesh.shape[axis]:
            raise ValueError(
                f"{name}: expected an axis that divides x's size {x.shape[dimension]}, got {mesh.shape[axis]} shards."
            )
