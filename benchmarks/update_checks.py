"""What the decode kernels must get right on a GPU: each check returns a record with `ok`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks.update_rows import DEVICE, Row, error, oracle, tensors_of
from bridge.native_update import Prepared
from jax_ssd.implementations.triton_update_plan import CACHE_FIELDS
from jax_ssd.kernels.triton import replay, update
from jax_ssd.kernels.triton.rounding import round_tile
from jax_ssd.settings import TritonUpdateTile

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "ssu.npz"
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-3, "float16": 5e-4}
Record = dict[str, Any]


def run(row: Row, arrays: dict[str, torch.Tensor], tile: TritonUpdateTile | None = None) -> dict[str, torch.Tensor]:
    """Launch a row's kernel on arrays, in place on the state; what it wrote, by name."""
    plan = row.plan(tile)
    kernels = update if row.ring is None else replay
    tensors = tensors_of(plan, arrays)
    (launch,) = plan.launches
    if DEVICE == "cuda":
        Prepared(launch, kernels, tensors)(*tensors)
    else:
        getattr(kernels, launch.kernel)[(launch.programs,)](*tensors, **launch.constants)
    return dict(zip(launch.outputs, tensors[len(launch.inputs) :], strict=True))


def value(row: Row, tile: TritonUpdateTile | None = None) -> Record:
    """y and the stored states against float64, slots that no row writes untouched, the same bits again."""
    arrays = row.arrays()
    before = arrays["state"].clone()
    y, states = oracle(row, arrays)
    written = run(row, arrays, tile)
    slots = arrays["read_slots"].long()
    others = torch.ones(row.pool, dtype=torch.bool, device=DEVICE)
    others[slots] = False
    untouched = torch.equal(arrays["state"][others], before[others])
    errors = [error(written["y"], y), error(arrays["state"][slots], states[:, -1])]
    after = arrays["state"].clone()
    repeated = True
    for _ in range(5):
        arrays["state"].copy_(before)
        again = run(row, arrays, tile)
        repeated &= torch.equal(again["y"], written["y"]) and torch.equal(arrays["state"], after)
    ok = errors[0] <= TOLERANCE[row.dtype] and errors[1] <= TOLERANCE[row.state] and untouched and repeated
    return dict(check="value", row=row.name, ok=ok, errors=errors, untouched=untouched, repeated=repeated)


