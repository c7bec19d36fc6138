"""Scans on the Triton kernels through torch tensors on a CPU; to be run by `interpreter.interpreted`."""

import dataclasses

import numpy as np

from bridge import native_scan
from jax_ssd import settings, validate
from jax_ssd.implementations import triton_plan
from jax_ssd.problem import ScanResult
from jax_ssd.validate import PrefillCall, ScanCall, TokenCall
from tests.triton_decode import to_numpy, to_torch

_CACHED = ("cache", "slots", "has_initial_state", "checkpoint_slots")


def call_of(arguments):
    """The arguments of `chunk_scan` or `prefill` (with a cache), as a call to be checked."""
    picked = {name: value for name, value in arguments.items() if value is not None}
    shared = TokenCall(**{name: picked[name] for name in TokenCall._fields if name in picked})
    call = ScanCall(shared, **{name: picked[name] for name in ScanCall._fields if name in picked})
    if "cache" not in picked:
        return call
    cached = {name: picked.get(name) for name in (*_CACHED, "rounding")}
    return PrefillCall(call, **cached)


def checked(arguments):
    """(problem, canonical arrays)."""
    call = call_of(arguments)
    if isinstance(call, PrefillCall):
        return validate.prefill_problem(call), validate.prefill_arrays(call)
    return validate.scan_problem(call), validate.scan_arrays(call)


def named(problem, canonical):
    """Arrays by the names of a plan, as an implementation gets them; the bounds of a batch are known."""
    scan = getattr(canonical, "scan", canonical)
    made = scan.tokens._asdict() | scan.parameters._asdict()
    made |= {name: getattr(scan, name) for name in ("initial_states", "seq_idx", "checkpoint_positions")}
    made["cu_seqlens"] = scan.cu_seqlens
    if scan.cu_seqlens is None:
        made["cu_seqlens"] = np.arange(problem.num_seqs + 1, dtype=np.int32) * (problem.uniform_length or 0)
    rounding = getattr(canonical, "rounding", None)
    if problem.cache is not None:
        made |= {name: getattr(canonical, name) for name in _CACHED}
    if rounding is not None:
        one = {name: np.array([getattr(rounding, name)], np.int32) for name in ("layer", "head_offset")}
        made |= one | {"seeds": rounding.seeds}
    return {name: value for name, value in made.items() if value is not None}


def scan(arguments, tile=None):
    """y, final states (a prefill: the cache) and checkpoints; `tile` changes the tile that settings choose."""
    problem, canonical = checked(arguments)
    arrays = {name: to_torch(value) for name, value in named(problem, canonical).items()}
    rounding = arguments.get("rounding")
    total_heads = None if rounding is None else rounding.total_heads
    if tile is None:
        written = native_scan.scan(problem, arrays, total_heads)
    else:
        chosen = dataclasses.replace(settings.triton_scan_tile(problem, None), **tile)
        strides = triton_plan.dense_strides(problem)
        plan = triton_plan.scan_plan(problem, chosen, strides, upcast=True, total_heads=total_heads)
        written = native_scan.run_plan(plan, arrays)
    written = {name: to_numpy(value) for name, value in written.items()}
    return ScanResult(written["y"].reshape(arguments["x"].shape), written["final"], written.get("checkpoints"))
