"""Which kernels a Triton scan launches and with what: computed once, without a framework, for both launchers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax_ssd.problem import ScanProblem
from jax_ssd.settings import TritonScanTile, next_power_of_two

RESULTS = ("y", "final", "checkpoints")  # buffers that a caller gets; the others are scratch

_SEQS = 128  # sequences that a program looks at together when it finds its own
_PREPARE_ELEMENTS = 2048


class Strides(NamedTuple):
    """Elements between tokens; inside a token arrays are dense."""

    x: int
    dt: int
    B: int
    C: int
    z: int


class Buffer(NamedTuple):
    """An array that a launch writes."""

    shape: tuple[int, ...]
    dtype: str


class Launch(NamedTuple):
    """A kernel's call: arrays by name in the kernel's order, inputs, numbers, outputs."""

    kernel: str
    programs: int
    inputs: tuple[str, ...]
    numbers: tuple[int, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """Launches in order, what they write, and which written arrays share the memory of an input: {output: input}."""

    launches: tuple[Launch, ...]
    buffers: dict[str, Buffer]
    aliases: dict[str, str]


def dense_strides(problem: ScanProblem) -> Strides:
    """Strides of arrays without gaps."""
    sizes = problem.sizes
    heads, groups = sizes.num_heads * sizes.headdim, sizes.num_groups * sizes.dstate
    return Strides(x=heads, dt=sizes.num_heads, B=groups, C=groups, z=heads)


def places(problem: ScanProblem, length: int) -> int:
    """Places of blocks of `length` tokens, counted from each sequence's start (kernels/triton/scan_prepare.py)."""
    seqs, tokens = problem.num_seqs, problem.num_tokens
    if length == 0:
        return seqs
    last = problem.uniform_length if problem.uniform_length is not None else tokens if seqs == 1 else None
    if last is not None:
        return (tokens - last) // length + seqs - 1 + max(1, -(-last // length))
    return tokens // length + seqs


def scan_plan(
    problem: ScanProblem, tile: TritonScanTile, strides: Strides, *, upcast: bool, total_heads: int | None = None
) -> Plan:
    """The plan of a scan; `upcast` is for Triton's interpreter, `total_heads` counts the whole model's."""
    buffers = _results(problem) | _scratch(problem, tile)
    launches = [_prepare(problem, tile, strides)]
    if tile.segment:
        launches.append(_segment_states(problem, tile, strides, upcast))
    launches.append(_scan(problem, tile, strides, upcast, total_heads))
    return Plan(tuple(launches), buffers, {"final": "cache"} if problem.cache else {})


def _results(problem: ScanProblem) -> dict[str, Buffer]:
    sizes = problem.sizes
    state = (sizes.num_heads, sizes.headdim, sizes.dstate)
    y = Buffer((problem.num_tokens, *state[:2]), problem.dtype)
    if problem.cache is not None:
        return {"y": y, "final": Buffer((problem.cache.num_slots, *state), problem.cache.dtype)}
    made = {"y": y, "final": Buffer((problem.num_seqs, *state), problem.state_dtype)}
    if problem.num_checkpoints is not None:
        made["checkpoints"] = Buffer((problem.num_checkpoints, *state), problem.state_dtype)
    return made


def _scratch(problem: ScanProblem, tile: TritonScanTile) -> dict[str, Buffer]:
    sizes, tokens = problem.sizes, problem.num_tokens
    per_token = Buffer((sizes.num_heads, tokens), "float32")
    made = {"step": per_token, "sums": per_token, "unused": Buffer((1,), "int32")}
    if problem.present.seq_idx:
        made["since"] = Buffer((tokens,), "int32")
    if tile.segment:
        rows = places(problem, tile.segment)
        made["local"] = Buffer((rows, sizes.num_heads, sizes.headdim, sizes.dstate), "float32")
        made["decay"] = Buffer((rows, sizes.num_heads), "float32")
    return made


