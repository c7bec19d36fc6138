"""The Triton scan: interpreted, compiled for CUDA without a GPU, lowered from JAX, and launched by torch on a GPU."""

import dataclasses
import functools
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jax_ssd
from jax_ssd import StochasticRounding, problem, reference, settings
from jax_ssd.implementations import triton_plan, triton_scan
from jax_ssd.problem import DeviceInfo
from jax_ssd.settings import TritonScanTile
from tests.cases import BY_NAME, SMALL, ScanCase
from tests.harness import BFLOAT16, FLOAT16, FLOAT32, oracle, same_bits
from tests.interpreter import interpreted
from tests.tolerances import check
from tests.triton_compile import compile_launch, lowered, needs_jax_triton, num_launches, usage
from tests.triton_scan import checked
from tests.triton_scan import scan as torch_scan

triton = pytest.importorskip("triton")

H200 = DeviceInfo("gpu", (9, 0), 132, 232448)
WHOLE, CUT = {"chunk": 16, "segment": 0}, {"chunk": 16, "segment": 16}
over_tiles = pytest.mark.parametrize("tile", [WHOLE, CUT], ids=["whole", "segments"])
# Decays so slowly that what entered a sequence is still there at its end.
SLOW = ScanCase(
    "slow", 2, 16, 1, 16, seqlens=(75, 20), initial_states=True, dt_range=(1e-5, 1e-4), checkpoints=(60, 80)
)


def arguments_of(case, dtype=FLOAT32):
    return case.arrays(dtype) | case.options()


def shapes_of(case):
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in case.arrays(BFLOAT16).items()}


def scan(arguments, tile=None):
    return interpreted(torch_scan, arguments, tile)


def check_scan(result, arguments, dtype, decay=0.0):
    expected = oracle(reference.chunk_scan, **arguments)
    check(result.y, expected.y, dtype, "value", decay=decay, name="y")
    check(result.final_states, expected.final_states, dtype, "state", decay=decay, name="final_states")
    if expected.checkpoint_states is not None:
        check(result.checkpoint_states, expected.checkpoint_states, dtype, "state", decay=decay, name="checkpoints")


# Values. The interpreter cuts bfloat16 off instead of rounding it, so its errors mean nothing there.


@pytest.mark.parametrize(
    ("dtype", "tile"), [(FLOAT32, WHOLE), (FLOAT32, CUT), (FLOAT16, CUT)], ids=["whole", "segments", "float16"]
)
@pytest.mark.parametrize("case", (*SMALL, SLOW), ids=lambda case: case.name)
def test_value_states_and_checkpoints(case, dtype, tile):
    arguments = arguments_of(case, dtype)
    check_scan(scan(arguments, tile), arguments, dtype, case.decay())


def test_sizes_that_are_no_powers_of_two():
    case = dataclasses.replace(BY_NAME["irregular"], num_heads=3, seqlens=(29, 12), headdim=40, dstate=24)
    arguments = arguments_of(case)
    check_scan(scan(arguments), arguments, FLOAT32)


@over_tiles
def test_a_sequence_keeps_its_bits_in_a_pack(tile):
    """Alone, packed, and with NaN in the tokens after it."""
    case = dataclasses.replace(BY_NAME["packed"], seqlens=(7, 0, 13, 40), checkpoints=None)
    arguments = arguments_of(case)
    for name in ("x", "dt", "B", "C", "z"):
        arguments[name][60:] = np.nan
    whole = scan(arguments, tile)
    assert not whole.y[60:].any()
    for index, (start, stop) in enumerate([(0, 7), (7, 7), (7, 20), (20, 60)]):
        if start == stop:
            assert same_bits(whole.final_states[index], arguments["initial_states"][index])
            continue
        one = arguments | {name: arguments[name][start:stop] for name in ("x", "dt", "B", "C", "z")}
        one |= {"cu_seqlens": np.array([0, stop - start], np.int32)}
        one |= {"initial_states": arguments["initial_states"][index : index + 1]}
        alone = scan(one, tile)
        assert same_bits((alone.y, alone.final_states[0]), (whole.y[start:stop], whole.final_states[index]))


