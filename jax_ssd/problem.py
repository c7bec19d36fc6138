"""The legend and the frozen problems: shapes and options that have already been checked.

Letters, used in every shape, einsum and docstring:
    b batch   t token   s sequence   h head   p headdim   g group   n dstate   r ring position
    c chunk   l m row and column inside a chunk   k checkpoint   w state-cache slot
`A B C D` are always the SSD matrices. Head i reads group i // (h / g).

An implementation sees one canonical form. Scans are packed: a batch is flattened to tokens, its rows are the sequences
and `uniform_length` is their common length. Updates always have a token axis.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from jax import export

Array = Any  # a jax.Array, a tracer of one or, in `explain`, a jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """What an implementation may know of a device when it says whether it can serve a call.

    Args:
      platform: "cpu", "gpu" or "tpu".
      compute_capability: (major, minor) of an NVIDIA GPU, else None.
      multiprocessors: number of multiprocessors of a GPU, else None.
      shared_memory_per_block: bytes of shared memory that one block may ask for, else None.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    shared_memory_per_block: int | None = None


class Verdict(NamedTuple):
    """What one implementation says of a call: `reason` is None where it can serve it."""

    name: str
    reason: str | None
    configuration: dict[str, Any]


class Sizes(NamedTuple):
    """Sizes that every operation has."""

    num_heads: int
    headdim: int
    num_groups: int
    dstate: int


class StepSize(NamedTuple):
    """How dt is made: clip(softplus(dt + dt_bias), *limit), bias and softplus optional."""

    softplus: bool
    limit: tuple[float, float]


class Present(NamedTuple):
    """Which optional arrays a call has."""

    D: Literal["none", "head", "channel"] = "none"
    z: bool = False
    dt_bias: bool = False
    initial_states: bool = False
    seq_idx: bool = False


class CacheUse(NamedTuple):
    """How a call uses a state cache: its slots, its dtype and, where states are rounded, the number of rounds."""

    num_slots: int
    dtype: str
    rounding_rounds: int | None = None


@dataclasses.dataclass(frozen=True)
class ScanProblem:
    """A checked scan: `chunk_scan`, or `prefill` where `cache` is set."""

    sizes: Sizes
    num_tokens: int
    num_seqs: int
    uniform_length: int | None
    num_checkpoints: int | None
    dtype: str
    dt_dtype: str
    state_dtype: str
    step_size: StepSize
    present: Present
    chunk_size: int | None = None
    cache: CacheUse | None = None

    @property
    def op(self) -> str:
        return "chunk_scan" if self.cache is None else "prefill"


@dataclasses.dataclass(frozen=True)
class UpdateProblem:
    """A checked decode step: `selective_state_update`, or `replay_update` where `ring_size` is set."""

    sizes: Sizes
    batch: int
    num_tokens: int
    dtype: str
    dt_dtype: str
    step_size: StepSize
    present: Present
    cache: CacheUse
    write_slots: Literal["read", "last", "each"] = "read"
    ring_size: int | None = None

    @property
    def op(self) -> str:
        return "selective_state_update" if self.ring_size is None else "replay_update"


Problem = ScanProblem | UpdateProblem


class Parameters(NamedTuple):
    """Per-head parameters, already in the accumulator's dtype."""

    A: Array  # (h,)
    D: Array | None  # (h,) or (h,p)
    dt_bias: Array | None  # (h,)


class Tokens(NamedTuple):
    """Per-token inputs: (t,...) in a scan, (b,t,...) in an update."""

    x: Array  # (...,h,p)
    dt: Array  # (...,h)
    B: Array  # (...,g,n)
    C: Array  # (...,g,n)
    z: Array | None  # (...,h,p)


class ScanArrays(NamedTuple):
    """What `run` of an implementation receives for `chunk_scan`."""

    tokens: Tokens
    parameters: Parameters
    initial_states: Array | None  # (s,h,p,n), accumulator's dtype
    cu_seqlens: Array | None  # (s+1,) int32; None where uniform_length says it
    seq_idx: Array | None  # (t,) int32
    checkpoint_positions: Array | None  # (k,) int32


class PrefillArrays(NamedTuple):
    """What `run` of an implementation receives for `prefill`."""

    scan: ScanArrays
    cache: Array  # (w,h,p,n)
    slots: Array  # (s,) int32
    has_initial_state: Array | None  # (s,) bool
    checkpoint_slots: Array | None  # (k,) int32
    rounding: Any  # philox.StochasticRounding | None


class UpdateArrays(NamedTuple):
    """What `run` of an implementation receives for `selective_state_update`."""

    tokens: Tokens
    parameters: Parameters
    state: Array  # (w,h,p,n)
    read_slots: Array  # (b,) int32
    write_slots: Array | None  # (b,) or (b,t) int32; None: the slots read
    rounding: Any  # philox.StochasticRounding | None


class ReplayArrays(NamedTuple):
    """What `run` of an implementation receives for `replay_update`."""

    tokens: Tokens
    parameters: Parameters
    cache: Any  # replay.ReplayCache
    slots: Array  # (b,) int32
    rounding: Any  # philox.StochasticRounding | None


class ScanResult(NamedTuple):
    """`y` like x; `final_states (b|s,h,p,n)`; `checkpoint_states (k,h,p,n)` or None without positions."""

    y: Array
    final_states: Array
    checkpoint_states: Array | None


class PrefillResult(NamedTuple):
    """`y` like x; `cache (w,h,p,n)` with the written slots."""

    y: Array
    cache: Array


class UpdateResult(NamedTuple):
    """`y` like x; `state (w,h,p,n)` with the written slots."""

    y: Array
    state: Array


for _result in (ScanResult, PrefillResult, UpdateResult):
    export.register_namedtuple_serialization(_result, serialized_name=f"jax_ssd.{_result.__name__}")