def exact(row: Row) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arrays whose float32 states are exact in any order of operations, and those states (b,t,h,p,n)."""
    arrays = row.arrays()
    draw = torch.Generator(DEVICE).manual_seed(5)

    def grid(like: torch.Tensor, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, like.shape, generator=draw, device=DEVICE) / 128.0

    arrays["x"] = grid(arrays["x"], -127, 128).to(arrays["x"].dtype)
    arrays["state"].copy_(1.0 + grid(arrays["state"], 0, 128))
    arrays["A"].zero_()
    arrays["dt"].fill_(1.0)
    arrays["B"].fill_(1.0 / 512.0)
    added = arrays["x"].float().cumsum(1)[..., None] / 512.0
    states = arrays["state"][arrays["read_slots"].long()].float()[:, None] + added
    return arrays, states.expand(row.batch, row.tokens, row.heads, row.headdim, row.dstate)


def contract(
    states: torch.Tensor, slots: torch.Tensor, arrays: dict[str, torch.Tensor], row: Row, step: int
) -> np.ndarray:
    """Bits of float32 states (b,h,p,n) rounded by the reference formula, uint16."""
    import jax

    from jax_ssd.philox import StochasticRounding

    seeds = arrays["seeds"].cpu().numpy().view(np.uint32)
    with jax.default_device(jax.devices("cpu")[0]):
        rounding = StochasticRounding(seeds, row.layer, row.rounds)
        made = rounding.round(states.float().cpu().numpy(), slots.cpu().numpy(), row.state, step=step)
        return np.asarray(made).view(np.uint16)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)


def bits(row: Row) -> Record:
    """Stored states, bit for bit, against the reference formula: the last one, or the state after each token."""
    row = dataclasses.replace(row, bias=False, softplus=False)
    arrays, states = exact(row)
    if row.stores == "each":
        order = torch.randperm(row.pool, device=DEVICE).to(torch.int32)
        arrays["read_slots"] = order[: row.batch]
        arrays["write_slots"] = (
            order[row.batch : row.batch * (1 + row.tokens)].reshape(row.batch, row.tokens).contiguous()
        )
        base = arrays["state"][arrays["read_slots"].long()].float()[:, None]
        states = base + arrays["x"].float().cumsum(1)[..., None] / 512.0
    run(row, arrays)
    wrong = 0
    for step in range(row.tokens) if row.stores == "each" else (row.tokens - 1,):
        slots = arrays["write_slots"][:, step] if row.stores == "each" else arrays["read_slots"]
        expected = contract(states[:, step], slots, arrays, row, step)
        wrong += int((bits_of(arrays["state"][slots.long()]) != expected).sum())
    return dict(check="bits", row=row.name, ok=wrong == 0, wrong=wrong)


@triton.jit
def rounded_values(values_ptr, result_ptr, seed, COLUMNS: tl.constexpr, ROUNDS: tl.constexpr, NATIVE: tl.constexpr):
    """Each program rounds 16 rows of COLUMNS float32 values; NATIVE in PTX, else in integers."""
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    place = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    counter = (rows[:, None] * COLUMNS + 4 * tl.arange(0, COLUMNS // 4)[None, :]).to(tl.uint32)
    key = seed.to(tl.uint32)
    high = counter * 0
    dtype: tl.constexpr = result_ptr.dtype.element_ty
    result = round_tile(tl.load(values_ptr + place), counter, high, 0, key, key + 1, dtype, ROUNDS, NATIVE)
    if NATIVE:
        pairs = rows[:, None] * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
        tl.store(result_ptr.to(tl.pointer_type(tl.uint32)) + pairs, result)
    else:
        tl.store(result_ptr + place, result)


def formulations(dtype: torch.dtype) -> Record:
    """The PTX and the integer formulation of rounding on every exponent and sign, many mantissas and random words."""
    draw = np.random.default_rng(0)
    edges = np.array([0, 1, 0x1FFF, 0x2000, 0x2001, 0x7FFFFF, 0x7FE000, 0x7FDFFF, 0x400000, 0xFFFF, 0x10000], np.uint32)
    mantissas = np.concatenate(
        [np.repeat(edges, 64), draw.integers(0, 1 << 23, 8192 - 64 * len(edges), dtype=np.uint32)]
    )
    patterns = (np.arange(512, dtype=np.uint32)[:, None] << 23) | mantissas[None]
    values = torch.from_numpy(patterns.view(np.int32).reshape(-1, 64)).view(torch.float32).to(DEVICE)
    wrong = differing = 0
    for seed in range(8):
        made = []
        for native in (True, False):
            result = torch.empty(values.shape, dtype=dtype, device=DEVICE)
            rounded_values[(values.shape[0] // 16,)](values, result, seed + 2, COLUMNS=64, ROUNDS=7, NATIVE=native)
            made.append(result)
        same = (made[0].view(torch.int16) == made[1].view(torch.int16)) | (made[0].isnan() & made[1].isnan())
        wrong += int((~same).sum()) + int((made[0].isnan() != values.isnan()).sum())
        differing += int((made[0] != values.to(dtype)).sum())
    return dict(check="formulations", dtype=str(dtype), ok=wrong == 0 and differing > 0, wrong=wrong)


def golden() -> Record:
    """The bits that FlashInfer's single-token kernel stored on the same inputs."""
    data = np.load(GOLDEN)
    found = {name.split("/")[1]: data[name] for name in data.files if name.startswith("stp_simple_n128_r10/")}
    low, high, rounds, _, _ = (int(number) for number in found["meta"])
    slots, heads, headdim, dstate = found["state_in"].shape

    def tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array.view(np.int16).copy()).view(dtype).to(DEVICE)

    row = Row("golden", 3, heads, 2, headdim, dstate, slots=slots, rounds=rounds, softplus=False)
    arrays = row.arrays()
    for name in ("x", "dt", "B", "C"):
        arrays[name] = tensor(found[name], torch.bfloat16).unsqueeze(1)
    for name in ("D", "dt_bias"):
        arrays[name] = tensor(found[name], torch.bfloat16).float()
    arrays["A"] = torch.from_numpy(found["A"]).to(DEVICE)
    arrays["state"] = tensor(found["state_in"], torch.float16)
    arrays["read_slots"] = torch.from_numpy(found["idx"]).to(DEVICE)
    arrays["seeds"][row.layer] = torch.from_numpy(np.array([low, high], np.uint32).view(np.int32)).to(DEVICE)
    written = run(row, arrays)
    wrong = int((bits_of(arrays["state"]) != found["state_out"]).sum())
    wrong_y = int((bits_of(written["y"][:, 0]) != found["y"]).sum())
    return dict(check="golden", ok=wrong == 0 and wrong_y == 0, wrong=wrong, wrong_y=wrong_y)