@over_tiles
def test_the_parts_of_a_sequence_make_the_whole(tile):
    case = ScanCase("split", 2, 16, 1, 16, seqlens=(50,), D="head", z=True)
    arguments = arguments_of(case)
    expected = oracle(reference.chunk_scan, **arguments)
    for cut in (1, 16, 33):
        state, parts = np.zeros((1, 2, 16, 16), np.float32), []
        for rows in (slice(0, cut), slice(cut, 50)):
            part = arguments | {name: arguments[name][rows] for name in ("x", "dt", "B", "C", "z")}
            bounds = np.array([0, part["x"].shape[0]], np.int32)
            result = scan(part | {"cu_seqlens": bounds, "initial_states": state}, tile)
            state = result.final_states
            parts.append(result.y)
        check(np.concatenate(parts), expected.y, FLOAT32, "value")
        check(state, expected.final_states, FLOAT32, "state")


def test_the_same_call_gives_the_same_bits():
    arguments = arguments_of(BY_NAME["packed"])
    assert same_bits(scan(arguments, CUT), scan(arguments, CUT))


def test_seq_idx_lets_nothing_through():
    arguments = arguments_of(BY_NAME["documents"])
    changed = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    changed["x"][:, 20:] += 1.0
    before, after = scan(arguments, CUT), scan(changed, CUT)
    assert same_bits(before.y[0, :20], after.y[0, :20]) and (before.y != after.y).any()
    changed["x"][:, 20:], changed["x"][0, :20] = arguments["x"][:, 20:], 7.0
    after = scan(changed, CUT)
    assert same_bits(before.y[0, 20:], after.y[0, 20:]) and same_bits(before.final_states[0], after.final_states[0])


# Prefill.

SLOTS, FLAGS = np.array([5, -1, 2, 9], np.int32), np.array([True, True, False, True])


def _prefill_arguments(cache_dtype):
    case = ScanCase("prefill", 2, 16, 1, 16, seqlens=(20, 9, 37, 8), checkpoints=(10, 50, 60), D="head")
    pool = np.random.default_rng(3).normal(size=(7, 2, 16, 16))
    pool[[1, 2, 3, 6]] = np.nan  # nobody starts from these
    given = dict(cache=pool.astype(cache_dtype), slots=jnp.asarray(SLOTS), has_initial_state=FLAGS)
    return arguments_of(case) | given | dict(checkpoint_slots=np.array([1, 3, -1], np.int32))


@over_tiles
@pytest.mark.parametrize(
    ("cache_dtype", "rounds"), [(FLOAT32, None), (FLOAT16, None), (FLOAT16, 5), (BFLOAT16, 10)], ids=str
)
def test_a_prefill_stores_the_bits_of_a_scan_s_states(cache_dtype, rounds, tile):
    """Slots out of range or negative are padding; slots that are not written keep their bits."""
    arguments = _prefill_arguments(cache_dtype)
    seeds = np.array([[1, 2], [0xDEADBEEF, 0x12345678]], np.uint32)
    rounding = None if rounds is None else StochasticRounding(seeds, 1, rounds, head_offset=3, total_heads=6)
    result = scan(arguments | {"rounding": rounding}, tile)
    start = np.where(FLAGS[:, None, None, None], arguments["cache"].astype(np.float32)[[5, 0, 2, 0]], 0.0)
    plain = {name: value for name, value in arguments.items() if name not in ("cache", "checkpoint_slots")}
    plain = scan(plain | {"initial_states": start.astype(np.float32), "slots": None, "has_initial_state": None}, tile)
    owned = np.r_[0:20, 29:66]
    assert same_bits(result.y[owned], plain.y[owned]) and not result.y[20:29].any() and not result.y[66:].any()
    states = np.concatenate([plain.final_states[[0, 2]], plain.checkpoint_states[[0, 1]]])
    where = np.array([5, 2, 1, 3], np.int32)
    stored = states.astype(cache_dtype)
    if rounding is not None:
        stored = np.asarray(rounding.round(states, where, jnp.dtype(cache_dtype)))
    assert same_bits(result.final_states[where], stored)
    rest = [0, 4, 6]
    assert same_bits(result.final_states[rest], arguments["cache"][rest])


# Compilation.

# Bytes of stack. A spill costs a trip to memory in every chunk, and what Triton spills changes from release to release.
_MEASURED = triton.__version__ == settings.tuned_triton_scan()["versions"]["triton"]
MOST_STACK = {"prepare": 0, "segment_states": 0, "scan": 64 if _MEASURED else 480}
MOST_SHARED = 113 * 1024  # of 228 KiB: two programs on a multiprocessor


def _problem(sizes=(128, 64, 8, 128), *, tokens=8192, seqs=1, dtype="bfloat16", cache=None, present=None, kept=None):
    return problem.ScanProblem(
        sizes=problem.Sizes(*sizes),
        num_tokens=tokens,
        num_seqs=seqs,
        uniform_length=None,
        num_checkpoints=kept,
        dtype=dtype,
        dt_dtype=dtype,
        state_dtype="float32",
        step_size=problem.StepSize(True, (0.0, float("inf"))),
        present=present or problem.Present(D="head", dt_bias=True),
        cache=cache,
    )


