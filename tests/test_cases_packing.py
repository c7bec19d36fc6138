"""Cases C17 to C23 and C33 that a CPU can run: packing, continuation, sharding, compilation and the cache."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ssd
from jax_ssd import reference
from tests.cases import ScanCase
from tests.harness import (
    FLOAT32,
    gradients,
    oracle,
    oracle_gradients,
    over_implementations,
    prefill,
    random_cotangents,
    require,
    same_bits,
    scan,
    split,
)
from tests.scalars import check_state, check_y, over_sizes, packed, scalar_problem, slopes_of
from tests.tolerances import check

TOKEN_ARRAYS = ("x", "dt", "B", "C", "z")


@over_implementations
@over_sizes
@pytest.mark.parametrize("form", ["cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_C17_documents_do_not_leak(implementation, sizes, form, chunk_size):
    arguments = scalar_problem(4, -0.1, sizes, x=[5.0, 7.0, 1.0, 1.0], chunk_size=chunk_size)
    other = scalar_problem(4, -0.1, sizes, x=[-300.0, 11.0, 1.0, 1.0], dt=[0.5, 2.0, 1.0, 1.0], chunk_size=chunk_size)
    if form == "cu_seqlens":
        arguments, other, second = packed(arguments, 2, 2), packed(other, 2, 2), np.s_[2:]
    else:
        seq_idx = {"seq_idx": np.array([[0, 0, 1, 1]], np.int32)}
        arguments, other, second = arguments | seq_idx, other | seq_idx, np.s_[:, 2:]
    result = scan(implementation, **arguments)
    check_y(result, [5.0, 7.0 + 5.0 * np.exp(-0.1), 1.0, 1.904837])
    assert same_bits(result.y[second], scan(implementation, **other).y[second])
    found = slopes_of(implementation, lambda result: jnp.sum(jnp.sin(result.y[second])), arguments)
    first = np.s_[:2] if form == "cu_seqlens" else np.s_[:, :2]
    for name in ("x", "dt", "B", "C"):
        assert not np.asarray(found[name][first]).any(), name
        assert np.asarray(found[name][second]).any(), name


@over_implementations
@pytest.mark.parametrize("states", [False, True])
def test_C18_empty_sequences(implementation, states):
    """Bit for bit the initial state; its gradient is the final state's cotangent; the others are their solo runs."""
    case = ScanCase("C18", 4, 64, 2, 128, seqlens=(0, 7, 0, 13, 0), D="head", z=True, initial_states=states)
    arguments = case.arrays(FLOAT32) | case.options()
    require(implementation, "chunk_scan", **arguments)
    cotangents = random_cotangents(jax_ssd.chunk_scan, 0, **arguments)
    result, found = gradients(jax_ssd.chunk_scan, cotangents, implementation=implementation, **arguments)
    expected, slopes = oracle_gradients(reference.chunk_scan, cotangents, **arguments)
    start = arguments["initial_states"] if states else np.zeros(result.final_states.shape, np.float32)
    empty = np.array([0, 2, 4])
    assert same_bits(result.final_states[empty], start[empty])
    if states:
        assert same_bits(found["initial_states"][empty], cotangents.final_states[empty])
    check(result.y, expected.y, FLOAT32, "value")
    check(result.final_states, expected.final_states, FLOAT32, "state")
    for name, slope in found.items():
        check(slope, slopes[name], FLOAT32, "gradient", name=name)
    for sequence, rows in ((1, slice(0, 7)), (3, slice(7, 20))):
        alone = {name: arguments[name][rows] for name in TOKEN_ARRAYS}
        alone["cu_seqlens"] = np.array([0, rows.stop - rows.start], np.int32)
        if states:
            alone["initial_states"] = arguments["initial_states"][sequence : sequence + 1]
        solo = scan(implementation, **arguments | alone)
        check(result.y[rows], solo.y, FLOAT32, "value")
        check(result.final_states[sequence], solo.final_states[0], FLOAT32, "state")


