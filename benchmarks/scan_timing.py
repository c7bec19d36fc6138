"""Plans of the rows, compiled in parallel, and what timing them needs: rotated inputs, graph replays, host time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from benchmarks.scan_rows import DEVICE, Row
from bridge.native_scan import run_plan
from jax_ssd import settings
from jax_ssd.implementations import triton_plan
from jax_ssd.implementations.triton_plan import Launch, Plan
from jax_ssd.problem import CacheUse
from jax_ssd.settings import TritonScanTile

Tensors = dict[str, torch.Tensor]
Call = Callable[[], Any]

# Inputs and outputs of a pass over all sets: twice an H200's L2 cache.
BYTES_PAST_L2 = 120e6


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 132


def tile_of(row: Row, **changes: Any) -> TritonScanTile:
    tile = settings.triton_scan_tile(row.problem(), multiprocessors())
    assert tile is not None
    return dataclasses.replace(tile, **changes)


def plan_of(row: Row, tile: TritonScanTile, cache: CacheUse | None = None) -> Plan:
    problem = row.problem(cache)
    return triton_plan.scan_plan(problem, tile, triton_plan.dense_strides(problem), upcast=DEVICE == "cpu")


def input_sets(row: Row) -> list[Tensors]:
    """Enough copies of the inputs that one pass over all of them is larger than the L2 cache."""
    first = row.arrays(0)
    size = sum(nbytes(value) for value in first.values()) + nbytes(first["x"])
    return [first, *(row.arrays(seed) for seed in range(1, max(1, int(BYTES_PAST_L2 // size) + 1)))]


def nbytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def graph_time(calls: list[Call], replays: int = 15) -> float:
    """Median microseconds of a call: all calls captured in one graph, replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times[3:])


def host_time(call: Call, repeats: int = 60) -> float:
    """Median microseconds that the host is busy with a call; the GPU works behind it."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def time_tile(row: Row, tile: TritonScanTile, sets: list[Tensors], only: str | None = None) -> float:
    """Microseconds of a scan, or of one of its launches."""
    plan = plan_of(row, tile)
    if only is not None:
        plan = plan._replace(launches=tuple(launch for launch in plan.launches if launch.kernel == only))
        scratch = {
            name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype), device=DEVICE) for name, b in plan.buffers.items()
        }
        return graph_time(
            [lambda arrays=arrays: run_plan(plan._replace(buffers={}), arrays | scratch) for arrays in sets]
        )
    return graph_time([lambda arrays=arrays: run_plan(plan, arrays) for arrays in sets])


def slow_decay_time(row: Row, tile: TritonScanTile) -> float:
    """Microseconds where states hardly decay: what enters a segment is then made of all the segments before it."""
    slow = dataclasses.replace(row, dt_scale=1e-4)
    return round(time_tile(slow, tile, input_sets(slow)), 1)


class Work(NamedTuple):
    """A plan to compile."""

    row: Row
    tile: TritonScanTile
    cache: CacheUse | None = None


def _types(work: Work, plan: Plan) -> dict[str, torch.dtype]:
    """The dtype of every array that is not int32."""
    types: dict[str, torch.dtype] = {}
    types |= {name: getattr(torch, work.row.dtype) for name in ("x", "B", "C", "dt", "z")}
    types |= dict.fromkeys(("A", "D", "dt_bias", "initial_states"), torch.float32)
    types |= {"seeds": torch.uint32, "has_initial_state": torch.bool}
    types |= {name: getattr(torch, buffer.dtype) for name, buffer in plan.buffers.items()}
    if work.cache is not None:
        types["cache"] = getattr(torch, work.cache.dtype)
    return types


def _warm(launch: Launch, types: dict[str, torch.dtype]) -> Any:
    from jax_ssd.kernels.triton import scan as kernels

    arguments = [types.get(name, torch.int32) for name in (*launch.inputs, *launch.outputs)]
    count = len(launch.inputs)
    return getattr(kernels, launch.kernel).warmup(
        *arguments[:count], *launch.numbers, *arguments[count:], **launch.constants,
        num_warps=launch.num_warps, num_stages=launch.num_stages, grid=(1,),
    )  # fmt: skip


def resources(row: Row, tile: TritonScanTile) -> dict[str, dict[str, int]]:
    """What each launch's threads and blocks take."""
    plan = plan_of(row, tile)
    types = _types(Work(row, tile), plan)
    found = {}
    for launch in plan.launches:
        compiled = _warm(launch, types)
        _ = compiled.run  # loads the kernel, which counts its registers
        found[launch.kernel] = dict(
            registers=compiled.n_regs, spills=compiled.n_spills, shared_bytes=compiled.metadata.shared,
            programs=launch.programs, warps=launch.num_warps,
        )  # fmt: skip
    return found


def compile_work(work: Work) -> str | None:
    """In a process of its own: compile a plan's kernels into the disk cache."""
    plan = plan_of(*work)
    try:
        for launch in plan.launches:
            _warm(launch, _types(work, plan))
    except Exception as fault:  # a tile that cannot be is a result, not a failure of the run
        return f"{work.row.name}: {type(fault).__name__}: {fault}"[:200]
    return None


def workers() -> concurrent.futures.ProcessPoolExecutor:
    """As many processes as there are cores, to fill Triton's disk cache from."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context)


def compile_all(work: Iterable[Work]) -> list[str]:
    """Compile plans in parallel; returns what failed."""
    with workers() as pool:
        return [fault for fault in pool.map(compile_work, dict.fromkeys(work), chunksize=2) if fault]
