"""Under jit with traced metadata, vmap, shard_map, jax.checkpoint and jax.export, results are those of plain calls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ssd
from jax_ssd import reference
from tests.cases import BY_NAME, UPDATES
from tests.harness import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    QUICKLY,
    call,
    oracle,
    over_implementations,
    require,
    same_bits,
    scan,
    split,
    update,
)
from tests.tolerances import check

TOKEN = next(case for case in UPDATES if case.name == "token")
KEYS = np.array([[123456789, 987654321], [5, 6]], np.uint32)


def scan_arguments(name, dtype=FLOAT32):
    case = BY_NAME[name]
    return case.arrays(dtype) | case.options()


@over_implementations
def test_traced_metadata_compiles_once(implementation):
    """cu_seqlens, checkpoints and slots are data: other values, the same program, right results."""
    arguments = scan_arguments("packed")
    require(implementation, "chunk_scan", **arguments)
    arrays, static = split(arguments)
    traces = []

    @jax.jit
    def compiled(arrays):
        traces.append(arrays)
        return jax_ssd.chunk_scan(**arrays, **dict(static), implementation=implementation)

    for lengths in ((7, 0, 13, 30), (0, 0, 0, 0), (59, 0, 0, 0), (1, 1, 1, 1), (8, 16, 24, 0)):
        arrays["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int32)
        expected = oracle(reference.chunk_scan, **arrays, **dict(static))
        result = compiled(arrays)
        check(result.y, expected.y, FLOAT32, "value")
        check(result.final_states, expected.final_states, FLOAT32, "state")
        check(result.checkpoint_states, expected.checkpoint_states, FLOAT32, "state")
    assert len(traces) == 1


@over_implementations
def test_metadata_is_never_fetched(implementation):
    """No device-to-host transfer happens in a call, eager or compiled."""
    arguments = {
        name: jnp.asarray(v) if hasattr(v, "dtype") else v for name, v in scan_arguments("packed_plain").items()
    }
    token = {name: jnp.asarray(v) if hasattr(v, "dtype") else v for name, v in (TOKEN.arrays(FLOAT32)).items()}
    require(implementation, "chunk_scan", **arguments)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        result = jax_ssd.chunk_scan(**arguments, implementation=implementation)
        state = jax_ssd.selective_state_update(**token, **TOKEN.options(), implementation=implementation).state
    jax.block_until_ready((result, state))


@over_implementations
@pytest.mark.parametrize("name", ["everything", "packed"])
def test_vmap_is_a_loop(implementation, name):
    """Mapped over every array at once, and over tokens only."""
    arguments = scan_arguments(name)
    require(implementation, "chunk_scan", **arguments)
    arrays, static = split(arguments)
    second = BY_NAME[name].arrays(FLOAT32, seed=1)
    if name == "packed":
        second["cu_seqlens"] = np.array([0, 30, 30, 41, 59], np.int32)
    stacked = {key: np.stack([arrays[key], second[key]]) for key in arrays}

    def function(arrays):
        return jax_ssd.chunk_scan(**arrays, **dict(static), implementation=implementation)

    result = jax.jit(jax.vmap(function))(stacked)
    shared = {key: stacked[key] if key in ("x", "z") else arrays[key] for key in arrays}
    axes = {key: 0 if key in ("x", "z") else None for key in arrays}
    partly = jax.jit(jax.vmap(function, in_axes=(axes,)))(shared)
    for row, given in enumerate((arrays, second)):
        expected = oracle(reference.chunk_scan, **given, **dict(static))
        check(result.y[row], expected.y, FLOAT32, "value")
        check(result.final_states[row], expected.final_states, FLOAT32, "state")
        mixed = arrays | {key: given[key] for key in ("x", "z")}
        check(partly.y[row], oracle(reference.chunk_scan, **mixed, **dict(static)).y, FLOAT32, "value")


@over_implementations
def test_vmap_of_gradients(implementation):
    arguments = scan_arguments("everything")
    require(implementation, "chunk_scan", **arguments)
    arrays, static = split(arguments)
    x = np.stack([arrays["x"], BY_NAME["everything"].arrays(FLOAT32, seed=1)["x"]])

    def loss(x, function, **options):
        result = function(**arrays | {"x": x}, **dict(static) | options)
        return jnp.sum(result.y**2) + jnp.sum(result.final_states)

    found = jax.jit(jax.vmap(jax.grad(lambda x: loss(x, jax_ssd.chunk_scan, implementation=implementation))))(x)
    arrays = {name: value.astype(np.float64) for name, value in arrays.items()}
    static = tuple(option for option in static if option[0] != "chunk_size")
    with jax.enable_x64(True):
        for row in range(2):
            expected = jax.grad(loss)(jnp.asarray(x[row], jnp.float64), reference.chunk_scan)
            check(found[row], expected, FLOAT32, "gradient")


@over_implementations
@pytest.mark.parametrize("state_dtype", (FLOAT16, BFLOAT16), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("what", ["state", "seeds", "layer"])
def test_vmap_rounds_as_a_loop(implementation, state_dtype, what):
    """Rounding bits under vmap are those of a loop over the mapped axis, whichever operand is mapped."""
    arrays = TOKEN.arrays(FLOAT32, state_dtype=state_dtype)
    require(implementation, "selective_state_update", **arrays)
    state = np.stack([arrays["state"], arrays["state"] * np.asarray(0.7, state_dtype)])
    seeds, layers = np.stack([KEYS, KEYS + np.uint32(9)]), np.array([0, 1], np.int32)
    mapped = {"state": state, "seeds": seeds, "layer": layers}
    single = {"state": arrays["state"], "seeds": KEYS, "layer": np.int32(0)}

    def function(given):
        rounding = jax_ssd.StochasticRounding(given["seeds"], given["layer"])
        return jax_ssd.selective_state_update(
            **arrays | {"state": given["state"]}, **TOKEN.options(), rounding=rounding, implementation=implementation
        )

    axes = {key: 0 if key == what else None for key in mapped}
    together = jax.jit(jax.vmap(function, in_axes=(axes,)))(single | {what: mapped[what]})
    alone = jax.jit(function)
    for row in range(2):
        expected = alone(single | {what: mapped[what][row]})
        slots = np.array(TOKEN.slots)
        assert same_bits(together.state[row][slots], expected.state[slots])


@over_implementations
def test_checkpointed_gradients_are_equal(implementation):
    arguments = scan_arguments("everything")
    require(implementation, "chunk_scan", **arguments)
    arrays, static = split(arguments)

    def loss(arrays):
        result = jax_ssd.chunk_scan(**arrays, **dict(static), implementation=implementation)
        return jnp.sum(result.y**2) + jnp.sum(jnp.sin(result.final_states))

    plain = jax.jit(jax.grad(loss), compiler_options=QUICKLY)(arrays)
    again = jax.jit(jax.grad(jax.checkpoint(loss)), compiler_options=QUICKLY)(arrays)
    for name, slope in plain.items():
        check(again[name], slope, FLOAT32, "gradient", name=name)


@over_implementations
def test_export(implementation):
    """Exported, forward and gradient, the program gives the bits of the one that was compiled here."""
    arguments = scan_arguments("packed")
    require(implementation, "chunk_scan", **arguments)
    arrays, static = split(arguments)

    def loss(floats, arrays):
        result = jax_ssd.chunk_scan(**arrays | floats, **dict(static), implementation=implementation)
        return jnp.sum(result.y**2) + jnp.sum(result.final_states), result

    function = jax.jit(jax.value_and_grad(loss, has_aux=True))
    floats = {key: value for key, value in arrays.items() if value.dtype == np.float32}
    assert same_bits(export.export(function)(floats, arrays).call(floats, arrays), function(floats, arrays))


@over_implementations
def test_export_of_an_update(implementation):
    """The same with traced seeds and layer."""
    arrays = TOKEN.arrays(FLOAT32, state_dtype=FLOAT16)
    require(implementation, "selective_state_update", **arrays)

    @jax.jit
    def function(arrays, seeds, layer):
        rounding = jax_ssd.StochasticRounding(seeds, layer)
        return jax_ssd.selective_state_update(
            **arrays, **TOKEN.options(), rounding=rounding, implementation=implementation
        )

    given = (arrays, KEYS, jnp.int32(1))
    assert same_bits(export.export(function)(*given).call(*given), function(*given))


def _mesh():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    return Mesh(np.array(devices[:2]), ("shards",))


@over_implementations
@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_shard_map(implementation, axis):
    """Sharded over the batch or over heads (with their groups): values and gradients are one device's."""
    arguments = scan_arguments("everything")
    require(implementation, "chunk_scan", **arguments)
    arrays, static = split(arguments)
    batched, heads = {"x": 2, "dt": 2, "z": 2, "B": 2, "C": 2}, {"A": 0, "D": 0, "dt_bias": 0, "initial_states": 1}

    def spec(name):
        if axis == "batch":
            return P("shards") if name in batched or name == "initial_states" else P()
        return P(*[None] * (batched | heads)[name], "shards")

    specs = {name: spec(name) for name in arrays}
    result_specs = (spec("x"), spec("initial_states"))

    @functools.partial(jax.shard_map, mesh=_mesh(), in_specs=(specs,), out_specs=result_specs)
    def sharded(arrays):
        result = jax_ssd.chunk_scan(**arrays, **dict(static), implementation=implementation)
        return result.y, result.final_states

    def loss(arrays, function):
        y, final_states = function(arrays)
        return jnp.sum(y**2) + jnp.sum(jnp.sin(final_states)), (y, final_states)

    def plain(arrays):
        result = jax_ssd.chunk_scan(**arrays, **dict(static), implementation=implementation)
        return result.y, result.final_states

    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1, compiler_options=QUICKLY)
    (found, values), (expected, wanted) = gradient(arrays, sharded), gradient(arrays, plain)
    check(values[0], wanted[0], FLOAT32, "value")
    check(values[1], wanted[1], FLOAT32, "state")
    for name, slope in found.items():
        check(slope, expected[name], FLOAT32, "gradient", name=name)


