"""Decode problems for the GPU script: their arrays as torch tensors, and the recurrence in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

from jax_ssd.implementations.triton_plan import Plan
from jax_ssd.implementations.triton_update_plan import CACHE_FIELDS, replay_plan, update_plan
from jax_ssd.problem import CacheUse, Present, Sizes, StepSize, UpdateProblem
from jax_ssd.settings import TritonUpdateTile, triton_update_tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 64
FLOOR_BYTES_PER_MICROSECOND = 4.27e6


@dataclasses.dataclass(frozen=True)
class Row:
    """One decode step; `slots` slots in the pool, of which `batch` are read and written."""

    name: str
    batch: int
    heads: int = 128
    groups: int = 8
    headdim: int = 64
    dstate: int = 128
    tokens: int = 1
    slots: int = 0
    dtype: str = "bfloat16"
    state: str = "float16"
    rounds: int | None = None
    D: Literal["none", "head", "channel"] = "head"
    z: bool = False
    bias: bool = True
    softplus: bool = True
    limit: tuple[float, float] = (0.0, math.inf)
    stores: Literal["read", "last", "each"] = "read"
    ring: int | None = None
    layer: int = 3
    overlap: bool = False  # begin while the launch before ends

    @property
    def pool(self) -> int:
        return self.slots or self.batch

    def problem(self) -> UpdateProblem:
        return UpdateProblem(
            sizes=Sizes(self.heads, self.headdim, self.groups, self.dstate),
            batch=self.batch,
            num_tokens=self.tokens,
            dtype=self.dtype,
            dt_dtype=self.dtype,
            step_size=StepSize(self.softplus, self.limit),
            present=Present(D=self.D, z=self.z, dt_bias=self.bias),
            cache=CacheUse(self.pool, self.state, self.rounds),
            write_slots=self.stores,
            ring_size=self.ring,
        )

    def plan(self, tile: TritonUpdateTile | None = None, native: bool = DEVICE == "cuda") -> Plan:
        problem = self.problem()
        make = update_plan if self.ring is None else replay_plan
        return make(problem, tile or triton_update_tile(problem), native=native, layers=LAYERS, overlap=self.overlap)

    def bytes(self) -> int:
        """Fewest bytes: the states read and written, the tokens' inputs and outputs."""
        state = self.heads * self.headdim * self.dstate * torch.empty(0, dtype=getattr(torch, self.state)).itemsize
        stored = self.tokens if self.stores == "each" else 1
        token = 2 * (2 * self.heads * self.headdim + self.heads + 2 * self.groups * self.dstate)
        return self.batch * ((1 + stored) * state + self.tokens * token)

    def floor(self) -> float:
        """Microseconds that `bytes` take."""
        return self.bytes() / FLOOR_BYTES_PER_MICROSECOND

    def arrays(self, seed: int = 0, pool: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Random tensors by the kernels' names; slots in a random order."""
        draw = torch.Generator(DEVICE).manual_seed(seed)
        lead, dtype = (self.batch, self.tokens), getattr(torch, self.dtype)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=DEVICE).to(dtype)

        f32, i32 = torch.float32, torch.int32
        order = torch.randperm(self.pool, generator=draw, device=DEVICE)[: self.batch].to(i32)
        made = dict(
            x=normal(*lead, self.heads, self.headdim),
            dt=normal(*lead, self.heads) - 2.0,
            B=normal(*lead, self.groups, self.dstate),
            C=normal(*lead, self.groups, self.dstate),
            A=-torch.rand(self.heads, generator=draw, device=DEVICE) * 4 - 0.2,
            D=normal(self.heads, *([self.headdim] if self.D == "channel" else []), dtype=f32),
            z=normal(*lead, self.heads, self.headdim),
            dt_bias=normal(self.heads, dtype=f32) * 0.1,
            read_slots=order,
            slots=order,
            seeds=torch.randint(-(2**31), 2**31, (LAYERS, 2), generator=draw, device=DEVICE).to(i32),
            layer=torch.tensor([self.layer], dtype=i32, device=DEVICE),
            head_offset=torch.zeros(1, dtype=i32, device=DEVICE),
        )
        made["state"] = self.states(seed) if pool is None else pool
        return made | self._ring()

    def states(self, seed: int = 0) -> torch.Tensor:
        """A random pool."""
        draw = torch.Generator(DEVICE).manual_seed(seed + 1000)
        shape = (self.pool, self.heads, self.headdim, self.dstate)
        return torch.empty(shape, dtype=getattr(torch, self.state), device=DEVICE).normal_(generator=draw)

    def _ring(self) -> dict[str, torch.Tensor]:
        if self.ring is None:
            return {}
        dtype, lead = getattr(torch, self.dtype), (self.pool, self.ring)
        cursor = [torch.zeros(self.pool, dtype=torch.int32, device=DEVICE) for _ in range(3)]
        ring_x = torch.zeros(*lead, self.heads, self.headdim, dtype=dtype, device=DEVICE)
        ring_dt = torch.zeros(*lead, self.heads, device=DEVICE)
        ring_B = torch.zeros(*lead, self.groups, self.dstate, dtype=dtype, device=DEVICE)
        return dict(zip(CACHE_FIELDS[1:], (ring_x, ring_dt, ring_B, *cursor), strict=True))


def tensors_of(plan: Plan, arrays: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Inputs and outputs of a plan's one launch, in the kernel's order; outputs that are not aliases are made."""
    (launch,) = plan.launches
    made = [arrays[name] for name in launch.inputs]
    for name in launch.outputs:
        if name in plan.aliases:
            made.append(arrays[plan.aliases[name]])
        else:
            buffer = plan.buffers[name]
            made.append(torch.full(buffer.shape, math.nan, dtype=getattr(torch, buffer.dtype), device=DEVICE))
    return made


def oracle(row: Row, arrays: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """y (b,t,h,p) and the states (b,t,h,p,n) after each token, in float64, states never rounded."""
    wide = {name: value.double() for name, value in arrays.items() if value.is_floating_point() and name != "state"}
    dt = wide["dt"] + wide["dt_bias"] if row.bias else wide["dt"]
    if row.softplus:
        dt = torch.logaddexp(dt, torch.zeros_like(dt))
    dt = dt.clamp(*row.limit)
    B, C = (wide[name].repeat_interleave(row.heads // row.groups, 2) for name in "BC")
    state, ys, states = arrays["state"][arrays["read_slots"].long()].double(), [], []
    for token in range(row.tokens):
        x, step = wide["x"][:, token], dt[:, token]
        decay = torch.exp(step * wide["A"])[..., None, None]
        state = decay * state + (step[..., None] * x)[..., None] * B[:, token, :, None]
        y = (state * C[:, token, :, None]).sum(-1)
        y = y + (wide["D"] if row.D == "channel" else wide["D"][:, None]) * x if row.D != "none" else y
        if row.z:
            y = y * torch.nn.functional.silu(wide["z"][:, token])
        ys.append(y)
        states.append(state)
    return torch.stack(ys, 1), torch.stack(states, 1)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||; NaN counts as infinite."""
    value = ((found.double() - expected).norm() / expected.norm()).item()
    return value if math.isfinite(value) else math.inf
