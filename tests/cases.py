"""Named problems shared by tests and benchmarks: sizes and options, and the arrays made from them."""

import dataclasses
from math import inf

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ScanCase:
    """One call of `chunk_scan`. `seqlens` makes it packed, `documents` gives it a seq_idx; neither: batched.

    `padding` is the number of tokens past the end of a packed call. D is None, "head" (h,) or "channel" (h, p).
    dt is drawn log-uniformly from `dt_range` (after bias, softplus) and A uniformly from -16 to -1, as models start.
    """

    name: str
    num_heads: int
    headdim: int
    num_groups: int
    dstate: int
    batch: int = 1
    num_tokens: int = 0
    seqlens: tuple[int, ...] | None = None
    padding: int = 0
    documents: tuple[tuple[int, ...], ...] | None = None
    D: str | None = None
    z: bool = False
    dt_bias: bool = False
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, inf)
    initial_states: bool = False
    checkpoints: tuple[int, ...] | None = None
    chunk_size: int | None = None
    dt_range: tuple[float, float] = (1e-3, 0.1)

    @property
    def lead(self):
        """The axes in front of heads."""
        return (sum(self.seqlens) + self.padding,) if self.seqlens is not None else (self.batch, self.num_tokens)

    @property
    def num_states(self):
        return self.batch if self.seqlens is None else len(self.seqlens)

    def options(self):
        """The keyword arguments that are not arrays."""
        return {"dt_softplus": self.dt_softplus, "dt_limit": self.dt_limit, "chunk_size": self.chunk_size}

    def arrays(self, dtype, seed=0):
        """The array arguments by name, as NumPy arrays, in `dtype` where the contract allows it."""
        draw = np.random.default_rng([seed, *self.name.encode()])
        h, p, g, n = self.num_heads, self.headdim, self.num_groups, self.dstate
        made = {
            "x": draw.normal(size=(*self.lead, h, p)),
            "dt": _raw_dt(draw, self),
            "A": -draw.uniform(1.0, 16.0, h),
            "B": draw.normal(size=(*self.lead, g, n)),
            "C": draw.normal(size=(*self.lead, g, n)),
        }
        if self.D is not None:
            made["D"] = draw.normal(size=(h,) if self.D == "head" else (h, p))
        if self.z:
            made["z"] = draw.normal(size=(*self.lead, h, p))
        if self.dt_bias:
            made["dt_bias"] = draw.uniform(-1.0, 1.0, h)
            made["dt"] = made["dt"] - made["dt_bias"]
        if self.initial_states:
            made["initial_states"] = draw.normal(size=(self.num_states, h, p, n))
        return _cast(made, dtype) | self._positions()

    def _positions(self):
        """The integer arguments: cu_seqlens, seq_idx, checkpoint_positions."""
        made = {}
        if self.seqlens is not None:
            made["cu_seqlens"] = np.cumsum([0, *self.seqlens]).astype(np.int32)
        if self.documents is not None:
            made["seq_idx"] = np.stack([np.repeat(np.arange(len(d)), d) for d in self.documents]).astype(np.int32)
        if self.checkpoints is not None:
            made["checkpoint_positions"] = np.array(self.checkpoints, np.int32)
        return made

    def decay(self):
        """An upper bound of the sum of |A dt| in a chunk: 256 tokens, or the case's own chunk_size."""
        draws = self.arrays(np.float64)
        dt = draws["dt"] + draws.get("dt_bias", 0.0)
        dt = np.clip(np.logaddexp(dt, 0.0) if self.dt_softplus else dt, *self.dt_limit)
        steps = np.cumsum(np.abs(dt * draws["A"]), axis=-2)
        window = self.chunk_size or 256
        earlier = np.zeros_like(steps)
        earlier[..., window:, :] = steps[..., :-window, :]
        return float((steps - earlier).max(initial=0.0))


def _raw_dt(draw, case):
    dt = np.exp(draw.uniform(*np.log(case.dt_range), (*case.lead, case.num_heads)))
    return np.log(np.expm1(dt)) if case.dt_softplus else dt


# Parameters stay in float32 where the tokens are narrower, as models keep them.
_PARAMETERS = ("A", "D", "dt_bias", "initial_states", "state")


def _cast(arrays, dtype):
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return {name: array.astype(wide if name in _PARAMETERS else dtype) for name, array in arrays.items()}


_EVERYTHING = {"z": True, "dt_bias": True, "dt_softplus": True, "dt_limit": (0.004, 0.06), "initial_states": True}

