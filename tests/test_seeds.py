"""Seed streams: JAX's own key splitting, and the values that PyTorch's CUDA generator drew."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jax_ssd.seeds import SeedStream, TorchSeedStream

GOLDEN = Path(__file__).parent / "golden" / "randint.npz"
MANUAL_SEEDS = [0, 1, 1234, 1099511627781]
over_x64 = pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
KEYS = {
    "typed": lambda: jax.random.key(7),
    "raw": lambda: jax.random.PRNGKey(7),
    "numpy": lambda: np.asarray(jax.random.PRNGKey(7)),
}
STREAMS = {
    "split": lambda layers: SeedStream(jax.random.key(7), layers),
    "identical": lambda layers: TorchSeedStream(7, layers, offset=8),
    "one_draw": lambda layers: TorchSeedStream(7, layers, offset=8, mode="one_draw"),
}
over_streams = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)


def golden(name):
    with np.load(GOLDEN) as file:
        return file[name]


def as_integers(rows):
    """(layers, 2) words as Python integers."""
    return [int(low) + (int(high) << 32) for low, high in np.asarray(rows)]


def split_by_hand(step, micro_batch, num_layers):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), step), micro_batch)
    return jax.random.key_data(jax.random.split(key, num_layers))


@over_x64
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize(("step", "micro_batch"), [(0, 0), (1, 0), (1, 2), (2**32 - 1, 2**31)])
def test_a_stream_is_jax_key_splitting(key, step, micro_batch, x64):
    with jax.enable_x64(x64):
        seeds = SeedStream(key(), 5).seeds(step, micro_batch)
        np.testing.assert_array_equal(seeds, split_by_hand(step, micro_batch, 5))
    assert seeds.dtype == np.uint32


@over_streams
def test_streams_cross_jit_with_a_traced_step(stream):
    traces = []

    @jax.jit
    def compiled(stream, step):
        traces.append(step)
        return stream.seeds(step)

    for step in range(3):
        np.testing.assert_array_equal(compiled(stream(4), jnp.int32(step)), stream(4).seeds(step))
    assert len(traces) == 1
    _, scanned = jax.lax.scan(lambda carry, step: (carry, carry.seeds(step)), stream(4), jnp.arange(3))
    np.testing.assert_array_equal(scanned, [stream(4).seeds(step) for step in range(3)])
    mapped = jax.vmap(stream(4).seeds)(jnp.arange(3))
    np.testing.assert_array_equal(mapped, scanned)


@over_streams
def test_streams_cross_export(stream):
    exported = export.export(jax.jit(lambda stream, step: stream.seeds(step)))(stream(4), 3)
    np.testing.assert_array_equal(exported.call(stream(4), 3), stream(4).seeds(3))
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to serialise")
    restored = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(restored.call(stream(4), 3), stream(4).seeds(3))


@over_streams
def test_seeds_differ_by_layer_and_step_and_repeat(stream):
    rows = np.concatenate([stream(50).seeds(step) for step in range(20)])
    assert len(np.unique(rows, axis=0)) == 1000
    np.testing.assert_array_equal(rows, np.concatenate([stream(50).seeds(step) for step in range(20)]))


def operations(jaxpr):
    """Equations of a jaxpr, those of inner ones included."""
    count = 0
    for eqn in jaxpr.eqns:
        inner = [value.jaxpr for value in eqn.params.values() if hasattr(value, "jaxpr")]
        count += 1 + sum(operations(each) for each in inner)
    return count


@over_streams
def test_operations_do_not_grow_with_layers(stream):
    def counts(layers):
        def function(step):
            return stream(layers).seeds(step)

        lowered = jax.jit(function).lower(jnp.int32(0))
        kernels = lowered.compile().as_text().count("kind=k")
        return (
            operations(jax.make_jaxpr(function)(jnp.int32(0)).jaxpr),
            lowered.as_text().count(" = "),
            kernels,
        )

    assert counts(4) == counts(400)


@pytest.mark.parametrize("seed", MANUAL_SEEDS)
def test_identical_mode_gives_torchs_draws(seed):
    draws = golden(f"manual_seed_{seed}").tolist()
    assert as_integers(TorchSeedStream(seed, len(draws)).seeds(0)) == draws
    for offset, layers in ((0, 16), (4 * 8, 8), (4 * 3, 7)):
        compiled = jax.jit(TorchSeedStream(seed, layers, offset=offset).seeds)
        for step in range((len(draws) - offset // 4) // layers):
            first = offset // 4 + step * layers
            assert as_integers(compiled(step)) == draws[first : first + layers]


def test_one_draw_mode_gives_torchs_draws():
    draws = golden("random_40_seed1234").tolist()
    stream = TorchSeedStream(1234, 40, mode="one_draw")
    assert as_integers(stream.seeds(0)) == draws
    assert as_integers(TorchSeedStream(1234, 9, mode="one_draw").seeds(0)) == draws[:9]
    # A call advances the generator by 4, whatever its number of elements.
    later = TorchSeedStream(1234, 40, offset=4 * 6, mode="one_draw")
    np.testing.assert_array_equal(stream.seeds(6), later.seeds(0))


@over_x64
@pytest.mark.parametrize("mode", ["identical", "one_draw"])
@pytest.mark.parametrize("step", [2**31, 2**32 - 1, 2**32 + 5, 2**60])
def test_steps_and_offsets_need_64_bits(step, mode, x64):
    layers, first = 3, 2**31 + 1
    later = first + step * (layers if mode == "identical" else 1)
    with jax.enable_x64(x64):
        expected = TorchSeedStream(5, layers, offset=4 * later, mode=mode).seeds(0)
        stream = TorchSeedStream(5, layers, offset=4 * first, mode=mode)
        np.testing.assert_array_equal(stream.seeds(step), expected)
        if x64 or step < 2**32:
            traced = (np.int64 if x64 else np.uint32)(step)
            np.testing.assert_array_equal(jax.jit(stream.seeds)(traced), expected)


def test_a_negative_seed_wraps_as_in_torch():
    np.testing.assert_array_equal(TorchSeedStream(-1, 3).seeds(0), TorchSeedStream(2**64 - 1, 3).seeds(0))
    assert not np.array_equal(TorchSeedStream(-1, 3).seeds(0), TorchSeedStream(1, 3).seeds(0))


FAULTS = [
    (lambda: SeedStream(7, 4), TypeError, "key"),
    (lambda: SeedStream(jax.random.key(7, impl="rbg"), 4), ValueError, "key.*rbg"),
    (lambda: SeedStream(jax.random.key(7, impl="unsafe_rbg"), 4), ValueError, "key.*rbg"),
    (lambda: SeedStream(jax.random.key_data(jax.random.key(7, impl="rbg")), 4), ValueError, "key"),
    (lambda: SeedStream(jax.random.split(jax.random.key(7), 2), 4), ValueError, "key"),
    (lambda: SeedStream(jnp.zeros(2, jnp.int32), 4), ValueError, "key"),
    (lambda: SeedStream(jax.random.key(7), 0), ValueError, "num_layers"),
    (lambda: SeedStream(jax.random.key(7), 4.0), TypeError, "num_layers"),
    (lambda: SeedStream(jax.random.key(7), 4).seeds(-1), ValueError, "step"),
    (lambda: SeedStream(jax.random.key(7), 4).seeds(2**32), ValueError, "step"),
    (lambda: SeedStream(jax.random.key(7), 4).seeds(0.5), TypeError, "step"),
    (lambda: SeedStream(jax.random.key(7), 4).seeds(jnp.arange(2)), ValueError, "step"),
    (lambda: SeedStream(jax.random.key(7), 4).seeds(0, -1), ValueError, "micro_batch"),
    (lambda: TorchSeedStream(2**64, 4), ValueError, "seed"),
    (lambda: TorchSeedStream(-(2**63) - 1, 4), ValueError, "seed"),
    (lambda: TorchSeedStream(1.0, 4), TypeError, "seed"),
    (lambda: TorchSeedStream(True, 4), TypeError, "seed"),
    (lambda: TorchSeedStream(0, 0), ValueError, "num_layers"),
    (lambda: TorchSeedStream(0, jnp.int32(4)), TypeError, "num_layers"),
    (lambda: TorchSeedStream(0, 4, 6), ValueError, "offset.*multiple of 4"),
    (lambda: TorchSeedStream(0, 4, -4), ValueError, "offset"),
    (lambda: TorchSeedStream(0, 4, mode="one"), ValueError, "mode"),
    (lambda: TorchSeedStream(0, 4).seeds(-1), ValueError, "step"),
    (lambda: TorchSeedStream(0, 4).seeds(2**64), ValueError, "step"),
    (lambda: TorchSeedStream(0, 4).seeds(jnp.float32(1)), TypeError, "step"),
]


@pytest.mark.parametrize(("fault", "error", "name"), FAULTS)
def test_faults_are_named(fault, error, name):
    with pytest.raises(error, match=name):
        fault()
