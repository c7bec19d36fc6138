"""The Triton scan on a GPU: `--stage check | small | launcher | tune | bench`; JSON lines go to --out.

check: right against float64, repeatable, independent of packing, at every option and shape. launcher: the cached one
writes what the plain one does. tune: many tiles a row, and the winner. bench: the tile that the library chooses, beside
other libraries, torch by CUDA graphs and JAX in a steady loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

# JAX and PyTorch share the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch

from benchmarks import scan_bench
from benchmarks.scan_rows import CHECKS, DEVICE, SPEED, TOLERANCE, VLLM, Row, error, oracle
from benchmarks.scan_timing import Work, compile_all, input_sets, plan_of, slow_decay_time, tile_of, time_tile
from bridge.native_scan import run_plan, scan
from jax_ssd.problem import CacheUse
from jax_ssd.settings import TritonScanTile

_out: Any = None


def emit(**record: Any) -> None:
    """One JSON line, to the file and to the screen."""
    line = json.dumps(record)
    print(line, flush=True)
    if _out is not None:
        _out.write(line + "\n")
        _out.flush()


def run(row: Row, tile: TritonScanTile, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return run_plan(plan_of(row, tile), arrays)


PREFILL = Row("prefill", 8, 2, (130, 60, 700, 64), initial_states=True, checkpoints=(20, 129, 500))
RESULTS = ("y", "final", "checkpoints")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in RESULTS if name in first)


# Checks.


def check_value(row: Row, tile: TritonScanTile, label: str, repeats: int = 50) -> bool:
    """Error of every result against float64, and bitwise repetition over poisoned memory."""
    arrays = row.arrays()
    first = run(row, tile, arrays)
    expected = oracle(row, arrays)
    errors = {name: error(first[name], expected[name]) for name in RESULTS if name in first}
    repeated = True
    for _ in range(repeats):
        again = run(row, tile, arrays)
        repeated = repeated and same(first, again)
    good = all(found <= TOLERANCE[row.dtype] for found in errors.values()) and repeated
    emit(check="value", row=row.name, dtype=row.dtype, label=label, ok=good, repeated=repeated, errors=errors)
    return good


def check_packing(tile_changes: dict[str, Any]) -> bool:
    """A sequence alone, first and packed: the same bits."""
    packed = Row("packed", 8, 2, (130, 700, 64), initial_states=True)
    arrays = packed.arrays()
    tile = tile_of(packed, **tile_changes)
    whole = run(packed, tile, arrays)
    good, start = True, 0
    for index, length in enumerate(packed.seqlens):
        alone = dataclasses.replace(packed, seqlens=(length,))
        stop = start + length
        one = {name: arrays[name][start:stop].contiguous() for name in ("x", "dt", "B", "C")}
        one |= {"A": arrays["A"], "initial_states": arrays["initial_states"][index : index + 1].contiguous()}
        one["cu_seqlens"] = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
        result = run(alone, tile, one)
        good &= torch.equal(result["y"], whole["y"][start:stop])
        good &= torch.equal(result["final"][0], whole["final"][index])
        start = stop
    emit(check="packing", label=str(tile_changes), ok=good)
    return good


def check_prefill(segment: int, dtype: str, rounds: int | None) -> bool:
    """Gather, scan, scatter: the states of `chunk_scan`, stored with the contract's bits; other slots untouched."""
    import jax.numpy as jnp
    import numpy as np

    from jax_ssd.philox import StochasticRounding

    row = PREFILL
    cache_use = CacheUse(9, dtype, rounds)
    torch_dtype = getattr(torch, dtype)
    arrays = row.arrays()
    pool = torch.randn(9, 8, 64, 128, device=DEVICE).to(torch_dtype)
    slots, has = [5, -1, 2, 7], [True, True, False, True]
    arrays["cache"] = pool.clone()
    arrays["slots"] = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    arrays["has_initial_state"] = torch.tensor(has, device=DEVICE)
    arrays["checkpoint_slots"] = torch.tensor([1, 8, -1], dtype=torch.int32, device=DEVICE)
    seeds = np.array([[1, 2], [0xDEADBEEF, 0x12345678]], np.uint32)
    arrays["seeds"] = torch.from_numpy(seeds.view(np.int32)).to(DEVICE).view(torch.uint32)
    arrays["layer"] = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    arrays["head_offset"] = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    tile = tile_of(row, segment=segment)
    result = run_plan(plan_of(row, tile, cache_use), arrays)
    initial = torch.stack(
        [
            pool[s].float() if s >= 0 and h else torch.zeros_like(pool[0]).float()
            for s, h in zip(slots, has, strict=True)
        ]
    )
    plain = run(row, tile, arrays | {"initial_states": initial})
    states = torch.cat([plain["final"], plain["checkpoints"]])[[0, 2, 3, 4, 5]]
    where = np.array([5, 2, 7, 1, 8], np.int32)
    if rounds is None:
        expected = states.to(torch_dtype).view(torch.int16 if dtype != "float32" else torch.int32).cpu().numpy()
    else:
        rounding = StochasticRounding(jnp.asarray(seeds), layer=1, rounds=rounds)
        expected = np.asarray(rounding.round(states.cpu().numpy(), where, jnp.dtype(dtype))).view(np.int16)
    got = result["final"].view(torch.int16 if dtype != "float32" else torch.int32).cpu().numpy()
    good = bool((got[where] == expected).all())
    untouched = [slot for slot in range(9) if slot not in where]
    good &= torch.equal(result["final"][untouched], pool[untouched])
    padded = slice(130, 190)
    good &= not result["y"][padded].any().item() and torch.equal(result["y"][:130], plain["y"][:130])
    emit(check="prefill", segment=segment, dtype=dtype, rounds=rounds, ok=good)
    return good