@over_implementations
@pytest.mark.parametrize("state_dtype", (FLOAT16, BFLOAT16), ids=lambda dtype: dtype.name)
def test_sharded_state_rounds_as_an_unsharded_one(implementation, state_dtype):
    """head_offset and total_heads place a shard's heads: bit for bit the states of the whole."""
    arrays = TOKEN.arrays(FLOAT32, state_dtype=state_dtype)
    require(implementation, "selective_state_update", **arrays)
    axes = {"x": 1, "dt": 1, "z": 1, "B": 1, "C": 1, "A": 0, "D": 0, "dt_bias": 0, "state": 1}
    specs = {name: P(*[None] * axes[name], "shards") if name in axes else P() for name in arrays}

    @functools.partial(
        jax.shard_map, mesh=_mesh(), in_specs=(specs, P()), out_specs=(P(None, "shards"), P(None, "shards"))
    )
    def sharded(arrays, seeds):
        offset = jax.lax.axis_index("shards").astype(jnp.uint32) * jnp.uint32(2)
        rounding = jax_ssd.StochasticRounding(seeds, head_offset=offset, total_heads=4)
        return tuple(
            jax_ssd.selective_state_update(
                **arrays, **TOKEN.options(), rounding=rounding, implementation=implementation
            )
        )

    y, state = jax.jit(sharded)(arrays, KEYS)
    rounding = jax_ssd.StochasticRounding(jnp.asarray(KEYS))
    whole = update(implementation, **arrays, **TOKEN.options(), rounding=rounding)
    slots = np.array(TOKEN.slots)
    assert same_bits(np.asarray(state)[slots], np.asarray(whole.state)[slots])
    check(y, whole.y, FLOAT32, "value")