def padding() -> Record:
    """Padding rows and slots out of range: y is 0, NaN slots stay as they are."""
    row = Row("padding", 4, 16, 2, slots=6, rounds=5)
    arrays = row.arrays()
    arrays["read_slots"] = torch.tensor([4, -1, 6, 2], dtype=torch.int32, device=DEVICE)
    arrays["state"][[0, 1, 3, 5]] = torch.nan
    arrays["x"][1:3] = torch.nan
    before = arrays["state"].clone()
    written = run(row, arrays)
    touched = [
        slot for slot in range(6) if not torch.equal(bits_tensor(arrays["state"][slot]), bits_tensor(before[slot]))
    ]
    ok = touched == [2, 4] and not written["y"][1:3].any() and bool(written["y"][[0, 3]].isfinite().all())
    return dict(check="padding", ok=ok, touched=touched)


def bits_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def unbiased(tokens: int = 4096) -> Record:
    """Adding 1 again and again to a float16 state of 0 ends at the count, where rounding to nearest stalls at 2048."""
    row = Row("unbiased", 1, 16, 2, rounds=10, bias=False, softplus=False)
    arrays = row.arrays()
    for name, filling in (("A", 0.0), ("dt", 1.0), ("x", 1.0), ("B", 1.0), ("state", 0.0)):
        arrays[name].fill_(filling)
    plan = row.plan()
    tensors = tensors_of(plan, arrays)
    launch = Prepared(plan.launches[0], update, tensors)
    for _ in range(tokens):
        arrays["seeds"].random_(-(2**31), 2**31)
        launch(*tensors)
    found = arrays["state"].double()
    deviation = abs(found.mean().item() - tokens) / (found.std().item() / found.numel() ** 0.5)
    return dict(check="unbiased", ok=deviation < 4, mean=found.mean().item(), standard_errors=deviation)


def replayed(tokens: int, ring: int, state: str, rounds: int | None, steps: int = 40) -> Record:
    """Steps of replay against steps of the plain update in float32; many slots, so that programs race if they can."""
    row = Row("replay", 48, 32, 4, tokens=tokens, slots=50, state=state, ring=ring, rounds=rounds)
    plain = dataclasses.replace(row, state="float32", ring=None, rounds=None)
    cached = row.arrays()
    reference = plain.arrays() | {"state": cached["state"].float().clone()}
    errors, lengths_ok, length = [], True, 0
    for step in range(steps):
        fresh = row.arrays(seed=step, pool=cached["state"])
        kept = {name: cached[name] for name in CACHE_FIELDS[1:]}
        cached = fresh | kept | {"read_slots": cached["read_slots"], "slots": cached["slots"], "A": cached["A"]}
        reference = cached | {"state": reference["state"]}
        found = run(row, cached)["y"]
        errors.append(error(found, run(plain, reference)["y"].double()))
        length = tokens + (min(step, 1) * tokens if length + tokens > ring else length)
        lengths_ok &= bool((cached["length"][cached["slots"].long()] == length).all())
    bound = TOLERANCE[row.dtype] if state == "float32" else 4 * TOLERANCE[row.dtype]
    ok = max(errors) <= bound and lengths_ok
    return dict(check="replay", tokens=tokens, ring=ring, state=state, ok=ok, error=max(errors), lengths=lengths_ok)