def check_far() -> bool:
    """More than 2^31 elements: a sequence at the end equals the same sequence alone."""
    far = Row("far", 128, 1, (270_000, 1000))
    arrays = far.arrays()
    whole = run(far, tile_of(far), arrays)
    alone = dataclasses.replace(far, seqlens=(1000,))
    one = {name: arrays[name][270_000:].contiguous() for name in ("x", "dt", "B", "C")}
    one |= {"A": arrays["A"], "cu_seqlens": torch.tensor([0, 1000], dtype=torch.int32, device=DEVICE)}
    result = run(alone, tile_of(far), one)
    good = torch.equal(result["y"], whole["y"][270_000:]) and torch.equal(result["final"][0], whole["final"][1])
    emit(check="far", elements=arrays["x"].numel(), ok=good)
    return good


def check_variants() -> bool:
    """1,000 random packings compile nothing anew."""
    from jax_ssd.kernels.triton import scan as kernels

    tile = tile_of(Row("any", 4, 1, (64,)))
    draw = torch.Generator().manual_seed(3)

    def compiled() -> int:
        caches = (getattr(kernels, name).device_caches[0][0] for name in ("prepare", "scan"))
        return sum(len(cache) for cache in caches)

    counts = []
    for trial in range(1000):
        lengths = torch.randint(0, 90, (int(torch.randint(1, 5, (1,), generator=draw)),), generator=draw).tolist()
        if sum(lengths) == 0:
            continue
        row = Row("any", 4, 1, tuple(lengths))
        run(row, tile, row.arrays(trial))
        counts.append(compiled())
    good = counts[-1] == counts[0]
    emit(check="variants", first=counts[0], last=counts[-1], ok=good)
    return good


_VARIANTS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("two stages", {"num_stages": 2, "touch": False, "segment": 0}, 50),
    ("three stages", {"num_stages": 3, "touch": True, "segment": 0}, 50),
    ("segments", {"segment": 128}, 5),
)
_STORES = (("float16", None), ("float16", 5), ("bfloat16", 10), ("float32", None))


def stage_check(quick: bool) -> None:
    """Everything that must hold before a figure is printed; quick: what cuts sequences into segments only."""
    variants = _VARIANTS[-1:] if quick else _VARIANTS
    segments = (128,) if quick else (0, 128)
    faults = compile_all(
        [Work(row, tile_of(row, **changes)) for row in CHECKS for _, changes, _ in variants]
        + [Work(PREFILL, tile_of(PREFILL, segment=s), CacheUse(9, *store)) for s in segments for store in _STORES]
    )
    emit(faults=faults)
    good = [
        check_value(row, tile_of(row, **changes), label, repeats)
        for row, (label, changes, repeats) in itertools.product(CHECKS, variants)
    ]
    good += [check_packing(changes) for _, changes, _ in variants]
    good += [check_prefill(segment, *store) for segment, store in itertools.product(segments, _STORES)]
    if not quick:
        good += [check_far(), check_variants()]
    emit(stage="check", passed=sum(good), of=len(good))


def stage_small() -> None:
    """A few launches of every kernel, for compute-sanitizer."""
    rows = [row for row in CHECKS if row.name in ("one chunk", "everything", "documents")]
    good = [check_value(row, tile_of(row, segment=size), str(size), 1) for row in rows for size in (0, 128)]
    good += [check_prefill(size, "float16", 5) for size in (0, 128)]
    emit(stage="small", passed=sum(good), of=len(good))


def stage_launcher() -> None:
    """The cached launcher writes what the plain one does: twice, in place in a cache, and at odd addresses."""
    good = []
    for row in (*(row for row in CHECKS if row.name in ("everything", "float32", "odd")), SPEED[5]):
        arrays = row.arrays()
        plain = run(row, tile_of(row), arrays)
        good += [same(scan(row.problem(), arrays), plain) for _ in range(2)]
    arrays = {name: _shifted(value) for name, value in row.arrays().items()}
    good.append(same(scan(row.problem(), arrays), plain))
    use, arrays = CacheUse(3, "float16"), PREFILL.arrays() | {"cache": torch.zeros(3, 8, 64, 128, device=DEVICE).half()}
    arrays["slots"] = torch.tensor([0, 2, -1, 1], dtype=torch.int32, device=DEVICE)
    arrays["has_initial_state"] = torch.zeros(4, dtype=torch.bool, device=DEVICE)
    arrays["checkpoint_slots"] = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    plain = run_plan(plan_of(PREFILL, tile_of(PREFILL), use), arrays | {"cache": arrays["cache"].clone()})
    written = scan(PREFILL.problem(use), arrays)
    good.append(same(written, plain) and written["final"] is arrays["cache"])
    emit(stage="launcher", passed=sum(good), of=len(good))


