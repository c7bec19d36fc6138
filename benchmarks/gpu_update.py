"""The Triton decode kernels on a GPU: `--stage check | tune | bench | peers`; JSON lines go to --out.

check: right against float64 and bit for bit against the rounding formula, from torch and from JAX. tune: many tiles a
row, the best first. bench: the tile that the library chooses, beside other libraries, by CUDA graphs over inputs that
exceed the L2 cache; then host time. peers: build what other libraries compile when first called.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import update_checks, update_peers
from benchmarks.update_rows import Row, tensors_of
from bridge.native_update import Prepared
from jax_ssd.kernels.triton import replay, update
from jax_ssd.settings import TritonUpdateTile, triton_update_tile

BYTES_PAST_L2 = 240e6
MOST_SETS = 128
POOL = 640  # slots of every timed pool, so that a tile compiles once for all batch sizes
_out: Any = None


def emit(**record: Any) -> None:
    """One JSON line, to the file and to the screen."""
    line = json.dumps(record)
    print(line, flush=True)
    if _out is not None:
        _out.write(line + "\n")
        _out.flush()


# Time.


def graph_time(calls: list[Callable[[], Any]], replays: int = 25) -> float:
    """Median microseconds of a call, from replays of a CUDA graph that holds all calls once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times[3:])