@over_implementations
def test_implementation_may_be_a_list_or_none(implementation):
    arguments = scan_arguments("plain")
    expected = scan(implementation, **arguments)
    assert same_bits(call(jax_ssd.chunk_scan, **arguments, implementation=(implementation,)), expected)
    if jax_ssd.explain("chunk_scan", **arguments)[0].name == implementation:
        assert same_bits(call(jax_ssd.chunk_scan, **arguments), expected)


@over_implementations
def test_explain_takes_shapes(implementation):
    """ShapeDtypeStructs get the verdicts of arrays, and nothing is computed."""
    arguments = scan_arguments("packed", BFLOAT16)
    shapes = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "dtype") else value
        for name, value in arguments.items()
    }
    assert jax_ssd.explain("chunk_scan", **shapes) == jax_ssd.explain("chunk_scan", **arguments)
    verdicts = jax_ssd.explain("chunk_scan", **shapes)
    assert implementation in {verdict.name for verdict in verdicts}
    assert verdicts[0].reason is None
    for verdict in verdicts:
        assert verdict.reason is None or len(verdict.reason) > 10


@over_implementations
@pytest.mark.parametrize("axes", [("batch",), ("heads",), ("sequence",), ("heads", "sequence")], ids="_".join)
def test_parallel_is_one_device(implementation, axes):
    """`parallel.chunk_scan` over any axes of a mesh: values, final states and gradients are one device's."""
    case = BY_NAME["everything"]
    arguments = dataclasses.replace(case, num_tokens=44).arrays(FLOAT32) | case.options()
    require(implementation, "chunk_scan", **arguments)
    arrays, static = split(arguments)
    devices = jax.devices()[: 2 ** len(axes)]
    if len(devices) < 2 ** len(axes):
        pytest.skip(f"needs {2 ** len(axes)} devices")
    mesh = Mesh(np.array(devices).reshape([2] * len(axes)), axes)
    chosen = {"batch_axis": "batch", "head_axis": "heads", "sequence_axis": "sequence"}
    chosen = {name: axis for name, axis in chosen.items() if axis in axes}

    def loss(arrays):
        result = jax_ssd.parallel.chunk_scan(
            **arrays, **dict(static), mesh=mesh, **chosen, implementation=implementation
        )
        return jnp.sum(result.y**2) + jnp.sum(jnp.sin(result.final_states)), result[:2]

    def plain(arrays):
        result = jax_ssd.chunk_scan(**arrays, **dict(static), implementation=implementation)
        return jnp.sum(result.y**2) + jnp.sum(jnp.sin(result.final_states)), result[:2]

    found, values = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICKLY)(arrays)
    expected, wanted = jax.jit(jax.grad(plain, has_aux=True), compiler_options=QUICKLY)(arrays)
    check(values[0], wanted[0], FLOAT32, "value")
    check(values[1], wanted[1], FLOAT32, "state")
    for name, slope in found.items():
        check(slope, expected[name], FLOAT32, "gradient", name=name)