def _compiled(call, capability, kernel):
    from jax_ssd.kernels.triton import scan as kernels

    tile = settings.triton_scan_tile(call, 132, None, (capability // 10, 0))
    plan = triton_plan.scan_plan(call, tile, triton_plan.dense_strides(call), upcast=False)
    dtypes = dict.fromkeys(("x", "dt", "B", "C", "z", "y"), call.dtype)
    dtypes |= dict.fromkeys(("A", "D", "dt_bias", "initial_states"), "float32")
    dtypes |= {"seeds": "uint32", "has_initial_state": "bool"}
    dtypes |= {name: buffer.dtype for name, buffer in plan.buffers.items()}
    dtypes |= {"cache": call.cache.dtype} if call.cache else {}
    (launch,) = (launch for launch in plan.launches if launch.kernel == kernel)
    return compile_launch(launch, kernels, dtypes, capability)


SHARD = _problem((16, 64, 1, 128))
POOLED = _problem(
    (16, 80, 1, 96), cache=problem.CacheUse(9, "float16", 5), present=problem.Present(initial_states=True), kept=3
)


@pytest.mark.parametrize("kernel", MOST_STACK)
def test_the_kernels_compile_for_hopper(kernel, tmp_path):
    compiled = _compiled(SHARD, 90, kernel)
    _, stack, _ = usage(compiled, tmp_path)
    assert stack <= MOST_STACK[kernel] and compiled.metadata.shared <= MOST_SHARED, (stack, compiled.metadata.shared)


@pytest.mark.parametrize("capability", [80, 100])
def test_the_scan_compiles_for_other_architectures(capability, tmp_path):
    assert usage(_compiled(_problem(), capability, "scan"), tmp_path)[1] <= MOST_STACK["scan"]


@pytest.mark.parametrize("call", [POOLED, _problem((4, 64, 1, 64), dtype="float32")], ids=["prefill", "float32"])
def test_options_compile_for_hopper(call, tmp_path):
    assert usage(_compiled(call, 90, "scan"), tmp_path)[0] <= 255


def test_packings_and_lengths_share_their_kernels():
    """1,000 random packings, one variant: nothing that a packing changes is a compile-time constant or specialised."""
    from jax_ssd.kernels.triton import scan as kernels

    draw, variants = np.random.default_rng(0), set()
    for _ in range(1000):
        seqs = int(draw.integers(1, 40))
        call = _problem(tokens=int(draw.integers(1, 900)), seqs=seqs)
        tile = settings.triton_scan_tile(call, 132)
        plan = triton_plan.scan_plan(call, tile, triton_plan.dense_strides(call), upcast=False)
        variants.add(
            tuple(
                (launch.kernel, tuple(sorted(launch.constants.items())), launch.num_warps, launch.num_stages)
                for launch in plan.launches
            )
        )
        for launch in plan.launches:
            parameters = getattr(kernels, launch.kernel).params[len(launch.inputs) :][: len(launch.numbers)]
            assert all(parameter.do_not_specialize for parameter in parameters)
    assert len(variants) == 1


# Tiles.


@pytest.mark.parametrize(
    "row", settings.tuned_triton_scan()["winners"], ids=lambda row: f"{row['heads']}x{row['length']}"
)
def test_the_choice_is_the_measured_winner(row):
    call = _problem(
        (row["heads"], 64, row["groups"], 128), tokens=row["sequences"] * row["length"], seqs=row["sequences"]
    )
    assert settings.triton_scan_tile(call, 132).segment == row["segment"]
    found = triton_scan.configuration(call, H200)
    assert found["segment"] == row["segment"] and found["launches"] == (3 if row["segment"] else 2)


def test_explain_names_the_segment():
    arguments = shapes_of(ScanCase("long", 16, 64, 1, 128, seqlens=(8192,)))
    verdicts = {verdict.name: verdict for verdict in jax_ssd.explain("chunk_scan", **arguments, device=H200)}
    if verdicts["triton"].reason is None:
        assert verdicts["triton"].configuration["segment"] == 512 and verdicts["triton"].configuration["launches"] == 3
    else:
        assert "jax_triton" in verdicts["triton"].reason


@pytest.mark.parametrize(("text", "expected"), [("0", "0"), ("256", "256"), ("100", "ValueError"), ("x", "ValueError")])
def test_the_environment_pins_the_segment(text, expected):
    code = "from jax_ssd import settings; print(settings._PINNED_SEGMENT)"
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    result = run([sys.executable, "-c", code], env={"JAX_SSD_TRITON_SEGMENT": text, "JAX_PLATFORMS": "cpu"})
    assert expected in (result.stderr if expected == "ValueError" else result.stdout)


def test_the_table_says_when_and_with_what_it_was_measured():
    table = settings.tuned_triton_scan()
    assert set(table) == {"date", "versions", "half", "winners"} and json.dumps(table)


@pytest.mark.parametrize("changes", [{"chunk": 24}, {"rows": 8}, {"columns": 100}, {"segment": 100}], ids=str)
def test_a_wrong_tile_is_refused(changes):
    tile = dict(chunk=64, rows=64, columns=128, num_warps=4, num_stages=3, segment=0, state_warps=4, state_stages=3)
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: expected"):
        TritonScanTile(**tile | changes)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_problem(dtype="float64"), "float64"),
        (_problem((4, 64, 1, 512)), "dstate"),
        (_problem(tokens=0), "empty"),
        (_problem((4, 64, 1, 256), dtype="float32"), "shared memory"),
    ],
)
def test_what_the_kernels_cannot_do_has_a_reason(call, reason):
    assert reason in triton_scan.unsupported(call, dataclasses.replace(H200, shared_memory_per_block=32768))