# Small and odd: lengths that no chunk divides, every form, every option.
SMALL = (
    ScanCase("plain", 4, 16, 2, 32, batch=2, num_tokens=37),
    ScanCase("one_token", 2, 8, 1, 16, batch=2, num_tokens=1, initial_states=True, D="head"),
    ScanCase("everything", 4, 16, 2, 32, batch=2, num_tokens=45, chunk_size=16, D="head", **_EVERYTHING),
    ScanCase("channel_D", 3, 8, 3, 16, batch=2, num_tokens=20, D="channel", z=True, chunk_size=8),
    ScanCase(
        "documents",
        4,
        16,
        2,
        32,
        batch=2,
        documents=((1, 19, 25), (30, 15)),
        num_tokens=45,
        chunk_size=16,
        D="channel",
        **_EVERYTHING,
    ),
    ScanCase(
        "packed",
        4,
        16,
        2,
        32,
        seqlens=(7, 0, 13, 30),
        padding=9,
        chunk_size=8,
        D="head",
        checkpoints=(0, 6, 7, 25, 49, 50, -1),
        **_EVERYTHING,
    ),
    ScanCase("packed_plain", 2, 16, 1, 32, seqlens=(33, 1, 20)),
    ScanCase("steep", 4, 16, 1, 32, batch=2, num_tokens=70, chunk_size=32, dt_range=(0.2, 2.0), initial_states=True),
)

# The sizes of models and irregular ones: true headdim, dstate and heads per group, fewer tokens, mostly fewer heads.
MODELS = (
    ScanCase("nemotron_8b", 16, 64, 1, 128, num_tokens=150, D="head", dt_bias=True, dt_softplus=True),
    ScanCase("nemotron_nano_30b", 16, 64, 2, 128, seqlens=(61, 40), initial_states=True, D="head"),
    ScanCase("nano_v2", 16, 80, 1, 128, num_tokens=70, D="head", dt_bias=True, dt_softplus=True),
    ScanCase("granite_350m", 48, 32, 1, 128, num_tokens=40, D="head", dt_bias=True, dt_softplus=True),
    ScanCase("falcon_h1", 24, 64, 2, 256, seqlens=(17, 23), D="head", z=True),
    ScanCase("zamba2", 16, 64, 2, 64, num_tokens=70, D="channel", z=True),
    ScanCase("irregular", 24, 80, 1, 96, seqlens=(29, 12), padding=3, D="head"),
)

BY_NAME = {case.name: case for case in SMALL + MODELS}


@dataclasses.dataclass(frozen=True)
class UpdateCase:
    """One call of `selective_state_update`; `num_tokens` None is the single-token form."""

    name: str
    num_heads: int
    headdim: int
    num_groups: int
    dstate: int
    batch: int
    num_tokens: int | None = None
    D: str | None = "head"
    z: bool = True
    dt_bias: bool = True
    dt_softplus: bool = True
    dt_limit: tuple[float, float] = (0.0, inf)
    num_slots: int = 6
    slots: tuple[int, ...] | None = None
    dt_range: tuple[float, float] = (1e-3, 0.5)

    @property
    def lead(self):
        return (self.batch,) if self.num_tokens is None else (self.batch, self.num_tokens)

    def options(self):
        return {"dt_softplus": self.dt_softplus, "dt_limit": self.dt_limit}

    def arrays(self, dtype, seed=0, state_dtype=np.float32):
        """The array arguments by name, as NumPy arrays; slots that no row reads hold NaN."""
        draw = np.random.default_rng([seed, *self.name.encode()])
        h, p, g, n = self.num_heads, self.headdim, self.num_groups, self.dstate
        made = {
            "state": draw.normal(size=(self.num_slots, h, p, n)),
            "x": draw.normal(size=(*self.lead, h, p)),
            "dt": _raw_dt(draw, self),
            "A": -draw.uniform(1.0, 16.0, h),
            "B": draw.normal(size=(*self.lead, g, n)),
            "C": draw.normal(size=(*self.lead, g, n)),
        }
        if self.D is not None:
            made["D"] = draw.normal(size=(h,) if self.D == "head" else (h, p))
        if self.z:
            made["z"] = draw.normal(size=(*self.lead, h, p))
        if self.dt_bias:
            made["dt_bias"] = draw.uniform(-1.0, 1.0, h)
        read = range(self.batch) if self.slots is None else self.slots
        unread = sorted(set(range(self.num_slots)) - set(read))
        made["state"][unread] = np.nan
        made = _cast(made, dtype)
        made["state"] = made["state"].astype(state_dtype)
        if self.slots is not None:
            made["read_slots"] = np.array(self.slots, np.int32)
        return made


UPDATES = (
    UpdateCase("token", 4, 16, 2, 32, batch=3, slots=(4, 0, 2)),
    UpdateCase("token_plain", 2, 8, 1, 16, batch=2, D=None, z=False, dt_bias=False, dt_softplus=False),
    UpdateCase("token_padding", 4, 16, 2, 32, batch=4, D="channel", slots=(5, -1, 1, -3), dt_limit=(0.01, 0.2)),
    UpdateCase("tokens", 4, 16, 2, 32, batch=3, num_tokens=4, slots=(4, 0, 2)),
    UpdateCase("token_nemotron", 16, 64, 1, 128, batch=2, slots=(3, 1)),
    UpdateCase("token_irregular", 24, 80, 1, 96, batch=2, slots=(3, 1)),
    UpdateCase("tokens_falcon", 24, 64, 2, 256, batch=2, num_tokens=3, slots=(3, 1), num_slots=4),
)

FLOATS = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16", "float64"))
