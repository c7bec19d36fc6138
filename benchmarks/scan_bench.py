"""The chosen tile of each row beside the peers that can be imported: a JSON line a row, after one about the run."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import scan_peers
from benchmarks.scan_rows import DISTINCT, FLOOR, SPEED, TOLERANCE, VLLM, Row, error, plain_oracle
from benchmarks.scan_timing import (
    Tensors,
    Work,
    compile_work,
    graph_time,
    host_time,
    input_sets,
    nbytes,
    plan_of,
    resources,
    slow_decay_time,
    tile_of,
    time_tile,
    workers,
)
from bridge.native_scan import scan
from jax_ssd.settings import TritonScanTile

Emit = Callable[..., None]

# An H200: bytes a second of a copy, and bfloat16 operations a second of a large product (PyTorch).
COPY, PRODUCT = 4.27e12, 700e12
# What was taken of other libraries, where they were copied rather than installed.
PEERS = Path(".peers/MANIFEST.json")
NAMED = ("vllm", "mamba-ssm", "jax-linear-attention")
# How much worse than the best of mamba_ssm and vLLM an error may be.
AS_GOOD = 1.05


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for name in ("torch", "triton", "jax", "jaxlib", "jax-triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if PEERS.is_file():
        found |= {name: entry["version"] for name, entry in json.loads(PEERS.read_text()).items() if name in NAMED}
    return found


def run(rows: tuple[Row, ...], emit: Emit, budget: float, commit: str) -> None:
    """Compile everything in parallel, then time row after row until the budget (seconds) is used up."""
    start = time.time()
    emit(
        bench="run", date=time.strftime("%Y-%m-%d"), commit=commit,
        command=" ".join(["python -m benchmarks.gpu_scan", *sys.argv[1:]]),
        machine=torch.cuda.get_device_name(), multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
        versions=versions(),
    )  # fmt: skip
    programs = _compile(rows, emit)
    emit(bench="compiled", seconds=round(time.time() - start, 1))
    for row in rows:
        if time.time() - start > budget:
            emit(bench=row.name, skipped="out of time")
            continue
        emit(**_row(row, programs), seconds=round(time.time() - start, 1))
        torch.cuda.empty_cache()


def _compile(rows: tuple[Row, ...], emit: Emit) -> dict[tuple[str, str], Any]:
    """Kernels of ours and of the peers into Triton's disk cache; JAX's programs, which are returned."""
    candidates = [
        scan_peers.Candidate(name, chunk, SPEED[index], pick)
        for index, (name, chunk) in itertools.product(DISTINCT, scan_peers.TORCH_PEERS)
        for pick in range(scan_peers.MOST_CONFIGURATIONS[name])
        if SPEED[index] in rows
    ]
    with workers() as pool:
        own = [pool.submit(compile_work, Work(row, tile_of(row))) for row in rows]
        peers = [pool.submit(scan_peers.compile_candidate, candidate) for candidate in candidates]
        programs = _jax_programs(rows)
        crashes = [task.exception() for task in (*own, *peers)]
        faults = {task.result() for task, crash in zip((*own, *peers), crashes, strict=True) if crash is None}
    emit(
        bench="faults",
        faults=sorted(fault for fault in faults if fault)[:8],
        crashes=len(crashes) - crashes.count(None),
    )
    return programs


def _jax_programs(rows: tuple[Row, ...]) -> dict[tuple[str, str], Any]:
    """Programs by peer and row, traced here and compiled in threads; the fault where that fails."""
    programs: dict[tuple[str, str], Any] = {}
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for row, name in itertools.product(rows, scan_peers.JAX_PEERS):
            try:
                compiled, num_sets = scan_peers.jax_program(name, row, len(input_sets(row)))
                programs[name, row.name] = (threads.submit(compiled), num_sets)
            except Exception as fault:
                programs[name, row.name] = f"{type(fault).__name__}: {fault}"[:120]
    for key, made in programs.items():
        if not isinstance(made, str):
            try:
                programs[key] = scan_peers.Program(made[0].result(), made[1])
            except Exception as fault:
                programs[key] = f"{type(fault).__name__}: {fault}"[:120]
    return programs


def _row(row: Row, programs: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """Errors first: no figure where ours is too large."""
    sets, tile, problem = input_sets(row), tile_of(row), row.problem()
    expected = plain_oracle(row, sets[0])
    record: dict[str, Any] = dict(bench=row.name, tile=dataclasses.asdict(tile), launches=3 if tile.segment else 2)
    got = scan(problem, sets[0])
    record["error"] = _errors((got["y"], got["final"]), expected)
    if max(record["error"]) > TOLERANCE[row.dtype]:
        return record | {"fault": "too far from float64"}
    taken = graph_time([lambda arrays=arrays: scan(problem, arrays) for arrays in sets])
    record |= dict(us=round(taken, 1), host_us=round(host_time(lambda: scan(problem, sets[0])), 1))
    record["slow_decay_us"] = slow_decay_time(row, tile)
    record |= dict(floor_us=FLOOR[row.name], over_floor=round(taken / FLOOR[row.name], 2))
    record |= dict(goal_us=round(VLLM[row.name] / 1.6), **_traffic(row, tile, sets[0], taken))
    for kernel, used in resources(row, tile).items():
        record[kernel] = used | {"us": round(time_tile(row, tile, sets, only=kernel), 1)}
    peers = _peers(row, sets, programs, expected)
    for found in peers.values():
        found |= {"ratio": round(found["us"] / taken, 2)} if "us" in found else {}
    others = [peers[name]["error"] for name in ("vllm_triton", "mamba_ssm") if "us" in peers[name]]
    good = [mine <= AS_GOOD * min(theirs) for mine, *theirs in zip(record["error"], *others, strict=True) if theirs]
    return record | {"peers": peers, "as_good_as_peers": all(good) if good else None}


def _errors(found: tuple[torch.Tensor, torch.Tensor], expected: Tensors) -> list[float]:
    """Of y and of the final states, to four digits."""
    return [float(f"{error(mine, expected[name]):.4g}") for name, mine in zip(("y", "final"), found, strict=True)]


def _peers(
    row: Row, sets: list[Tensors], programs: dict[tuple[str, str], Any], expected: Tensors
) -> dict[str, dict[str, Any]]:
    """Microseconds and errors by name; a fault where a peer cannot."""
    found: dict[str, dict[str, Any]] = {}
    for name, chunk in scan_peers.TORCH_PEERS:
        try:
            call = scan_peers.torch_peer(name, chunk, row)
            taken = graph_time([lambda arrays=arrays, call=call: call(arrays) for arrays in sets])
        except Exception as fault:
            found.setdefault(name, {"fault": f"{type(fault).__name__}: {fault}"[:120]})
            continue
        if "us" not in found.get(name, {}) or taken < found[name]["us"]:
            host = host_time(lambda call=call: call(sets[0]), repeats=20)
            errors = _errors(call(sets[0]), expected)
            found[name] = dict(us=round(taken, 1), host_us=round(host, 1), chunk=chunk, error=errors)
    for name in scan_peers.JAX_PEERS:
        program = programs[name, row.name]
        if isinstance(program, str):
            found[name] = {"fault": program}
            continue
        taken, results = scan_peers.loop_time(program, sets)
        found[name] = dict(us=round(taken, 1), error=_errors(results, expected))
    return found


def _traffic(row: Row, tile: TritonScanTile, arrays: Tensors, taken: float) -> dict[str, Any]:
    """Bytes that every launch reads and writes once, those of inputs and results, and the shares of the GPU's peaks."""
    plan = plan_of(row, tile)
    sizes = {name: nbytes(value) for name, value in arrays.items()}
    for name, buffer in plan.buffers.items():
        count = torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype), device="meta")
        sizes[name] = nbytes(count)
    moved = sum(sizes[name] for launch in plan.launches for name in {*launch.inputs, *launch.outputs})
    needed = sum(sizes[name] for name in (*arrays, "y", "final"))
    scratch = sum(sizes[name] for name in plan.buffers) - sizes["y"] - sizes["final"]
    per_row = row.dstate * (tile.chunk + 2 * row.headdim) + tile.chunk * row.headdim
    per_row += row.dstate * row.headdim if tile.segment else 0
    operations = 2 * row.num_tokens * row.num_heads * per_row
    bandwidth, products = moved / taken * 1e6 / COPY, operations / taken * 1e6 / PRODUCT
    limit = "memory" if bandwidth > 0.6 else "tensor cores" if products > 0.6 else "latency of each chunk's chain"
    shares = {"bandwidth": round(bandwidth, 2), "products": round(products, 2)}
    return dict(bytes=moved, needed_bytes=needed, scratch_bytes=scratch, shares=shares, limit=limit)
