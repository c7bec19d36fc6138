"""The forward-scan rows of the speed table, their inputs on a GPU, and a float64 oracle for them in PyTorch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch

from jax_ssd.problem import CacheUse, Present, ScanProblem, Sizes, StepSize

# On a CPU, under Triton's interpreter, the checks can be tried; nothing can be timed.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: sizes, lengths of the packed sequences, and the options that a check turns on."""

    name: str
    num_heads: int
    num_groups: int
    seqlens: tuple[int, ...]
    headdim: int = 64
    dstate: int = 128
    dtype: str = "bfloat16"
    padding: int = 0
    D: Literal["none", "head", "channel"] = "none"
    z: bool = False
    dt_bias: bool = False
    softplus: bool = False
    limit: tuple[float, float] = (0.0, math.inf)
    initial_states: bool = False
    documents: bool = False
    checkpoints: tuple[int, ...] | None = None
    dt_scale: float = 1.0
    uniform: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.seqlens) + self.padding

    def problem(self, cache: CacheUse | None = None) -> ScanProblem:
        """The checked problem that the public function would make of it."""
        return ScanProblem(
            sizes=Sizes(self.num_heads, self.headdim, self.num_groups, self.dstate),
            num_tokens=self.num_tokens,
            num_seqs=len(self.seqlens),
            uniform_length=self.seqlens[0] if self.uniform else None,
            num_checkpoints=None if self.checkpoints is None else len(self.checkpoints),
            dtype=self.dtype,
            dt_dtype=self.dtype,
            state_dtype="float32",
            step_size=StepSize(self.softplus, self.limit),
            present=Present(self.D, self.z, self.dt_bias, self.initial_states, self.documents),
            cache=cache,
        )

    def arrays(self, seed: int = 0, device: str = DEVICE) -> dict[str, torch.Tensor]:
        """Inputs by the names of a plan; tokens past the end hold NaN."""
        draw = torch.Generator(device=device).manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        t, h, p, g, n = self.num_tokens, self.num_heads, self.headdim, self.num_groups, self.dstate

        def normal(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=draw, device=device)
            if shape[0] == t and self.padding:
                made[t - self.padding :] = math.nan
            return made

        dt = torch.exp(normal(t, h) * 0.5 - 3.5) * self.dt_scale
        made: dict[str, torch.Tensor] = {
            "x": normal(t, h, p).to(dtype), "B": normal(t, g, n).to(dtype), "C": normal(t, g, n).to(dtype),
            "dt": (torch.log(torch.expm1(dt)) if self.softplus else dt).to(dtype),
            "A": -torch.rand(h, generator=draw, device=device) * 15 - 1,
        }  # fmt: skip
        if self.D != "none":
            made["D"] = normal(h) if self.D == "head" else normal(h, p)
        if self.z:
            made["z"] = normal(t, h, p).to(dtype)
        if self.dt_bias:
            made["dt_bias"] = normal(h) * 0.1
        if self.initial_states:
            made["initial_states"] = normal(len(self.seqlens), h, p, n)
        return made | self._positions(device)

    def _positions(self, device: str) -> dict[str, torch.Tensor]:
        bounds = torch.tensor([0, *self.seqlens]).cumsum(0).to(torch.int32)
        made = {"cu_seqlens": bounds.to(device)}
        if self.documents:
            made["seq_idx"] = (torch.arange(self.num_tokens, device=device) * 7 // 200).to(torch.int32)
        if self.checkpoints is not None:
            made["checkpoint_positions"] = torch.tensor(self.checkpoints, dtype=torch.int32, device=device)
        return made


def oracle(row: Row, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """y, final states and checkpoints, token by token in float64."""
    wide = {name: value.double() for name, value in arrays.items() if value.is_floating_point()}
    h, p, n = row.num_heads, row.headdim, row.dstate
    repeat = h // row.num_groups
    dt = wide["dt"] + wide.get("dt_bias", 0.0)
    dt = torch.clip(torch.nn.functional.softplus(dt) if row.softplus else dt, *row.limit)
    y = torch.zeros_like(wide["x"])
    documents = arrays["seq_idx"].tolist() if row.documents else None
    wanted = list(row.checkpoints or ())
    final, kept = [], torch.zeros(len(wanted), h, p, n, dtype=torch.float64, device=y.device)
    start = 0
    for seq, length in enumerate(row.seqlens):
        made = torch.zeros(h, p, n, dtype=torch.float64, device=y.device)
        state = wide["initial_states"][seq].clone() if row.initial_states else made
        for token in range(start, start + length):
            if documents and token > start and documents[token] != documents[token - 1]:
                state = torch.zeros_like(state)
            decay = torch.exp(dt[token] * wide["A"])[:, None, None]
            push = (dt[token][:, None] * wide["x"][token])[:, :, None]
            state = decay * state + push * wide["B"][token].repeat_interleave(repeat, 0)[:, None, :]
            y[token] = (state @ wide["C"][token].repeat_interleave(repeat, 0)[:, :, None])[..., 0]
            for index, position in enumerate(wanted):
                if position == token:
                    kept[index] = state
        final.append(state)
        start += length
    if row.D != "none":
        D = wide["D"] if row.D == "channel" else wide["D"][:, None]
        y[:start] += (D * wide["x"])[:start]
    if row.z:
        y[:start] *= torch.nn.functional.silu(wide["z"][:start])
    return {"y": y, "final": torch.stack(final), "checkpoints": kept}


def plain_oracle(row: Row, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `oracle`, for a row of equal lengths without options: all sequences together, which is fast on a GPU."""
    seqs, h, repeat = len(row.seqlens), row.num_heads, row.num_heads // row.num_groups
    x, dt, B, C = (arrays[name].unflatten(0, (seqs, -1)).double() for name in ("x", "dt", "B", "C"))
    decay = torch.exp(dt * arrays["A"].double())
    dtx = dt[..., None] * x
    state = torch.zeros(seqs, h, row.headdim, row.dstate, dtype=torch.float64, device=x.device)
    y = torch.zeros_like(x)
    for token in range(x.shape[1]):
        state *= decay[:, token, :, None, None]
        state += dtx[:, token, :, :, None] * B[:, token].repeat_interleave(repeat, 1)[:, :, None, :]
        y[:, token] = (state @ C[:, token].repeat_interleave(repeat, 1)[..., None])[..., 0]
    return {"y": y.flatten(0, 1), "final": state}


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """||result - expected|| / ||expected||; NaN counts as infinite."""
    size = expected.norm().item()
    distance = (result.double().reshape(expected.shape) - expected).norm().item()
    found = distance / size if size else (0.0 if distance == 0 else math.inf)
    return math.inf if math.isnan(found) else found


SPEED = (
    Row("128 heads, 8 groups, 8192 x 1", 128, 8, (8192,)),
    Row("128 heads, 8 groups, 2048 x 1", 128, 8, (2048,)),
    Row("128 heads, 8 groups, 32768 in 8", 128, 8, (4096,) * 8),
    Row("64 heads, 8 groups, 8192 x 1", 64, 8, (8192,)),
    Row("64 heads, 8 groups, 4096 in 16", 64, 8, (256,) * 16),
    Row("16 heads, 1 group, 8192 x 1", 16, 1, (8192,)),
    Row("80 heads, 1 group, 16384 in 8", 80, 1, (2048,) * 8),
)
# Indices of rows that differ in heads and groups: what the peers' kernels are compiled for.
DISTINCT = (0, 3, 5, 6)
# The fewest bytes, and what other libraries and the goal take, in microseconds (H200).
FLOOR = dict(zip((row.name for row in SPEED), (71, 18, 283, 39, 20, 9, 81), strict=True))
VLLM = dict(zip((row.name for row in SPEED), (513, 147, 2185, 294, 168, 91, 618), strict=True))

_EVERYTHING: dict[str, Any] = dict(
    z=True, dt_bias=True, softplus=True, limit=(0.004, 0.3), initial_states=True, D="head"
)
CHECKS = (
    Row("one chunk", 4, 2, (64,)),
    Row("odd", 6, 2, (1, 63, 64, 65, 129, 300)),
    Row("empty", 4, 1, (0, 70, 0, 0, 33, 0), padding=200, initial_states=True),
    Row("everything", 8, 2, (200, 0, 77, 513), padding=70,
        checkpoints=(0, 63, 64, 100, 100, 199, 300, 789, 790, -1, 2000), **_EVERYTHING),
    Row("documents", 4, 2, (330, 330), documents=True, uniform=True, D="channel", z=True, initial_states=True),
    Row("steep", 4, 1, (500,), dt_scale=40.0),
    Row("nano v2", 16, 1, (300, 41), headdim=80, D="head"),
    Row("granite 350m", 48, 1, (200,), headdim=32, D="head"),
    Row("falcon h1", 24, 2, (150, 211), dstate=256, z=True),
    Row("falcon h1 128", 24, 1, (257,), headdim=128, dstate=256),
    Row("zamba 2", 112, 2, (300,), dstate=64, D="channel"),
    Row("irregular", 24, 1, (150, 20), headdim=80, dstate=96, padding=9),
    Row("float16", 8, 2, (300, 100), dtype="float16", **_EVERYTHING),
    Row("float32", 8, 2, (300, 100), dtype="float32", **_EVERYTHING),
    Row("float32 falcon", 4, 1, (200,), headdim=128, dstate=256, dtype="float32"),
    Row("float32 irregular", 6, 1, (200,), headdim=80, dstate=96, dtype="float32"),
)  # fmt: skip
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-3, "float16": 5e-4}