@over_implementations
@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (1, 3, 5, 247)])
def test_C19_pieces_with_the_state_carried(implementation, lengths):
    case = ScanCase("C19", 2, 64, 1, 64, num_tokens=256, D="head", z=True, dt_bias=True, dt_softplus=True)
    arguments = case.arrays(FLOAT32) | case.options()
    whole = scan(implementation, **arguments)
    bounds, outputs, state = np.cumsum([0, *lengths]), [], None
    for start, end in itertools.pairwise(bounds):
        piece = {name: arguments[name][:, start:end] for name in TOKEN_ARRAYS}
        result = scan(implementation, **arguments | piece, initial_states=state)
        state = result.final_states
        outputs.append(result.y)
    check(np.concatenate(outputs, axis=1), whole.y, FLOAT32, "value")
    check(state, whole.final_states, FLOAT32, "state")


@over_implementations
@over_sizes
def test_C20_padding_does_not_decay_the_state(implementation, sizes):
    arguments = packed(scalar_problem(8, -0.5, sizes, x=[1.0, 2.0, 3.0, *[0.0] * 5]), 3)
    for fill in (1.0, np.nan):
        padded = dict(arguments)
        for name in ("x", "dt", "B", "C"):
            padded[name] = np.concatenate([arguments[name][:3], np.full_like(arguments[name][3:], fill)])
        result = scan(implementation, **padded)
        check_state(result, 4.580941)
        assert not np.asarray(result.y[3:]).any()
        found = slopes_of(implementation, lambda result: jnp.sum(result.y) + jnp.sum(result.final_states), padded)
        for name in ("x", "dt", "B", "C"):
            assert not np.asarray(found[name][3:]).any(), name
            assert np.isfinite(found[name]).all(), name


def _communication(compiled):
    text = compiled.as_text()
    words = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return [word for word in words if word in text]


def _two_devices(axis):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    return Mesh(np.array(devices[:2]), (axis,))


def _sharding_problem():
    case = ScanCase("C21", 4, 64, 2, 128, batch=2, num_tokens=40, D="head", z=True, dt_bias=True, initial_states=True)
    return case.arrays(FLOAT32) | case.options()


@over_implementations
@pytest.mark.parametrize("axis", ["batch", "heads"])
@pytest.mark.parametrize("way", ["shard_map", "parallel"])
def test_C21_no_communication(implementation, axis, way):
    """Over the batch and over heads every device works alone: the compiled program communicates nothing."""
    arguments = _sharding_problem()
    require(implementation, "chunk_scan", **arguments)
    arrays, static = split(arguments)
    mesh = _two_devices("shards")
    heads = {"x": 2, "dt": 2, "z": 2, "B": 2, "C": 2, "A": 0, "D": 0, "dt_bias": 0, "initial_states": 1}
    batched = {name: P("shards") if name in (*TOKEN_ARRAYS, "initial_states") else P() for name in arrays}
    specs = batched if axis == "batch" else {name: P(*[None] * heads[name], "shards") for name in arrays}

    def local(arrays):
        return tuple(jax_ssd.chunk_scan(**arrays, **dict(static), implementation=implementation)[:2])

    if way == "shard_map":
        results = (specs["x"], specs["initial_states"])
        function = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=results)
    else:
        axes = {"batch_axis": "shards"} if axis == "batch" else {"head_axis": "shards"}

        def function(arrays):
            return tuple(jax_ssd.parallel.chunk_scan(**arrays, **dict(static), mesh=mesh, **axes)[:2])

    placed = {name: jax.device_put(value, jax.NamedSharding(mesh, specs[name])) for name, value in arrays.items()}
    compiled = jax.jit(function).lower(placed).compile()
    assert _communication(compiled) == []
    y, final_states = compiled(placed)
    expected = scan(implementation, **arguments)
    check(y, expected.y, FLOAT32, "value")
    check(final_states, expected.final_states, FLOAT32, "state")


