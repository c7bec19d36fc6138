"""What a Triton decode step launches and with what: computed once, without a framework, for both launchers."""

from __future__ import annotations

import math
from typing import Any

from jax_ssd.implementations.triton_plan import Buffer, Launch, Plan
from jax_ssd.problem import UpdateProblem
from jax_ssd.settings import TritonUpdateTile, next_power_of_two

# The arrays of a ReplayCache, in its order; a ring's tokens have names of their own here.
CACHE_FIELDS = ("state", "ring_x", "ring_dt", "ring_B", "start", "length", "last")

# Rows of the smallest matrix product; as many tokens as a call may have.
_TOKENS_BLOCK = 16


def update_plan(
    problem: UpdateProblem,
    tile: TritonUpdateTile,
    *,
    native: bool,
    layers: int = 1,
    total_heads: int | None = None,
    shifted: bool = False,
    overlap: bool = False,
) -> Plan:
    """The one launch of `selective_state_update`, in place on the state.

    Args:
      problem: the checked call.
      tile: how the state is cut.
      native: round in PTX; False for Triton's interpreter.
      layers: rows of the seeds table.
      total_heads: heads of the whole model, where rounding counts them.
      shifted: whether there is a head_offset to add.
      overlap: begin while the launch before ends (compute capability 9.0); the launcher has to ask for it too.
    """
    present, stores, sizes = problem.present, problem.write_slots, problem.sizes
    rounded = problem.cache.rounding_rounds is not None
    programs, tiles = _programs(problem, tile)
    constants = _constants(problem, tile, native, layers, total_heads, shifted)
    constants |= dict(STORES=stores, TILES=tiles, OVERLAP=overlap)
    several = problem.num_tokens > 1
    if several:
        constants |= dict(KIND=_product(problem), TOKENS_BLOCK=_TOKENS_BLOCK)
    left_out = ("VECTOR",) if several else ("TOKENS",)
    launch = Launch(
        kernel="several_tokens_update" if several else "selective_state_update",
        programs=programs,
        inputs=(
            *("state", "x", "dt", "B", "C", "A", "D" if present.D != "none" else "A", "z" if present.z else "x"),
            *("dt_bias" if present.dt_bias else "A", "read_slots", "write_slots" if stores != "read" else "read_slots"),
            *(("seeds", "layer") if rounded else ("read_slots",) * 2),
            "head_offset" if shifted else "read_slots",
        ),
        numbers=(),
        outputs=("y", "new_state"),
        constants={name: value for name, value in constants.items() if name not in left_out},
        num_warps=tile.num_warps,
        num_stages=1,
    )
    state = (problem.cache.num_slots, sizes.num_heads, sizes.headdim, sizes.dstate)
    y = Buffer((problem.batch, problem.num_tokens, sizes.num_heads, sizes.headdim), problem.dtype)
    return Plan((launch,), {"y": y, "new_state": Buffer(state, problem.cache.dtype)}, {"new_state": "state"})


def replay_plan(
    problem: UpdateProblem,
    tile: TritonUpdateTile,
    *,
    native: bool,
    layers: int = 1,
    total_heads: int | None = None,
    shifted: bool = False,
    overlap: bool = False,
) -> Plan:
    """The one launch of `replay_update`, in place on the cache; arguments as in `update_plan`."""
    present, ring = problem.present, problem.ring_size or 0
    rounded = problem.cache.rounding_rounds is not None
    constants = _constants(problem, tile, native, layers, total_heads, shifted)
    sizes = problem.sizes
    programs, tiles = _programs(problem, tile)
    launch = Launch(
        kernel="replay_update",
        programs=programs,
        inputs=(
            *CACHE_FIELDS,
            *("x", "dt", "B", "C", "A", "D" if present.D != "none" else "A", "z" if present.z else "x"),
            *("dt_bias" if present.dt_bias else "A", "slots"),
            *(("seeds", "layer") if rounded else ("slots",) * 2),
            "head_offset" if shifted else "slots",
        ),
        numbers=(),
        outputs=("y", *(f"new_{name}" for name in CACHE_FIELDS)),
        constants=constants
        | dict(
            TILES=tiles,
            OVERLAP=overlap,
            RING=ring,
            RING_BLOCK=max(16, next_power_of_two(ring)),  # rows of the smallest matrix product
            TOKENS_BLOCK=next_power_of_two(problem.num_tokens),
            HEADS_BLOCK=next_power_of_two(sizes.num_heads),
            KEYS_BLOCK=next_power_of_two(sizes.num_groups * sizes.dstate),
        ),
        num_warps=tile.num_warps,
        num_stages=1,
    )
    return Plan((launch,), _replay_buffers(problem), {f"new_{name}": name for name in CACHE_FIELDS})


def _replay_buffers(problem: UpdateProblem) -> dict[str, Buffer]:
    """What a replay step writes: y and the whole cache."""
    sizes, ring = problem.sizes, problem.ring_size or 0
    slots = problem.cache.num_slots
    cursor = Buffer((slots,), "int32")
    return dict(
        y=Buffer((problem.batch, problem.num_tokens, sizes.num_heads, sizes.headdim), problem.dtype),
        new_state=Buffer((slots, sizes.num_heads, sizes.headdim, sizes.dstate), problem.cache.dtype),
        new_ring_x=Buffer((slots, ring, sizes.num_heads, sizes.headdim), problem.dtype),
        new_ring_dt=Buffer((slots, ring, sizes.num_heads), "float32"),
        new_ring_B=Buffer((slots, ring, sizes.num_groups, sizes.dstate), problem.dtype),
        new_start=cursor,
        new_length=cursor,
        new_last=cursor,
    )


def _programs(problem: UpdateProblem, tile: TritonUpdateTile) -> tuple[int, int]:
    """Programs, and tiles of each: as many as asked for, or as share their group's B and C evenly."""
    sizes = problem.sizes
    splits = -(-sizes.headdim // tile.rows)
    tiles = math.gcd(tile.tiles, sizes.num_heads // sizes.num_groups * splits)
    return problem.batch * sizes.num_heads * splits // tiles, tiles


def _product(problem: UpdateProblem) -> str:
    """How C and the state become operands of one matrix product without losing digits."""
    dtypes = (problem.dtype, problem.cache.dtype)
    if dtypes == ("bfloat16", "float16"):
        return "scaled"
    return "same" if dtypes[0] == dtypes[1] != "float32" else "wide"


def _constants(
    problem: UpdateProblem,
    tile: TritonUpdateTile,
    native: bool,
    layers: int,
    total_heads: int | None,
    shifted: bool,
) -> dict[str, Any]:
    sizes, present = problem.sizes, problem.present
    low, high = problem.step_size.limit
    blocks = -(-sizes.dstate // tile.columns)
    return dict(
        SLOTS=problem.cache.num_slots,
        HEADS=sizes.num_heads,
        HEADDIM=sizes.headdim,
        GROUPS=sizes.num_groups,
        DSTATE=sizes.dstate,
        TOKENS=problem.num_tokens,
        LAYERS=layers,
        TOTAL_HEADS=total_heads or sizes.num_heads,
        ROUNDS=problem.cache.rounding_rounds or 0,
        SKIP=present.D,
        GATED=present.z,
        BIASED=present.dt_bias,
        SHIFTED=shifted,
        SOFTPLUS=problem.step_size.softplus,
        LOW=float(low),
        HIGH=float(high),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCKS=blocks,
        VECTOR=4 if problem.cache.dtype == "float32" else 8,
        MASKED=sizes.headdim % tile.rows != 0 or sizes.dstate % tile.columns != 0,
        NATIVE=native,
    )
