"""Random problems over all option combinations, against the oracle at the contract's tolerances: 320 of them.

Shapes come from a small set, and everything else (lengths, documents, step sizes, decay, values) is data. What is
static is drawn from all combinations of options; LLVM's optimizer is off, as nearly every problem is its own program.
"""

import math

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

import jax_ssd
from jax_ssd import reference
from tests.harness import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    call,
    gradients,
    oracle,
    oracle_gradients,
    over_implementations,
    random_cotangents,
    require,
    x64_for,
)
from tests.tolerances import check

PARTS, PROBLEMS = 4, 320
T = 24
# (heads, headdim, groups, dstate): heads per group 2, 3 and 1; headdim above and below dstate.
SIZES = ((4, 8, 2, 16), (3, 5, 1, 4), (2, 16, 2, 8))

problems = st.fixed_dictionaries(
    {
        "form": st.sampled_from(["batched", "documents", "packed", "checkpoints"]),
        "sizes": st.sampled_from(SIZES),
        "dtype": st.sampled_from([FLOAT32, FLOAT64, BFLOAT16, FLOAT16]),
        "D": st.sampled_from([None, "head", "channel"]),
        "z": st.booleans(),
        "dt_bias": st.booleans(),
        "dt_softplus": st.booleans(),
        "dt_limit": st.sampled_from([(0.0, math.inf), (0.02, 0.3), (0.0, 0.1)]),
        "initial_states": st.booleans(),
        "wide_dt": st.booleans(),
        "chunk_size": st.sampled_from([None, 1, 5, 16, 64]),
        "gradient": st.booleans(),
        "cuts": st.lists(st.integers(0, T), min_size=3, max_size=3),
        "decay": st.sampled_from([0.0, 1e-3, 1.0, 16.0]),
        "step": st.sampled_from([1e-3, 0.05, 1.0]),
        "seed": st.integers(0, 2**31),
    }
)


def _arrays(drawn):
    """The array arguments of a drawn problem, in float64."""
    h, p, g, n = drawn["sizes"]
    draw = np.random.default_rng(drawn["seed"])
    packed = drawn["form"] in ("packed", "checkpoints")
    lead = (T,) if packed else (2, T)
    arrays = {
        "x": draw.normal(size=(*lead, h, p)),
        "A": -drawn["decay"] * draw.uniform(0.1, 1.0, h),
        "B": draw.normal(size=(*lead, g, n)),
        "C": draw.normal(size=(*lead, g, n)),
        "dt": drawn["step"] * draw.uniform(0.1, 2.0, (*lead, h)),
    }
    if drawn["dt_softplus"]:
        arrays["dt"] = np.log(np.expm1(arrays["dt"]))
    if drawn["D"] is not None:
        arrays["D"] = draw.normal(size=(h,) if drawn["D"] == "head" else (h, p))
    if drawn["z"]:
        arrays["z"] = draw.normal(size=(*lead, h, p))
    if drawn["dt_bias"]:
        arrays["dt_bias"] = draw.uniform(-0.1, 0.1, h)
    if drawn["initial_states"]:
        arrays["initial_states"] = draw.normal(size=(3 if packed else 2, h, p, n))
    return arrays


def _metadata(drawn):
    """The integer arguments of a drawn problem."""
    cuts = np.sort(drawn["cuts"]).astype(np.int32)
    if drawn["form"] == "documents":
        return {"seq_idx": np.stack([np.searchsorted(cuts[:rows], np.arange(T), side="right") for rows in (3, 1)])}
    if drawn["form"] == "batched":
        return {}
    metadata = {"cu_seqlens": np.concatenate([[0], cuts])}
    if drawn["form"] == "checkpoints":
        draw = np.random.default_rng(drawn["seed"])
        metadata["checkpoint_positions"] = draw.integers(-2, T + 2, 4)
    return metadata


def _arguments(drawn):
    dtype = drawn["dtype"]
    wide = FLOAT64 if dtype == FLOAT64 else FLOAT32
    parameters = ("A", "D", "dt_bias", "initial_states", *(["dt"] if drawn["wide_dt"] else []))
    arrays = {name: value.astype(wide if name in parameters else dtype) for name, value in _arrays(drawn).items()}
    metadata = {name: value.astype(np.int32) for name, value in _metadata(drawn).items()}
    options = {"dt_softplus": drawn["dt_softplus"], "dt_limit": drawn["dt_limit"], "chunk_size": drawn["chunk_size"]}
    return arrays | metadata | options


def _off_the_bounds(drawn, arguments):
    """Whether no step lies so near a bound of dt_limit that float32 and float64 may clip it differently."""
    dt = np.asarray(arguments["dt"], np.float64) + np.asarray(arguments.get("dt_bias", 0.0), np.float64)
    dt = np.logaddexp(dt, 0.0) if drawn["dt_softplus"] else dt
    return all(np.abs(dt / bound - 1.0).min() > 1e-5 for bound in drawn["dt_limit"] if 0.0 < bound < math.inf)


def _decay(drawn, arguments):
    """The largest sum of |A dt| that one chunk can hold."""
    dt = np.asarray(arguments["dt"], np.float64) + np.asarray(arguments.get("dt_bias", 0.0), np.float64)
    dt = np.clip(np.logaddexp(dt, 0.0) if drawn["dt_softplus"] else dt, *drawn["dt_limit"])
    return float(np.abs(dt * arguments["A"]).max() * min(T, drawn["chunk_size"] or T))


@over_implementations
@pytest.mark.parametrize("part", range(PARTS))
def test_random_problem(implementation, part):
    """A quarter of the problems a part, so that parts run on different processes."""

    # A failure is printed as drawn: shrinking it would compile hundreds of programs.
    @seed(part)
    @settings(max_examples=PROBLEMS // PARTS, phases=[Phase.generate])
    @given(problems)
    def holds(drawn):
        arguments = _arguments(drawn)
        dtype, decay = drawn["dtype"], _decay(drawn, arguments)
        require(implementation, "chunk_scan", **arguments)
        with x64_for(dtype):
            if not drawn["gradient"] or not _off_the_bounds(drawn, arguments):
                result = call(jax_ssd.chunk_scan, quick=True, implementation=implementation, **arguments)
                expected = oracle(reference.chunk_scan, **arguments)
            else:
                cotangents = random_cotangents(jax_ssd.chunk_scan, drawn["seed"], **arguments)
                result, found = gradients(jax_ssd.chunk_scan, cotangents, implementation=implementation, **arguments)
                expected, slopes = oracle_gradients(reference.chunk_scan, cotangents, **arguments)
                for name, slope in found.items():
                    check(slope, slopes[name], dtype, "gradient", decay=decay, name=f"gradient of {name}")
            check(result.y, expected.y, dtype, "value", decay=decay, name="y")
            for name in ("final_states", "checkpoint_states"):
                if getattr(expected, name) is not None:
                    check(getattr(result, name), getattr(expected, name), dtype, "state", decay=decay, name=name)

    holds()