@over_implementations
@pytest.mark.parametrize("states", [False, True])
def test_C22_compilations_do_not_grow_with_lengths(implementation, states):
    """1000 packings and more, padded by the caller to three lengths, compile three programs; results stay right."""
    buckets = (32, 64, 128)
    case = ScanCase("C22", 2, 8, 1, 8, seqlens=(128,), initial_states=states)
    full = case.arrays(FLOAT32)
    require(implementation, "chunk_scan", **full)
    traces = []

    @jax.jit
    def function(arrays):
        traces.append(arrays["x"].shape)
        return jax_ssd.chunk_scan(**arrays, implementation=implementation)

    draw = np.random.default_rng(0)
    lengths = [20, 30, 40, *draw.integers(1, 129, 1000)]
    for count, length in enumerate(lengths):
        bucket = next(bucket for bucket in buckets if bucket >= length)
        arrays = full | {name: full[name][:bucket] for name in ("x", "dt", "B", "C")}
        arrays["cu_seqlens"] = np.array([0, length], np.int32)
        result = function(arrays)
        if count % 100 < 3:
            expected = oracle(reference.chunk_scan, **arrays)
            check(result.y, expected.y, FLOAT32, "value")
            check(result.final_states, expected.final_states, FLOAT32, "state")
    assert len(traces) == len(buckets)


def _packed_call(arrays, implementation):
    return jax_ssd.chunk_scan(**arrays, implementation=implementation)


@over_implementations
@over_sizes
def test_C23_a_new_request_does_not_read_its_slot(implementation, sizes):
    arguments = packed(scalar_problem(1, -1.0, sizes), 1)
    shape = (sizes["num_heads"], sizes["headdim"], sizes["dstate"])
    stale = {"cache": np.full((3, *shape), np.nan, np.float32), "slots": np.array([1], np.int32)}
    result = prefill(implementation, **arguments, **stale, has_initial_state=np.array([False]))
    assert (np.asarray(result.y) == 1.0).all()
    assert (np.asarray(result.cache[1, ..., 0]) == 1.0).all()
    assert not np.asarray(result.cache[1, ..., 1:]).any()
    assert np.isnan(result.cache[np.array([0, 2])]).all()


@over_implementations
@over_sizes
def test_C23_flags_are_read_one_by_one(implementation, sizes):
    arguments = packed(scalar_problem(2, -1.0, sizes), 1, 1)
    shape = (sizes["num_heads"], sizes["headdim"], sizes["dstate"])
    cache = np.full((3, *shape), np.nan, np.float32)
    cache[2] = 0.0
    cache[2, ..., 0] = 2.0
    result = prefill(
        implementation,
        **arguments,
        cache=cache,
        slots=np.array([1, 2], np.int32),
        has_initial_state=np.array([False, True]),
    )
    check_y(result, [1.0, 1.0 + 2.0 * np.exp(-1.0)])
    check(result.cache[2, ..., 0], np.full(shape[:2], 1.0 + 2.0 * np.exp(-1.0)), FLOAT32, "state")


@over_implementations
def test_C33_no_hidden_state_between_calls(implementation):
    """1000 calls with new arrays of the same shapes and other contents: each is what a fresh program gives."""
    case = ScanCase("C33", 2, 8, 1, 8, seqlens=(10, 20, 10), padding=8)
    base = case.arrays(FLOAT32)
    require(implementation, "chunk_scan", **base)
    function = jax.jit(functools.partial(_packed_call, implementation=implementation))
    draw = np.random.default_rng(0)
    for _ in range(1000):
        arrays = {name: value.copy() for name, value in base.items()}
        arrays["cu_seqlens"][1:] = np.sort(draw.integers(0, 49, 3))
        result = function({name: jnp.asarray(value) for name, value in arrays.items()})
        expected = oracle(reference.chunk_scan, **arrays)
        check(result.y, expected.y, FLOAT32, "value")
        check(result.final_states, expected.final_states, FLOAT32, "state")