def _prepare(problem: ScanProblem, tile: TritonScanTile, strides: Strides) -> Launch:
    present, heads = problem.present, problem.sizes.num_heads
    block = min(next_power_of_two(heads), max(1, _PREPARE_ELEMENTS // tile.chunk))
    low, high = problem.step_size.limit
    return Launch(
        kernel="prepare",
        programs=places(problem, tile.chunk) * -(-heads // block),
        inputs=(
            "dt",
            "A",
            _if(present.dt_bias, "dt_bias"),
            "cu_seqlens",
            _if(present.seq_idx, "seq_idx", "cu_seqlens"),
        ),
        numbers=(problem.num_tokens, problem.num_seqs),
        outputs=("step", "sums", _if(present.seq_idx, "since", "unused")),
        constants=dict(
            NUM_HEADS=heads,
            DT_STRIDE=strides.dt,
            HAS_BIAS=present.dt_bias,
            SOFTPLUS=problem.step_size.softplus,
            LOW=float(low),
            HIGH=float(high),
            DOCUMENTS=present.seq_idx,
            CHUNK=tile.chunk,
            HEADS=block,
            SEQS=_SEQS,
        ),
        num_warps=4,
        num_stages=1,
    )


def _segment_states(problem: ScanProblem, tile: TritonScanTile, strides: Strides, upcast: bool) -> Launch:
    return Launch(
        kernel="segment_states",
        programs=_programs(problem, tile),
        inputs=("x", "B", _initial(problem), "cu_seqlens", *_slots(problem), "sums", "step", _since(problem)),
        numbers=_numbers(problem)[:3],
        outputs=("local", "decay"),
        constants=_shared_constants(problem, tile, strides, upcast),
        num_warps=tile.state_warps,
        num_stages=tile.state_stages,
    )


def _scan(
    problem: ScanProblem, tile: TritonScanTile, strides: Strides, upcast: bool, total_heads: int | None
) -> Launch:
    present, cache = problem.present, problem.cache
    segments = ("local", "decay") if tile.segment else ("A", "A")
    kept = problem.num_checkpoints is not None
    rounds = 0 if cache is None else cache.rounding_rounds or 0
    return Launch(
        kernel="scan",
        programs=_programs(problem, tile),
        inputs=(
            *("x", "B", "C", _if(present.z, "z", "x"), _if(present.D != "none", "D"), _initial(problem), "cu_seqlens"),
            *_slots(problem),
            _if(kept, "checkpoint_positions", "cu_seqlens"),
            _if(kept and cache is not None, "checkpoint_slots", "cu_seqlens"),
            *(("seeds", "layer", "head_offset") if rounds else ("cu_seqlens",) * 3),
            *("sums", "step", _since(problem), *segments),
        ),
        numbers=_numbers(problem),
        outputs=("y", "final", _if(kept and cache is None, "checkpoints", "unused")),
        constants=_shared_constants(problem, tile, strides, upcast)
        | dict(
            C_STRIDE=strides.C,
            Z_STRIDE=strides.z,
            SKIP=present.D,
            HAS_Z=present.z,
            CHECKPOINTS="none" if not kept else "array" if cache is None else "cache",
            ROUNDS=rounds,
            TOTAL_HEADS=total_heads or problem.sizes.num_heads,
            STAGES=tile.num_stages,
            TOUCH=tile.touch and not upcast and problem.dtype != "float32",
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _shared_constants(problem: ScanProblem, tile: TritonScanTile, strides: Strides, upcast: bool) -> dict[str, Any]:
    sizes = problem.sizes
    return dict(
        NUM_HEADS=sizes.num_heads,
        NUM_GROUPS=sizes.num_groups,
        HEADDIM=sizes.headdim,
        DSTATE=sizes.dstate,
        X_STRIDE=strides.x,
        B_STRIDE=strides.B,
        INITIAL=problem.present.initial_states,
        CACHE=problem.cache is not None,
        DOCUMENTS=problem.present.seq_idx,
        PRECISION="tf32x3" if problem.dtype == "float32" else "tf32",
        UPCAST=upcast,
        CHUNK=tile.chunk,
        SEGMENT=tile.segment,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        SEQS=_SEQS,
    )


def _programs(problem: ScanProblem, tile: TritonScanTile) -> int:
    return places(problem, tile.segment) * problem.sizes.num_heads * math.ceil(problem.sizes.headdim / tile.rows)


def _numbers(problem: ScanProblem) -> tuple[int, int, int, int]:
    slots = problem.cache.num_slots if problem.cache else 0
    return problem.num_tokens, problem.num_seqs, slots, problem.num_checkpoints or 0


def _initial(problem: ScanProblem) -> str:
    return "cache" if problem.cache else _if(problem.present.initial_states, "initial_states")


def _slots(problem: ScanProblem) -> tuple[str, str]:
    if problem.cache is None:
        return "cu_seqlens", "cu_seqlens"
    return "slots", _if(problem.present.initial_states, "has_initial_state", "slots")


def _since(problem: ScanProblem) -> str:
    return _if(problem.present.seq_idx, "since", "cu_seqlens")


def _if(condition: bool, name: str, otherwise: str = "A") -> str:
    """An input's name, or that of an array that stands in for it and is not read."""
    return name if condition else otherwise