def huge() -> Record:
    """A pool of more than 2^31 elements: updating the last slot changes no other, and changes it rightly."""
    row = Row("huge", 1, slots=2100, rounds=5)
    arrays = row.arrays()
    arrays["read_slots"] = torch.tensor([row.pool - 1], dtype=torch.int32, device=DEVICE)
    before = arrays["state"].clone()
    y, states = oracle(row, arrays)
    found = run(row, arrays)["y"]
    same = torch.equal(arrays["state"][:-1], before[:-1])
    errors = [error(found, y), error(arrays["state"][-1:], states[:, -1])]
    return dict(check="huge", ok=same and max(errors) < TOLERANCE["bfloat16"], same=same, errors=errors)


def from_jax(row: Row) -> Record:
    """The same kernel launched by JAX under jit: the same bits, one custom call, in place on the donated pool."""
    import jax

    from benchmarks.update_jax import step_of

    arrays = row.arrays()
    call, inputs = step_of(row, arrays)
    compiled = call.lower(*inputs).compile()
    calls = compiled.as_text().count("custom-call(")
    address = inputs[0].unsafe_buffer_pointer()
    y, state = jax.block_until_ready(compiled(*inputs))
    in_place = state.unsafe_buffer_pointer() == address
    written = run(row, arrays)
    same_y = torch.equal(torch.from_dlpack(y).view(torch.int16), written["y"].view(torch.int16))
    same_state = torch.equal(torch.from_dlpack(state), arrays["state"])
    ok = same_y and same_state and calls == 1 and in_place
    return dict(check="jax", row=row.name, ok=ok, same_y=same_y, same_state=same_state, calls=calls, in_place=in_place)


def every() -> Iterator[Callable[[], Record]]:
    """All checks, the quick ones first."""
    yield golden
    yield padding
    for dtype in (torch.float16, torch.bfloat16):
        yield lambda dtype=dtype: formulations(dtype)
    for row in VALUES:
        yield lambda row=row: value(row)
    for row in BITS:
        yield lambda row=row: bits(row)
    yield unbiased
    for sizes in ((1, 16, "float32", None), (4, 8, "float32", None), (1, 16, "float16", 5), (2, 5, "bfloat16", None)):
        yield lambda sizes=sizes: replayed(*sizes)
    yield huge
    yield lambda: from_jax(Row("jax", 8, 32, 4, slots=11, rounds=5))
    yield lambda: from_jax(Row("jax_float32", 8, 32, 4, slots=11, state="float32"))


VALUES = (
    Row("plain", 8, slots=11),
    Row("everything", 5, 24, 2, 80, 96, tokens=3, slots=9, state="float32", D="channel", z=True, limit=(0.01, 0.3)),
    Row("float32", 3, 16, 1, 32, 128, slots=4, dtype="float32", state="float32", z=True),
    Row("float16", 3, 16, 1, 128, 64, slots=4, dtype="float16", z=True, D="none"),
    Row("falcon", 2, 24, 1, 64, 256, tokens=4, slots=3, state="bfloat16"),
    Row("masked", 2, 12, 1, 40, 72, tokens=2, slots=3, state="float32"),
    Row("tokens", 4, tokens=8, slots=5, state="float32"),
    Row("drafts", 6, tokens=4, slots=9, z=True),
    Row("drafts_float16", 3, 48, 1, 80, 128, tokens=5, slots=4, dtype="float16", D="channel"),
    Row("drafts_float32", 3, 16, 2, tokens=2, slots=4, dtype="float32", state="float32"),
    Row("overlap", 8, slots=11, overlap=True),
    Row("overlap_drafts", 8, tokens=4, slots=11, overlap=True),
)

BITS = (
    Row("one", 8, slots=11, rounds=5),
    Row("ten", 3, 16, 2, slots=5, rounds=10),
    Row("narrow", 3, 16, 2, 32, 64, slots=5, rounds=5),
    Row("wide", 3, 16, 2, 64, 256, slots=5, rounds=7),
    Row("irregular", 3, 12, 2, 80, 96, slots=5, rounds=5),
    Row("masked", 3, 12, 2, 40, 72, slots=5, rounds=5),
    Row("bfloat16", 3, 16, 2, 64, 128, slots=5, state="bfloat16", rounds=5),
    Row("overlap", 8, slots=11, rounds=5, overlap=True),
    Row("last_of_four", 3, 16, 2, 64, 128, tokens=4, slots=5, rounds=5),
    Row("each", 3, 16, 2, 64, 128, tokens=4, slots=20, rounds=5, stores="each"),
)