@pytest.mark.parametrize("shared_memory", [101376, 166912, 232448])  # RTX 4090, A100, H200
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [(128, 80, 8, 128), (48, 32, 1, 128), (24, 128, 2, 256), (112, 64, 2, 64)])
def test_every_model_has_a_tile_on_every_gpu(sizes, dtype, shared_memory):
    device = dataclasses.replace(H200, shared_memory_per_block=shared_memory)
    assert triton_scan.unsupported(_problem(sizes, dtype=dtype), device) is None


def test_scratch_is_small():
    """At the first row of the speed table: at most 15% of the inputs, and no state per chunk."""
    call = dataclasses.replace(_problem(), present=problem.Present())
    tile = settings.triton_scan_tile(call, 132)
    plan = triton_plan.scan_plan(call, tile, triton_plan.dense_strides(call), upcast=False)
    count = {name: int(np.prod(buffer.shape)) for name, buffer in plan.buffers.items()}
    scratch = sum(4 * size for name, size in count.items() if name not in triton_plan.RESULTS)
    tokens, (heads, headdim, groups, dstate) = 8192, (128, 64, 8, 128)
    assert scratch <= 0.15 * 2 * tokens * (heads * headdim + heads + 2 * groups * dstate)


# JAX.


def run_on_triton(arguments) -> Any:
    call, canonical = checked(arguments)
    assert triton_scan.unsupported(call, H200) is None
    return triton_scan.run(call, canonical, H200)


def _arrays(name="nemotron_nano_30b"):
    return {key: jnp.asarray(value) for key, value in BY_NAME[name].arrays(BFLOAT16).items()}


def _prefill_arrays(cache_dtype):
    arguments = _prefill_arguments(cache_dtype)
    return {key: jnp.asarray(value) for key, value in arguments.items() if isinstance(value, np.ndarray | jax.Array)}


def _loss(x, arrays):
    result = run_on_triton(arrays | {"x": x})
    return result.y.astype(jnp.float32).sum() + result.final_states.sum()


