"""Triton decode kernels without a GPU: interpreted, compiled for CUDA, and lowered from JAX."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jax_ssd
from jax_ssd import ReplayCache, StochasticRounding, philox, problem, reference, settings, validate
from jax_ssd.implementations import triton_update
from jax_ssd.implementations.triton_update_plan import replay_plan, update_plan
from jax_ssd.settings import TritonUpdateTile
from jax_ssd.validate import ReplayCall, TokenCall, UpdateCall
from tests import tolerances, triton_decode
from tests.cases import UPDATES, UpdateCase
from tests.harness import BFLOAT16, FLOAT16, FLOAT32, exact, oracle
from tests.interpreter import interpreted
from tests.triton_compile import compile_launch, usage

pytest.importorskip("triton")

GOLDEN = Path(__file__).parent / "golden" / "ssu.npz"
BY_NAME = {case.name: case for case in UPDATES}
SMALL = ("token", "token_plain", "token_padding", "tokens")

# Values.


@pytest.mark.parametrize(
    ("name", "dtype", "state_dtype"),
    [(name, FLOAT32, FLOAT32) for name in SMALL]
    + [(name, BFLOAT16, FLOAT16) for name in SMALL]
    + [("token", FLOAT16, BFLOAT16), ("tokens", FLOAT16, FLOAT32), ("token_nemotron", BFLOAT16, FLOAT16)],
    ids=str,
)
def test_an_update_is_the_recurrence(name, dtype, state_dtype):
    case = BY_NAME[name]
    arrays = case.arrays(dtype, state_dtype=state_dtype)
    y, state = interpreted(triton_decode.update, arrays, case.options())
    expected = oracle(reference.selective_state_update, **arrays, **case.options())
    tolerances.check(y, expected.y, dtype, "value")
    read = [slot for slot in case.slots or range(case.batch) if slot >= 0]
    tolerances.check(state[read], expected.state[read], state_dtype, "state")
    rest = sorted(set(range(case.num_slots)) - set(read))
    assert state[rest].tobytes() == arrays["state"][rest].tobytes()


@pytest.mark.parametrize("tile", [(8, 1, 32, 1), (16, 1, 32, 2), (8, 2, 32, 1), (32, 1, 16, 2)])
def test_the_tile_changes_rounding_errors_only(tile):
    case = dataclasses.replace(BY_NAME["tokens"], headdim=24, dstate=40)
    arrays = case.arrays(FLOAT32)
    y, state = interpreted(triton_decode.update, arrays, case.options(), None, None, TritonUpdateTile(*tile))
    expected = oracle(reference.selective_state_update, **arrays, **case.options())
    tolerances.check(y, expected.y, FLOAT32, "value")
    tolerances.check(state[list(case.slots)], expected.state[list(case.slots)], FLOAT32, "state")


# Rounding.


def test_the_stored_bits_are_the_measured_ones():
    data = np.load(GOLDEN)
    found = {name.split("/")[1]: data[name] for name in data.files if name.startswith("stp_simple_n128_r10/")}
    low, high, rounds, _, softplus = found["meta"]
    arrays = {name: found[name].view(jnp.bfloat16) for name in ("x", "dt", "B", "C", "D", "dt_bias")}
    arrays |= {"A": found["A"], "state": found["state_in"].view(np.float16), "read_slots": found["idx"]}
    rounding = StochasticRounding(np.array([[1, 2], [low, high]], np.uint32), 1, int(rounds))
    y, state = interpreted(triton_decode.update, arrays, {"dt_softplus": bool(softplus)}, rounding)
    np.testing.assert_array_equal(state.view(np.uint16), found["state_out"])
    np.testing.assert_array_equal(y.view(np.uint16), found["y"])


_WRITES = {
    "read": None,
    "last": np.array([5, 1, -1], np.int32),
    "each": np.array([[5, -1], [1, 0], [-1, 3]], np.int32),
}


@pytest.mark.parametrize("stores", _WRITES)
@pytest.mark.parametrize(
    ("headdim", "dstate", "state_dtype", "offset"), [(32, 96, FLOAT16, 0), (8, 64, BFLOAT16, 5)], ids=str
)
def test_rounding_is_xla_s_bit_for_bit(headdim, dstate, state_dtype, offset, stores):
    case = UpdateCase("exact", 3, headdim, 1, dstate, 3, num_tokens=2, slots=(4, 0, 2))
    arrays = exact({name: np.nan_to_num(value) for name, value in case.arrays(FLOAT32).items()})
    arrays = {name: value for name, value in arrays.items() if name != "dt_bias"}
    arrays["state"] = arrays["state"].astype(state_dtype)
    seeds = np.random.default_rng(1).integers(0, 2**32, (3, 2), dtype=np.uint32)
    rounding = StochasticRounding(seeds, 2, 5, head_offset=offset, total_heads=3 + offset)
    write_slots = _WRITES[stores]
    _, state = interpreted(triton_decode.update, arrays, {}, rounding, write_slots)
    expected = jax_ssd.selective_state_update(
        **arrays, write_slots=write_slots, rounding=rounding, implementation="xla"
    )
    np.testing.assert_array_equal(state.view(np.uint16), np.asarray(expected.state).view(np.uint16))
    assert (state != arrays["state"]).any()


def _contract_bits(bits, random):
    """float16 bits of float32 bits, by the formula of `jax_ssd.philox`."""
    return np.asarray(philox.round_stochastically(bits.view(np.float32), random, jnp.float16)).view(np.uint16)


def _toward_zero(exact_product):
    """float64 values cut off to float32."""
    nearest = exact_product.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(exact_product)
    return np.where(beyond & np.isfinite(exact_product), np.nextafter(nearest, np.float32(0)), nearest)


def _native_bits(bits, random):
    """What the PTX of kernels/triton/rounding.py computes, step by step."""
    scaled = _toward_zero(bits.view(np.float32).astype(np.float64) * 2.0**-112)
    scaled_bits = np.where(np.isnan(scaled), np.uint32(0x7FFFFFFF), scaled.view(np.uint32))
    whole = ((scaled_bits + (random & np.uint32(0x1FFF))) & np.uint32(0xFFFFE000)).view(np.float32)
    result = (whole.astype(np.float64) * 2.0**112 + scaled.astype(np.float64)).astype(np.float32)
    return result.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize("sign", [0, 1 << 31])
def test_scaling_to_subnormals_is_the_contract_at_every_exponent(sign):
    edges = [0, 1, 0x1FFF, 0x2000, 0x2001, 0x7FFFFF, 0x7FE000, 0x7FDFFF, 0x400000, 0x3FFFFF]
    mantissas = np.array(edges, np.uint32)
    random = np.concatenate([np.arange(0, 8192, 37), np.arange(8170, 8192), [4095, 4096]]).astype(np.uint32)
    bits = np.uint32(sign) | (np.arange(256, dtype=np.uint32)[:, None, None] << 23) | mantissas[:, None]
    bits, random = np.broadcast_arrays(bits, random)
    with np.errstate(over="ignore", invalid="ignore"):
        native = _native_bits(bits.copy(), random)
    contract = _contract_bits(bits.copy(), random)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    np.testing.assert_array_equal(native[~is_nan], contract[~is_nan])
    assert np.isnan(native[is_nan].view(np.float16)).all()


# Replay.


@pytest.mark.parametrize(
    ("tokens", "ring", "state_dtype", "rounds"),
    [(None, 4, FLOAT32, None), (2, 5, FLOAT32, None), (3, 8, FLOAT16, 5)],
    ids=str,
)
def test_replay_follows_xla_through_folds_and_rewinds(tokens, ring, state_dtype, rounds):
    case = UpdateCase("ring", 4, 24, 2, 48, 3, num_tokens=tokens, slots=(4, 0, -1), num_slots=5)
    slots = np.array(case.slots, np.int32)
    state = np.nan_to_num(case.arrays(FLOAT32)["state"]).astype(state_dtype)
    expected = ReplayCache.from_state(state, ring_size=ring, num_groups=2, dtype=np.float32)
    found = tuple(np.asarray(part) for part in expected)
    for step in range(7):
        arrays = {name: value for name, value in case.arrays(FLOAT32, seed=step).items() if name != "read_slots"}
        arrays.pop("state")
        rounding = StochasticRounding(np.full((2, 2), step, np.uint32), 1, rounds) if rounds else None
        y, found = interpreted(triton_decode.replay, found, arrays, case.options(), rounding, slots)
        result = jax_ssd.replay_update(
            expected, **arrays, **case.options(), slots=slots, rounding=rounding, implementation="xla"
        )
        expected = result.cache
        tolerances.check(y, result.y, FLOAT32, "value")
        for name, mine, theirs in zip(ReplayCache._fields, found, expected, strict=True):
            dtype = state_dtype if name == "state" else FLOAT32
            tolerances.check(mine, theirs, dtype, "state", name=f"{name} at step {step}")
        if tokens and step % 2:
            accepted = np.array([1, 2, 0], np.int32)
            expected = jax_ssd.rewind(expected, slots, accepted)
            found = tuple(
                np.asarray(part) for part in jax_ssd.rewind(ReplayCache(*map(jnp.asarray, found)), slots, accepted)
            )


# Compilation.

MODEL_SIZES = {
    "nemotron_8b": (128, 64, 8, 128),
    "nano_v2": (128, 80, 8, 128),
    "granite_350m": (48, 32, 1, 128),
    "falcon_h1": (24, 128, 2, 256),
    "zamba2": (112, 64, 2, 64),
    "irregular": (24, 40, 1, 72),
}
# A spilled register costs a trip to memory for each element; with more registers too few warps hide the loads.
MOST_REGISTERS = 168


def _problem(sizes, *, tokens=1, state="float16", rounds=5, stores="read", ring=None, dtype="bfloat16"):
    return problem.UpdateProblem(
        sizes=problem.Sizes(*(sizes[place] for place in (0, 1, 2, 3))),
        batch=4,
        num_tokens=tokens,
        dtype=dtype,
        dt_dtype=dtype,
        step_size=problem.StepSize(True, (0.0, float("inf"))),
        present=problem.Present(D="head", z=True, dt_bias=True),
        cache=problem.CacheUse(16, state, rounds),
        write_slots=stores,
        ring_size=ring,
    )


def _dtypes(call):
    tokens = dict.fromkeys(("x", "dt", "B", "C", "z", "y", "ring_x", "ring_B", "new_ring_x", "new_ring_B"), call.dtype)
    parameters = dict.fromkeys(("A", "D", "dt_bias", "ring_dt", "new_ring_dt"), "float32")
    return tokens | parameters | dict.fromkeys(("state", "new_state"), call.cache.dtype)


def _compiled(call, capability, overlap=False):
    from jax_ssd.kernels.triton import replay, update

    plan = (update_plan if call.ring_size is None else replay_plan)(
        call, settings.triton_update_tile(call), native=True, overlap=overlap
    )
    (launch,) = plan.launches
    return compile_launch(launch, update if call.ring_size is None else replay, _dtypes(call), capability)


COMPILED = {
    **{name: _problem(sizes) for name, sizes in MODEL_SIZES.items()},
    "float32": _problem(MODEL_SIZES["nemotron_8b"], state="float32", rounds=None, dtype="float32"),
    "bfloat16": _problem(MODEL_SIZES["nemotron_8b"], state="bfloat16"),
    "drafts": _problem(MODEL_SIZES["nemotron_8b"], tokens=8),
    "each": _problem(MODEL_SIZES["nemotron_8b"], tokens=4, stores="each"),
    "replay": _problem(MODEL_SIZES["nemotron_8b"], state="float32", rounds=None, ring=16),
    "replay_rounded": _problem(MODEL_SIZES["nano_v2"], tokens=2, ring=8),
}


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_hopper_without_spills(name, tmp_path):
    registers, stack, _ = usage(_compiled(COMPILED[name], 90), tmp_path)
    assert registers <= MOST_REGISTERS and stack == 0, (registers, stack)


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("name", ["nemotron_8b", "replay"])
def test_kernels_compile_for_other_architectures(name, capability, tmp_path):
    assert usage(_compiled(COMPILED[name], capability), tmp_path)[1] == 0


@pytest.mark.parametrize("name", ["nemotron_8b", "drafts", "replay"])
def test_a_launch_that_overlaps_waits_for_the_one_before(name):
    assert "griddepcontrol.wait" in _compiled(COMPILED[name], 90, overlap=True).asm["ptx"]
    assert "griddepcontrol" not in _compiled(COMPILED[name], 90).asm["ptx"]


def test_loads_and_stores_of_the_state_are_16_bytes_wide():
    ptx = _compiled(COMPILED["nemotron_8b"], 90).asm["ptx"]
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


# JAX.


def _has_jax_triton():
    try:
        settings.jax_triton()
    except ImportError:
        return False
    return True


@pytest.fixture
def needs_jax_triton():
    if not _has_jax_triton():
        pytest.skip("jax-triton, or JAX's CUDA plugin that it imports, is not installed")


CASE = UpdateCase("jax", 8, 64, 2, 128, 4, slots=(4, 0, 2, -1), num_slots=6)
SEEDS = np.arange(10, dtype=np.uint32).reshape(5, 2)


def _update(arrays, seeds, layer, **rounding):
    tokens = TokenCall(**{name: arrays[name] for name in arrays if name in TokenCall._fields}, **CASE.options())
    how = StochasticRounding(seeds, layer, 5, **rounding)
    call = UpdateCall(tokens, arrays["state"], arrays["read_slots"], None, how)
    checked = validate.update_problem(call)
    assert triton_update.unsupported(checked) is None
    return triton_update.run(checked, validate.update_arrays(call), compute_capability=90)


def _arrays():
    return CASE.arrays(BFLOAT16, state_dtype=FLOAT16)


def _lowered(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("needs_jax_triton")
class TestFromJax:
    def test_an_update_is_one_custom_call_in_place(self):
        text = _lowered(_update, _arrays(), SEEDS, jnp.int32(1))
        assert text.count("stablehlo.custom_call") == 1
        assert "output_tuple_indices = [1], operand_index = 0" in text

    def test_vmap_is_a_loop(self):
        arrays = {name: np.stack([value] * 3) for name, value in _arrays().items()}
        text = _lowered(jax.vmap(_update, in_axes=(0, None, 0)), arrays, SEEDS, jnp.arange(3))
        assert text.count("stablehlo.custom_call") == 1 and "stablehlo.while" in text

    def test_shards_know_their_heads(self):
        mesh = jax.make_mesh((2, 2), ("data", "head"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        arrays = _arrays()
        rows = {"read_slots": PartitionSpec("data")} | dict.fromkeys(("A", "D", "dt_bias"), PartitionSpec("head"))
        specs = {name: rows.get(name, PartitionSpec("data", "head")) for name in arrays}

        def shard(arrays, seeds):
            return _update(arrays, seeds, 1, head_offset=jax.lax.axis_index("head") * 4, total_heads=8)

        result = problem.UpdateResult(PartitionSpec("data", "head"), PartitionSpec("data", "head"))
        sharded = jax.shard_map(shard, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=result)
        assert _lowered(sharded, arrays, SEEDS).count("stablehlo.custom_call @triton") == 1

    def test_it_exports(self):
        allowed = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")]
        exported = jax.export.export(jax.jit(_update), platforms=("cuda",), disabled_checks=allowed)
        assert exported(_arrays(), SEEDS, jnp.int32(1)).in_avals[0].shape == _arrays()["A"].shape

    def test_gradients_are_refused_by_name(self):
        def loss(x):
            return _update(_arrays() | {"x": x}, SEEDS, 1).y.astype(jnp.float32).sum()

        with pytest.raises(NotImplementedError, match=r"selective_state_update: .*implementation='xla'"):
            _lowered(jax.grad(loss), _arrays()["x"])

    def test_a_replay_is_one_custom_call_in_place(self):
        cache = ReplayCache.from_state(jnp.zeros((6, 8, 64, 128)), ring_size=16, num_groups=2, dtype=jnp.bfloat16)

        def step(cache, arrays):
            tokens = TokenCall(**{name: arrays[name] for name in arrays if name in TokenCall._fields})
            call = ReplayCall(tokens, cache, jnp.asarray(CASE.slots), None)
            return triton_update.run(validate.replay_problem(call), validate.replay_arrays(call), compute_capability=90)

        text = _lowered(step, cache, _arrays())
        assert text.count("stablehlo.custom_call") == 1 and text.count("output_operand_alias<") == 7


# What is refused.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(sizes=(8, 64, 1, 100)), "dstate"),
        (dict(dtype="float64"), "float64"),
        (dict(tokens=17), "tokens"),
        (dict(ring=40, rounds=None), "rings"),
    ],
)
def test_what_the_kernels_cannot_do_has_a_reason(changes, reason):
    call = _problem(changes.pop("sizes", MODEL_SIZES["nemotron_8b"]), **changes)
    assert reason in triton_update.unsupported(call)


@pytest.mark.parametrize("sizes", MODEL_SIZES.values(), ids=MODEL_SIZES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_every_model_has_a_tile(sizes, tokens):
    call = _problem(sizes, tokens=tokens)
    assert triton_update.unsupported(call) is None
    assert settings.triton_update_reason(settings.triton_update_tile(call)) is None


@pytest.mark.parametrize("tile", [(3, 1, 64, 1), (16, 1, 4, 1), (4, 1, 64, 4), (16, 0, 64, 4)])
def test_a_wrong_tile_is_refused(tile):
    with pytest.raises(ValueError, match="expected"):
        TritonUpdateTile(*tile)