def input_sets(row: Row, pool: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Inputs of the row on different slots of one pool, as many as exceed the L2 cache several times."""
    fitting = min(row.pool // row.batch, MOST_SETS, max(2, math.ceil(4 * BYTES_PAST_L2 / row.bytes())))
    order = torch.randperm(row.pool, device="cuda").to(torch.int32)
    sets = []
    for index in range(fitting):
        arrays = row.arrays(seed=index, pool=pool)
        arrays["read_slots"] = order[index * row.batch : (index + 1) * row.batch].clone()
        arrays["write_slots"] = arrays["read_slots"]
        sets.append(arrays)
    return sets


def kernel_time(row: Row, tile: TritonUpdateTile, sets: list[dict[str, torch.Tensor]]) -> float:
    """Microseconds of the row's kernel with a tile."""
    plan = row.plan(tile)
    tensors = [tensors_of(plan, arrays) for arrays in sets]
    launch = Prepared(plan.launches[0], update, tensors[0])
    return graph_time([lambda each=each: launch(*each) for each in tensors])


def cycle_time(row: Row, tile: TritonUpdateTile) -> float:
    """Mean microseconds of a replay step over a whole cycle of the ring; every slot folds in the same step."""
    arrays, ring = row.arrays(), row.ring or 0
    plan = row.plan(tile)
    tensors = tensors_of(plan, arrays)
    launch = Prepared(plan.launches[0], replay, tensors)
    for _ in range(2 * ring):
        launch(*tensors)
    length = (ring - row.tokens) // row.tokens
    return graph_time([lambda: launch(*tensors)] * length)


# Rows.

TIMED = tuple(
    Row(f"batch_{batch}", batch, slots=POOL, rounds=rounds) for batch in (1, 8, 64, 256) for rounds in (None, 5)
)
MORE = (
    Row("batch_64_ten_rounds", 64, slots=POOL, rounds=10),
    Row("batch_64_bfloat16", 64, slots=POOL, state="bfloat16", rounds=5),
    Row("batch_64_heads_64_z", 64, 64, slots=POOL, rounds=5, z=True),
    Row("batch_64_headdim_80", 64, 128, 8, 80, 128, slots=POOL, rounds=5),
    Row("batch_64_dstate_256", 64, 48, 1, 64, 256, slots=POOL, rounds=5),
    Row("batch_64_dstate_64", 64, 112, 2, 64, 64, slots=POOL, rounds=5),
)
SEVERAL = tuple(Row(f"tokens_{count}", 64, tokens=count, slots=POOL, rounds=r) for count in (4, 8) for r in (None, 5))
EACH = Row("tokens_4_each", 64, tokens=4, slots=POOL, rounds=5, stores="each")
REPLAY = tuple(
    Row(f"replay_{batch}_{state}", batch, slots=batch, state=state, ring=16, rounds=None if state == "float32" else 5)
    for batch in (1, 64)
    for state in ("float32", "float16")
)


def each_sets(row: Row, pool: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Inputs of a row that stores the state after each token: every row of the batch owns 1 + tokens slots."""
    order = torch.randperm(row.pool, device="cuda").to(torch.int32)[: row.batch * (1 + row.tokens)]
    arrays = row.arrays(pool=pool)
    arrays["read_slots"] = order[: row.batch].clone()
    arrays["write_slots"] = order[row.batch :].reshape(row.batch, row.tokens).contiguous()
    return [arrays, arrays]


def timed(row: Row, tile: TritonUpdateTile, pools: dict[Any, torch.Tensor]) -> float:
    """Microseconds of a row, whichever kind it is."""
    if row.ring is not None:
        return cycle_time(row, tile)
    shape = (row.pool, row.heads, row.headdim, row.dstate, row.state)
    if shape not in pools:
        pools.clear()
        torch.cuda.empty_cache()
        pools[shape] = row.states()
    sets = each_sets(row, pools[shape]) if row.stores == "each" else input_sets(row, pools[shape])
    return kernel_time(row, tile, sets)


# Tiles: (rows, tiles, columns, warps).

ONE_TOKEN_TILES = {
    1: ((16, 1, 64, 4), (32, 1, 128, 8), (8, 1, 64, 2)),
    8: ((32, 1, 64, 4), (32, 2, 64, 4), (32, 4, 64, 4), (16, 1, 64, 4), (16, 2, 64, 4), (16, 4, 64, 4)),
    64: (
        *((32, 4, 64, 4), (32, 2, 64, 4), (32, 8, 64, 4), (16, 4, 64, 4), (16, 8, 64, 4), (64, 4, 64, 4)),
        *((16, 4, 64, 2), (32, 4, 128, 4), (16, 8, 32, 2)),
    ),
    256: ((32, 4, 64, 4), (32, 8, 64, 4), (16, 4, 64, 4), (16, 8, 64, 4), (32, 4, 128, 4)),
}
SEVERAL_TILES = ((32, 4, 64, 4), (32, 2, 64, 4), (32, 8, 64, 4), (64, 2, 64, 4), (64, 4, 64, 8))
EACH_TILES = ((32, 4, 64, 4), (32, 2, 64, 4), (64, 4, 64, 8), (16, 4, 64, 4))
FLOAT32_TILES = {
    1: ((16, 1, 32, 4), (32, 1, 32, 4)),
    64: ((32, 4, 32, 4), (32, 8, 32, 4), (32, 2, 32, 4), (16, 4, 32, 4), (32, 1, 32, 4)),
}
RING_FLOAT16_TILES = {
    1: ((16, 1, 64, 4), (32, 1, 64, 4)),
    64: ((16, 4, 64, 4), (16, 8, 64, 4), (32, 4, 64, 4), (32, 4, 64, 8)),
}
FLOAT32 = tuple(Row(f"batch_{batch}_float32", batch, slots=POOL, state="float32") for batch in (1, 64))


def tuned_pairs() -> list[tuple[Row, TritonUpdateTile]]:
    """(row, tile) of the tuner, rows of one pool together; launches overlap, but in one tile a row."""
    found: list[tuple[Row, tuple[int, ...]]] = []
    for row in TIMED:
        tiles = ONE_TOKEN_TILES[row.batch]
        found += [(dataclasses.replace(row, overlap=True), tile) for tile in tiles] + [(row, tiles[0])]
    found += [(dataclasses.replace(row, overlap=True), tile) for row in SEVERAL for tile in SEVERAL_TILES]
    found += [(dataclasses.replace(EACH, overlap=True), tile) for tile in EACH_TILES]
    found += [
        (dataclasses.replace(row, overlap=True), tile) for row in FLOAT32 for tile in FLOAT32_TILES[row.batch][:3]
    ]
    for row in REPLAY:
        tiles = (FLOAT32_TILES if row.state == "float32" else RING_FLOAT16_TILES)[row.batch]
        found += [(dataclasses.replace(row, overlap=True), tile) for tile in tiles]
    return [(row, TritonUpdateTile(*tile)) for row, tile in found]


def compile_some(part: int, parts: int, stage: str) -> None:
    """Fill Triton's cache on disk with a share of what a stage launches."""
    pairs = tuned_pairs() if stage == "tune" else [(row, triton_update_tile(row.problem())) for row in bench_rows()]
    seen = set()
    for row, tile in pairs:
        key = (dataclasses.replace(row, name="", batch=1, slots=row.pool), tile)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) % parts == part:
            small = dataclasses.replace(row, slots=row.pool, batch=1)
            arrays = small.arrays(pool=torch.empty(1, dtype=getattr(torch, row.state), device="cuda"))
            arrays["write_slots"] = arrays["read_slots"]
            plan = row.plan(tile)
            (launch,) = plan.launches
            names = [*launch.inputs, *(plan.aliases.get(name, "x") for name in launch.outputs)]
            Prepared(launch, update if row.ring is None else replay, [arrays[name] for name in names])


def compile_all(stage: str, workers: int) -> None:
    """Compile in several processes; a kernel that does not compile is reported when it is launched."""
    context = multiprocessing.get_context("spawn")
    start = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as executor:
        done = [executor.submit(compile_some, part, workers, stage) for part in range(workers)]
        for future in done:
            if future.exception() is not None:
                emit(warning="compile", reason=repr(future.exception()))
    emit(compiled=stage, seconds=round(time.perf_counter() - start, 1))


# Stages.


def check() -> bool:
    good = True
    for call in update_checks.every():
        try:
            record = call()
        except Exception as problem:
            record = dict(check="error", ok=False, error=repr(problem), trace=traceback.format_exc()[-1500:])
        emit(**record)
        good = good and bool(record["ok"])
        torch.cuda.empty_cache()
    emit(stage="check", ok=good)
    return good


def tune(deadline: float) -> None:
    best: dict[str, list[tuple[float, tuple[int, ...]]]] = {}
    pools: dict[Any, torch.Tensor] = {}
    for row, tile in tuned_pairs():
        if time.perf_counter() > deadline:
            emit(warning="tune", reason="out of time", at=row.name)
            break
        name = f"{row.name}_rounds_{row.rounds or 0}" + ("" if row.overlap else "_alone")
        try:
            taken = timed(row, tile, pools)
        except Exception as problem:
            emit(tune=name, tile=dataclasses.astuple(tile), error=repr(problem)[:300])
            continue
        best.setdefault(name, []).append((taken, dataclasses.astuple(tile)))
        emit(tune=name, tile=dataclasses.astuple(tile), microseconds=round(taken, 2), floor=round(row.floor(), 2))
    for name, found in best.items():
        emit(best=name, tiles=[(round(taken, 2), tile) for taken, tile in sorted(found)[:4]])


def bench_rows() -> tuple[Row, ...]:
    """Rows of the bench; launches overlap, as torch's do on this GPU."""
    return tuple(dataclasses.replace(row, overlap=True) for row in (*TIMED, *MORE, *FLOAT32, *SEVERAL, EACH, *REPLAY))


def bench(deadline: float, commit: str) -> None:
    pools: dict[Any, torch.Tensor] = {}
    versions = dict(torch=torch.__version__, triton=triton.__version__, cuda=torch.version.cuda)
    command = " ".join(["python -m benchmarks.gpu_update", *sys.argv[1:]])
    taken_at = dict(date=time.strftime("%Y-%m-%d"), commit=commit, command=command)
    emit(bench="run", **taken_at, machine=torch.cuda.get_device_name(), **versions)
    for row in bench_rows():
        tile = triton_update_tile(row.problem())
        named = dict(row=row.name, rounds=row.rounds or 0)
        try:
            taken = timed(row, tile, pools)
        except Exception as problem:
            emit(bench="missing", **named, reason=repr(problem)[:300])
            continue
        floor = dict(floor=round(row.floor(), 2), over_floor=round(taken / row.floor(), 3))
        record = dict(commit=commit, state=row.state, tile=dataclasses.astuple(tile))
        emit(bench="jax_ssd", **named, microseconds=round(taken, 2), **floor, **record)
        if row.name in {each.name for each in TIMED}:
            peers(row, pools, taken, deadline)
    host()


def peers(row: Row, pools: dict[Any, torch.Tensor], ours: float, deadline: float) -> None:
    """The other libraries on a row's own inputs."""
    for name, peer in update_peers.PEERS.items():
        named = dict(row=row.name, rounds=row.rounds or 0)
        if time.perf_counter() > deadline:
            emit(bench="missing", peer=name, **named, reason="out of time")
            continue
        try:
            taken = graph_time(peer(row, input_sets(row, next(iter(pools.values())))))
            emit(bench="peer", peer=name, **named, microseconds=round(taken, 2), ours_over_it=round(ours / taken, 3))
        except Exception as problem:
            emit(bench="missing", peer=name, **named, reason=repr(problem)[:200])


def build_peers() -> None:
    """Build what FlashInfer compiles when first called, so that a bench in another process need not wait."""
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        for done in [executor.submit(build_flashinfer, rounds) for rounds in (None, 5)]:
            if done.exception() is not None:
                emit(warning="peers", reason=repr(done.exception())[:500])
    emit(built="flashinfer", seconds=round(time.perf_counter() - start, 1))


def build_flashinfer(rounds: int | None) -> None:
    row = Row("build", 1, slots=2, rounds=rounds)
    for call in update_peers.flashinfer(row, [row.arrays()]):
        call()
    torch.cuda.synchronize()


def host(calls: int = 300) -> None:
    """Microseconds of host time a call: the prepared torch launch, Triton's own, a jitted JAX step and an empty one."""
    import jax

    from benchmarks.update_jax import step_of

    row = Row("host", 1, 16, 2, slots=4, rounds=5)
    arrays = row.arrays()
    plan = row.plan()
    tensors, (launch,) = tensors_of(plan, arrays), plan.launches
    prepared = Prepared(launch, update, tensors)
    options = dict(launch.constants, num_warps=launch.num_warps, num_stages=launch.num_stages)
    emit(host="torch, prepared", microseconds=host_time(lambda: prepared(*tensors), calls))
    generic: Any = update.selective_state_update[(launch.programs,)]
    emit(host="torch, Triton's call", microseconds=host_time(lambda: generic(*tensors, **options), calls))
    step, (state, *rest) = step_of(row, arrays)
    empty = jax.jit(lambda state, layer, seeds, others: (others["x"] + 1, state), donate_argnums=0)
    for name, function in (("jax, update", step), ("jax, empty", empty)):
        held = [state]

        def call(function: Any = function, held: list[Any] = held) -> None:
            held[0] = function(held[0], *rest)[1]

        emit(host=name, microseconds=host_time(call, calls))
        state = held[0]
    text = step.lower(state, *rest).as_text()
    emit(host="jax, bytes of the serialized kernel", bytes=len(text))


def host_time(call: Callable[[], Any], calls: int) -> float:
    """Median over 7 loops of the mean microseconds until a call returns."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return round(statistics.median(times), 1)


def main() -> None:
    global _out
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=("peers", "check", "tune", "bench"), action="append", required=True)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "update.jsonl")
    parser.add_argument("--seconds", type=float, default=420.0, help="start nothing new after this many seconds")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--commit", default="", help="what to write down as the commit")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    deadline = time.perf_counter() + arguments.seconds
    with arguments.out.open("a") as _out:
        emit(device=torch.cuda.get_device_name(), torch=torch.__version__)
        for stage in arguments.stage:
            if stage == "check":
                check()
                continue
            if stage == "peers":
                build_peers()
                continue
            compile_all(stage, arguments.workers)
            if stage == "tune":
                tune(deadline)
            else:
                bench(deadline, arguments.commit)


if __name__ == "__main__":
    main()