@needs_jax_triton
class TestFromJax:
    @pytest.mark.parametrize("name", ["nemotron_8b", "nemotron_nano_30b", "packed", "documents"])
    def test_a_scan_is_two_launches(self, name):
        assert num_launches(lowered(run_on_triton, _arrays(name))) == 2

    def test_a_long_scan_of_few_heads_is_three(self):
        shapes = shapes_of(ScanCase("long", 2, 64, 1, 128, seqlens=(4096,)))
        assert num_launches(lowered(run_on_triton, shapes)) == 3

    def test_a_prefill_is_two_launches_in_place(self):
        arguments = _prefill_arrays(FLOAT16)

        def step(arguments, seeds, layer):
            return run_on_triton(arguments | {"rounding": StochasticRounding(seeds, layer, 5)})

        text = lowered(step, arguments, np.zeros((2, 2), np.uint32), jnp.int32(1))
        assert num_launches(text) == 2 and "output_operand_alias" in text

    def test_the_gradient_runs_on_xla(self):
        """The scan's two launches and none for the gradient."""
        arrays = _arrays()
        assert num_launches(lowered(jax.value_and_grad(_loss), arrays["x"], arrays)) == 2

    def test_a_second_derivative_is_refused(self):
        arrays = _arrays()
        with pytest.raises(NotImplementedError, match=r"chunk_scan: no second derivatives .*implementation='xla'"):
            lowered(jax.grad(lambda x: jax.grad(_loss)(x, arrays).astype(jnp.float32).sum()), arrays["x"])

    def test_a_prefill_has_no_derivative(self):
        arguments = _prefill_arrays(FLOAT32)
        with pytest.raises(NotImplementedError, match=r"prefill: no derivative"):
            lowered(jax.grad(lambda x: run_on_triton(arguments | {"x": x}).y.sum()), arguments["x"])

    def test_vmap_is_a_loop(self):
        arrays = _arrays()
        mapped = jax.vmap(lambda x: run_on_triton(arrays | {"x": x}))
        text = lowered(mapped, jnp.stack([arrays["x"]] * 3))
        assert num_launches(text) == 2 and "stablehlo.while" in text

    def test_shards_over_batch_and_heads(self):
        mesh = jax.make_mesh((2, 2), ("data", "head"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        arrays = _arrays("plain")
        spec = {"A": PartitionSpec("head")}
        specs = {name: spec.get(name, PartitionSpec("data", None, "head")) for name in arrays}
        y, state = PartitionSpec("data", None, "head"), PartitionSpec("data", "head")
        sharded = jax.shard_map(
            lambda arrays: tuple(run_on_triton(arrays)[:2]), mesh=mesh, in_specs=(specs,), out_specs=(y, state)
        )
        assert num_launches(lowered(sharded, arrays)) == 2

    def test_it_exports(self):
        allowed = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")]
        exported = jax.export.export(jax.jit(run_on_triton), platforms=("cuda",), disabled_checks=allowed)
        assert len(exported(_arrays()).out_avals) == 2


# On a GPU, launched by torch.


def _on_gpu(arguments):
    """(problem, tensors on the GPU by the names of a plan)."""
    from tests.triton_decode import to_torch
    from tests.triton_scan import named

    call, canonical = checked(arguments)
    return call, {name: to_torch(value).cuda() for name, value in named(call, canonical).items()}


@pytest.mark.gpu
class TestFromTorch:
    @pytest.mark.parametrize("dtype", (FLOAT32, BFLOAT16, FLOAT16), ids=lambda dtype: dtype.name)
    @pytest.mark.parametrize("name", BY_NAME)
    def test_value_states_and_fifty_repetitions(self, name, dtype):
        from bridge.native_scan import scan as native
        from tests.triton_decode import to_numpy

        arguments = arguments_of(BY_NAME[name], dtype)
        call, tensors = _on_gpu(arguments)
        first = {key: to_numpy(value.cpu()) for key, value in native(call, tensors).items()}
        y = first["y"].reshape(arguments["x"].shape)
        check_scan(
            problem.ScanResult(y, first["final"], first.get("checkpoints")), arguments, dtype, BY_NAME[name].decay()
        )
        for _ in range(50):
            again = {key: to_numpy(value.cpu()) for key, value in native(call, tensors).items()}
            assert same_bits(first, again)

    def test_torch_and_jax_write_the_same_bits(self):
        from bridge.native_scan import scan as native
        from tests.triton_decode import to_numpy

        arguments = arguments_of(BY_NAME["packed"], BFLOAT16)
        call, tensors = _on_gpu(arguments)
        mine = native(call, tensors)
        theirs = jax_ssd.chunk_scan(**arguments, implementation="triton")
        found = (to_numpy(mine["y"].cpu()), to_numpy(mine["final"].cpu()), to_numpy(mine["checkpoints"].cpu()))
        assert same_bits(found, tuple(np.asarray(value) for value in theirs))

    def test_random_packings_compile_one_variant(self):
        from bridge.native_scan import run_plan
        from jax_ssd.kernels.triton import scan as kernels

        draw = np.random.default_rng(1)
        counts = set()
        for _ in range(1000):
            seqlens = tuple(int(n) for n in draw.integers(0, 90, draw.integers(1, 5)))
            case = ScanCase("any", 2, 16, 1, 16, seqlens=seqlens, padding=1)
            call, tensors = _on_gpu(arguments_of(case, BFLOAT16))
            tile = settings.triton_scan_tile(call, 132)
            run_plan(triton_plan.scan_plan(call, tile, triton_plan.dense_strides(call), upcast=False), tensors)
            caches = (getattr(kernels, kernel).device_caches[0][0] for kernel in ("prepare", "scan"))
            counts.add(sum(len(cache) for cache in caches))
        assert len(counts) == 1