def _shifted(value: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned address."""
    room = torch.empty(value.numel() + 1, dtype=value.dtype, device=value.device)
    return room[1:].view(value.shape).copy_(value)


# Timing.


def candidates(row: Row) -> list[TritonScanTile]:
    """The tiles that are worth a measurement."""
    longest = max(row.seqlens)
    segments = [0] + [size for size in (512, 1024, 2048, 4096) if size < longest]
    tiles = []
    for (stages, touch), segment in itertools.product(
        ((2, False), (3, False), (3, True), (2, True), (4, True)), segments
    ):
        tiles.append(tile_of(row, num_stages=stages, touch=touch, segment=segment))
    for warps, stages in ((4, 2), (4, 4), (8, 3)):
        tiles += [
            tile_of(row, num_stages=3, touch=True, segment=s, state_warps=warps, state_stages=stages)
            for s in segments[1:]
        ]
    return tiles + (finer_candidates(row) if row.num_heads <= 32 else [])


def finer_candidates(row: Row) -> list[TritonScanTile]:
    """For few heads: other segments, half of headdim a program, shorter chunks, more warps."""
    best = tile_of(row, num_stages=3, touch=True, state_stages=4)
    changes: list[dict[str, Any]] = [{"segment": size} for size in (256, 320, 384, 448, 576, 640, 768)]
    changes += [{"segment": size, "rows": 32} for size in (512, 768, 1024)]
    changes += [{"segment": size, "chunk": 32} for size in (256, 512)]
    changes += [{"segment": 512, "chunk": 32, "num_stages": 4, "state_stages": 5}]
    changes += [{"segment": 512, "num_stages": 2, "state_stages": 5}, {"segment": 512, "num_warps": 8}]
    changes += [{"segment": 512, "num_warps": 8, "state_warps": 8}]
    return [dataclasses.replace(best, **change) for change in changes]


def stage_tune(rows: tuple[Row, ...], budget: float) -> None:
    """Time every candidate of every row; stop at the budget (seconds). Winners go to jax_ssd/tuned by hand."""
    start = time.time()
    faults = compile_all(Work(row, tile) for row in rows for tile in candidates(row))
    emit(stage="tune", faults=faults[:5], seconds=round(time.time() - start, 1), versions=scan_bench.versions())
    for row in rows:
        sets = input_sets(row)
        found = []
        for tile in candidates(row):
            if time.time() - start > budget:
                emit(stage="tune", stopped=row.name)
                return
            try:
                taken = time_tile(row, tile, sets)
            except Exception as fault:
                emit(row=row.name, tile=dataclasses.asdict(tile), fault=f"{type(fault).__name__}: {fault}"[:160])
                continue
            found.append((taken, tile))
            emit(row=row.name, us=round(taken, 1), tile=dataclasses.asdict(tile))
        found.sort(key=lambda pair: pair[0])
        parts = {launch.kernel: 0.0 for launch in plan_of(row, found[0][1]).launches}
        parts = {kernel: round(time_tile(row, found[0][1], sets, only=kernel), 1) for kernel in parts}
        emit(winner=row.name, us=round(found[0][0], 1), tile=dataclasses.asdict(found[0][1]), parts=parts,
             slow_decay_us=slow_decay_time(row, found[0][1]),
             goal=round(VLLM[row.name] / 1.6))  # fmt: skip
        del sets
        torch.cuda.empty_cache()


def main() -> None:
    global _out
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--stage", choices=("check", "small", "launcher", "tune", "bench"), action="append", required=True
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_scan.jsonl")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(SPEED)), help="indices of rows")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for tune, and for bench")
    parser.add_argument("--quick", action="store_true", help="check segments only")
    parser.add_argument("--commit", default="", help="what to write down as the commit")
    arguments = parser.parse_args()
    rows = tuple(SPEED[index] for index in arguments.rows)
    with arguments.out.open("a") as _out:
        if "check" in arguments.stage:
            stage_check(arguments.quick)
        if "small" in arguments.stage:
            stage_small()
        if "launcher" in arguments.stage:
            stage_launcher()
        if "tune" in arguments.stage:
            stage_tune(rows, arguments.budget)
        if "bench" in arguments.stage:
            scan_bench.run(rows, emit, arguments.budget, arguments.commit)


if __name__ == "__main__":
    main()
