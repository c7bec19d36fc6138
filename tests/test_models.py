"""The Flax models against a plain float64 reference, and the cases that users of other libraries met."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jax_ssd import SeedStream, StochasticRounding
from jax_ssd.models import (
    LanguageModel,
    Mamba2Config,
    Mamba2Mixer,
    batched_conv,
    config_fields,
    gated_rms_norm,
    generate,
    generate_with_drafts,
    init_cache,
    sample,
)
from tests import mixer_reference as reference
from tests.harness import FLOAT32, FLOAT64, x64_for
from tests.tolerances import check, error, tolerance

SMALL = Mamba2Config(vocab_size=61, hidden_size=24, num_layers=2, num_heads=4, headdim=8, num_groups=2, dstate=16)

VARIANTS = {
    "grouped": {},
    "one_group": {"num_groups": 1},
    "norm_over_whole_width": {"norm_groups": 1},
    "norm_before_gate": {"norm_before_gate": True},
    "biases": {"proj_bias": True, "conv_bias": False},
    "narrow_convolution": {"conv_width": 2},
    "clipped_steps": {"time_step_limit": (0.02, 0.05)},
}
over_variants = pytest.mark.parametrize("variant", VARIANTS)
over_dtypes = pytest.mark.parametrize("dtype", (FLOAT32, FLOAT64), ids=lambda dtype: dtype.name)

# silu(SILU_ONE) = 1.
SILU_ONE = 1.2784645427610738


def make_mixer(**options):
    """A mixer whose every parameter is random, biases and norms too."""
    return randomise(Mamba2Mixer(dataclasses.replace(SMALL, **options), rngs=nnx.Rngs(0)))


def make_model(**options):
    return randomise(LanguageModel(dataclasses.replace(SMALL, **options), rngs=nnx.Rngs(0)))


def randomise(module):
    """Moves every parameter off its first value, so that none of them is without effect."""
    rng = np.random.default_rng(7)
    for _, parameter in nnx.iter_graph(module):
        if isinstance(parameter, nnx.Param):
            noise = rng.uniform(0.9, 1.1, parameter.shape) * np.asarray(parameter[...]) + 0.05 * rng.normal(
                size=parameter.shape
            )
            parameter.set_value(jnp.asarray(noise, jnp.float32))
    return module


def inputs(rng, *shape, dtype=FLOAT32):
    return jnp.asarray(rng.normal(size=(*shape, SMALL.hidden_size)), dtype)


def ends(*lengths):
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def integers(*values):
    return jnp.asarray(values, jnp.int32)


def layer_cache(mixer, num_slots, fill=0.0, state_dtype=jnp.float32):
    """The cache of one mixer, every slot holding `fill`."""
    cache = init_cache(mixer.config, num_slots, state_dtype=state_dtype)[0]
    return jax.tree.map(lambda pool: jnp.full_like(pool, fill), cache)


def equal(first, second):
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


@jax.jit
def whole(module, tokens_or_u, seq_idx=None):
    return module(tokens_or_u, seq_idx=seq_idx)


@jax.jit
def mixer_prefill(mixer, u, cache, cu_seqlens, slots, has_initial_state=None):
    return mixer.prefill(u, cache, cu_seqlens=cu_seqlens, slots=slots, has_initial_state=has_initial_state)


@jax.jit
def mixer_step(mixer, u, cache, read_slots, write_slots=None):
    return mixer.step(u, cache, read_slots=read_slots, write_slots=write_slots)


@jax.jit
def model_step(model, tokens, cache, rounding):
    return model.step(tokens, cache, rounding=rounding)


@over_variants
@over_dtypes
def test_mixer_equals_the_sequential_reference(variant, dtype, rng):
    with x64_for(dtype):
        mixer = make_mixer(**VARIANTS[variant], dtype=dtype)
        u = inputs(rng, 2, 37, dtype=dtype)
        out = whole(mixer, u)
        assert out.dtype == dtype
        expected = np.stack([reference.mixer(mixer, np.asarray(row, np.float64)) for row in u])
        check(out, expected, dtype, "value")


@over_variants
def test_prefill_and_steps_equal_the_reference(variant, rng):
    mixer = make_mixer(**VARIANTS[variant])
    u = inputs(rng, 2, 12)
    expected = np.stack([reference.mixer(mixer, np.asarray(row, np.float64)) for row in u])
    slots = integers(4, 1)
    out, cache = mixer_prefill(mixer, u[:, :7].reshape(14, -1), layer_cache(mixer, 6), ends(7, 7), slots)
    outs = [out.reshape(2, 7, -1)]
    for t in range(7, 10):
        out, cache = mixer_step(mixer, u[:, t], cache, slots)
        outs.append(out[:, None])
    outs.append(mixer_step(mixer, u[:, 10:], cache, slots)[0])
    check(jnp.concatenate(outs, axis=1), expected, FLOAT32, "value")


def test_language_model_equals_the_reference(rng):
    for tie in (True, False):
        model = make_model(tie_embeddings=tie)
        tokens = jnp.asarray(rng.integers(0, 61, (2, 19)), jnp.int32)
        expected = np.stack([reference.language_model(model, np.asarray(row)) for row in tokens])
        check(whole(model, tokens), expected, FLOAT32, "value")


def test_parameters_stay_float32_while_bfloat16_computes(rng):
    mixer = make_mixer(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(mixer, nnx.Param))} == {FLOAT32}
    u = inputs(rng, 2, 33)
    out = whole(mixer, u.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    expected = np.stack([reference.mixer(mixer, np.asarray(row, np.float64)) for row in u])
    # Two projections, their weights, convolution and norm each round as a scan does.
    assert error(out, expected) < 6 * tolerance(out.dtype, "value")


def test_gradients_reach_every_parameter(rng):
    mixer = make_mixer(proj_bias=True)
    u, weight = inputs(rng, 2, 20), inputs(rng, 2, 20)
    gradient = jax.jit(nnx.grad(lambda mixer: jnp.sum(mixer(u) * weight)))(mixer)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.all(np.isfinite(leaf)) and np.any(np.asarray(leaf) != 0), path


# C17: documents packed together


def documents_and_marks():
    """Two packed documents of 5 and 8 tokens as marks (1, 13)."""
    return jnp.asarray([[0] * 5 + [1] * 8], jnp.int32)


def test_C17_packed_documents_do_not_leak_through_the_mixer(rng):
    mixer, marks = make_mixer(), documents_and_marks()
    u = inputs(rng, 1, 13)
    other = u.at[:, :5].set(inputs(rng, 1, 5))
    out = whole(mixer, u, marks)
    equal(out[:, 5:], whole(mixer, other, marks)[:, 5:])
    check(out[:, 5:], whole(mixer, u[:, 5:]), FLOAT32, "value")
    check(out[:, :5], whole(mixer, u[:, :5]), FLOAT32, "value")
    gradient = jax.jit(jax.grad(lambda u: jnp.sum(mixer(u, seq_idx=marks)[:, 5:] ** 2)))(u)
    equal(gradient[:, :5], jnp.zeros_like(gradient[:, :5]))
    assert np.any(np.asarray(gradient[:, 5:]) != 0)


def test_C17_packed_sequences_do_not_leak_through_the_mixers_prefill(rng):
    mixer = make_mixer()
    u = inputs(rng, 13)
    cache, slots = layer_cache(mixer, 3, fill=np.nan), integers(2, 0)
    out, after = mixer_prefill(mixer, u, cache, ends(5, 8), slots)
    other, _ = mixer_prefill(mixer, u.at[:5].set(inputs(rng, 5)), cache, ends(5, 8), slots)
    equal(out[5:], other[5:])
    alone, after_alone = mixer_prefill(mixer, u[5:], cache, ends(8), slots[1:])
    check(out[5:], alone, FLOAT32, "value")
    check(after.states[0], after_alone.states[0], FLOAT32, "state")
    check(after.windows[0], after_alone.windows[0], FLOAT32, "state")

    def loss(u):
        return jnp.sum(mixer.prefill(u, cache, cu_seqlens=ends(5, 8), slots=slots)[0][5:] ** 2)

    equal(jax.jit(jax.grad(loss))(u)[:5], jnp.zeros((5, SMALL.hidden_size)))


def test_C17_convolution_restarts_at_every_change_of_seq_idx():
    x = jnp.asarray([5.0, 7.0, 1.0, 1.0, 1.0, 2.0, 2.0])[None, :, None]
    weight = jnp.ones((4, 1))
    marks = jnp.asarray([[3, 3, 0, 0, 0, 3, 3]], jnp.int32)
    equal(batched_conv(x, weight, None, marks)[0, :, 0], np.array([5, 12, 1, 2, 3, 2, 4], np.float32))


# C19: split = whole


@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (1, 3, 5, 247)], ids=["four_of_64", "1_3_5_247"])
def test_C19_a_sequence_in_parts_equals_one_call(lengths, rng):
    mixer = make_mixer()
    u = inputs(rng, 256)
    slot = integers(1)
    expected, cache_whole = mixer_prefill(mixer, u, layer_cache(mixer, 2, fill=np.nan), ends(256), slot)
    cache, outs, start = layer_cache(mixer, 2, fill=np.nan), [], 0
    for length in lengths:
        part = u[start : start + length]
        out, cache = mixer_prefill(mixer, part, cache, ends(length), slot, jnp.asarray([start > 0]))
        outs.append(out)
        start += length
    check(jnp.concatenate(outs), expected, FLOAT32, "value")
    check(cache.states[1], cache_whole.states[1], FLOAT32, "state")
    check(cache.windows[1], cache_whole.windows[1], FLOAT32, "state")


def test_C19_an_empty_part_leaves_window_and_state(rng):
    mixer = make_mixer()
    u = inputs(rng, 9)
    _, before = mixer_prefill(mixer, u, layer_cache(mixer, 3), ends(9), integers(1))
    both = jnp.asarray([True, True])
    _, after = mixer_prefill(mixer, u[:4], before, ends(0, 4), integers(1, 2), both)
    equal(after.windows[1], before.windows[1])
    equal(after.states[1], before.states[1])


# C20: right padding


def test_C20_padding_keeps_window_and_state_and_has_no_gradient(rng):
    mixer = make_mixer()
    u = inputs(rng, 8).at[3:].set(jnp.nan)
    slot, cache = integers(0), layer_cache(mixer, 1)
    out, padded = mixer_prefill(mixer, u, cache, ends(3), slot)
    expected, plain = mixer_prefill(mixer, u[:3], cache, ends(3), slot)
    check(out[:3], expected, FLOAT32, "value")
    equal(out[3:], jnp.zeros_like(out[3:]))
    check(padded.states, plain.states, FLOAT32, "state")
    check(padded.windows, plain.windows, FLOAT32, "state")
    token = inputs(rng, 1)
    check(mixer_step(mixer, token, padded, slot)[0], mixer_step(mixer, token, plain, slot)[0], FLOAT32, "value")
    gradient = jax.jit(jax.grad(lambda u: jnp.sum(mixer.prefill(u, cache, cu_seqlens=ends(3), slots=slot)[0] ** 2)))(u)
    equal(gradient[3:], jnp.zeros_like(gradient[3:]))
    assert np.all(np.isfinite(gradient)) and np.any(np.asarray(gradient[:3]) != 0)


def test_C20_padded_prompts_generate_the_same_tokens(rng):
    model = make_model()
    prompt = jnp.asarray(rng.integers(0, 61, 6), jnp.int32)
    options = {"cu_seqlens": ends(6), "slots": integers(0), "num_tokens": 8}
    padded = generate(model, init_cache(SMALL, 1), jnp.pad(prompt, (0, 10), constant_values=60), **options)
    equal(generate(model, init_cache(SMALL, 1), prompt, **options).tokens, padded.tokens)


# C25: time_step_limit


@pytest.mark.parametrize(
    "limit, expected",
    [((0.0, math.inf), (1e-5, 0.0500095, 3.00249)), ((0.001, 0.1), (0.001, 0.0509512, 0.146103))],
    ids=["no_clamp", "clamp"],
)
def test_C25_steps_are_clipped_to_time_step_limit_and_nothing_else(limit, expected):
    contents = {
        "model_type": "mamba2", "vocab_size": 2, "hidden_size": 2, "num_hidden_layers": 1, "num_heads": 1,
        "head_dim": 1, "state_size": 1, "n_groups": 1, "use_conv_bias": False, "time_step_min": 0.001,
        "time_step_max": 0.1, "time_step_limit": list(limit), "layer_norm_epsilon": 1e12,
    }  # fmt: skip
    with jax.enable_x64(True):
        mixer = plain_mixer(Mamba2Config(**config_fields(contents), dtype=FLOAT64))
        steps = np.log(np.expm1([1e-5, 0.05, 3.0]))
        out = whole(mixer, jnp.asarray(np.stack([np.ones(3), steps], axis=1))[None])[0, :, 0]
    for found, right in zip(np.asarray(out), expected, strict=True):
        check(found, right, FLOAT32, "value")


def plain_mixer(config):
    """x, B, C and the gate are 1, dt is the second input, A is -1, D is 0, the norm (eps 1e12) does nothing."""
    mixer = Mamba2Mixer(config, rngs=nnx.Rngs(0))
    kernel = np.zeros((2, 5))
    kernel[0, :4], kernel[1, 4] = SILU_ONE, 1.0
    taps = np.zeros((4, 3))
    taps[3] = 1.0
    values = [
        (mixer.in_proj.kernel, kernel), (mixer.conv_weight, taps), (mixer.A_log, np.zeros(1)),
        (mixer.D, np.zeros(1)), (mixer.dt_bias, np.zeros(1)), (mixer.norm_scale, np.full(1, 1e6)),
        (mixer.out_proj.kernel, np.ones((1, 2))),
    ]  # fmt: skip
    for parameter, value in values:
        parameter.set_value(jnp.asarray(value))
    return mixer


# C26: the gated norm's groups


@pytest.mark.parametrize(
    "num_groups, mean_squares", [(2, (1.0, 1e4)), (1, (5000.5, 5000.5))], ids=["grouped", "whole_width"]
)
def test_C26_norm_takes_each_group_alone(num_groups, mean_squares):
    value = jnp.asarray([1.0] * 4 + [100.0] * 4)
    out = gated_rms_norm(value, jnp.full(8, SILU_ONE), jnp.ones(8), num_groups=num_groups, eps=1e-5)
    expected = np.array([1.0, 100.0]) / np.sqrt(np.array(mean_squares) + 1e-5)
    check(out, np.repeat(expected, 4), FLOAT32, "value")


@pytest.mark.parametrize("shards, num_groups", [(2, 1), (2, 2), (2, 4), (4, 2), (3, 2)], ids=lambda value: str(value))
def test_C26_sharded_norm_equals_unsharded(shards, num_groups, rng):
    x, z = (jnp.asarray(rng.normal(size=(5, 24)) * np.linspace(0.1, 9, 24), jnp.float32) for _ in range(2))
    scale = jnp.asarray(rng.uniform(0.5, 2, 24), jnp.float32)
    mesh = Mesh(np.asarray(jax.devices("cpu")[:shards]), ("heads",))
    columns = PartitionSpec(None, "heads")

    def shard(x, z, scale):
        return gated_rms_norm(x, z, scale, num_groups=num_groups, axis_name="heads")

    specs = (columns, columns, PartitionSpec("heads"))
    sharded = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=columns))
    check(sharded(x, z, scale), gated_rms_norm(x, z, scale, num_groups=num_groups), FLOAT32, "value")
    compiled = sharded.lower(x, z, scale).compile().as_text() or ""
    assert ("all-reduce" in compiled) == (num_groups % shards != 0)


def test_C26_a_mixer_with_sharded_parameters_equals_unsharded(rng):
    mixer, u = make_mixer(), inputs(rng, 2, 16)
    expected = whole(mixer, u)
    mesh = Mesh(np.asarray(jax.devices("cpu")[:2]), ("heads",))
    place = jax.sharding.NamedSharding(mesh, PartitionSpec("heads"))
    for name in ("A_log", "D", "dt_bias", "norm_scale"):
        parameter = getattr(mixer, name)
        parameter.set_value(jax.device_put(parameter[...], place))
    check(whole(mixer, u), expected, FLOAT32, "value")


# C28: drafts


def never_right(history, lengths, num_drafts):
    """Drafts that the model does not agree with but by chance."""
    return jnp.full((history.shape[0], num_drafts), 60, jnp.int32)


def generate_both(draft, num_drafts=3, **options):
    """Greedy tokens of three prompts without drafts, and what `generate_with_drafts` returns."""
    model = make_model(**options)
    lengths = (7, 2, 11)
    prompts = jnp.asarray(np.random.default_rng(3).integers(0, 61, sum(lengths)), jnp.int32)
    plain = generate(
        model, init_cache(model.config, 3), prompts, cu_seqlens=ends(*lengths),
        slots=integers(0, 1, 2), num_tokens=24,
    )  # fmt: skip
    slots = jnp.arange(3 * (num_drafts + 1), dtype=jnp.int32).reshape(3, -1)[::-1]
    drafted = generate_with_drafts(
        model, init_cache(model.config, slots.size), prompts, cu_seqlens=ends(*lengths),
        slots=slots, num_tokens=24, **({} if draft is None else {"draft": draft}),
    )  # fmt: skip
    return np.asarray(plain.tokens), drafted, lengths


def test_C28_greedy_tokens_with_drafts_equal_those_without():
    for draft in (None, never_right):
        plain, drafted, _ = generate_both(draft)
        equal(drafted.tokens, plain)


@pytest.mark.parametrize("right", [1, 2, 3])
def test_C28_drafts_that_are_right_save_steps(right):
    plain, _, lengths = generate_both(None)
    answers = jnp.pad(jnp.asarray(plain), ((0, 0), (0, 4)))

    def oracle(history, sizes, num_drafts):
        index = sizes[:, None] - jnp.asarray(lengths, jnp.int32)[:, None] + jnp.arange(num_drafts)[None]
        drafts = jnp.take_along_axis(answers, index, axis=1, mode="clip")
        return jnp.where(jnp.arange(num_drafts)[None] < right, drafts, 60)

    _, drafted, _ = generate_both(oracle)
    equal(drafted.tokens, plain)
    assert int(drafted.steps) <= math.ceil(23 / (right + 1)) + 1


def test_C28_a_plain_step_after_accepted_drafts_reads_the_last_of_them(rng):
    mixer = make_mixer()
    u = inputs(rng, 1, 6)
    cache = layer_cache(mixer, 5)
    slots = integers(0, 1, 2, 3)[None]
    _, cache = mixer_step(mixer, u[:, :4], cache, integers(4), slots)
    out, _ = mixer_step(mixer, u[:, 5], cache, slots[:, 1])
    expected = whole(mixer, jnp.concatenate([u[:, :2], u[:, 5:]], axis=1))[:, 2]
    check(out, expected, FLOAT32, "value")


# Cache, rounding, generation


def test_padding_rows_touch_no_slot(rng):
    mixer = make_mixer()
    cache = layer_cache(mixer, 3, fill=0.5)
    for bad in (-1, 7):
        _, after = mixer_step(mixer, inputs(rng, 2), cache, integers(0, bad))
        equal(after.windows[1:], cache.windows[1:])
        equal(after.states[1:], cache.states[1:])
        _, after = mixer_prefill(mixer, inputs(rng, 6), cache, ends(3, 3), integers(0, bad))
        equal(after.windows[1:], cache.windows[1:])
        equal(after.states[1:], cache.states[1:])


def test_generation_rounds_as_a_loop_over_the_seed_stream(rng):
    model = make_model()
    prompt = jnp.asarray(rng.integers(0, 61, 9), jnp.int32)
    key, slots = jax.random.key(5), integers(0, 1)
    stream = SeedStream(key, SMALL.num_layers)
    generated = generate(
        model, init_cache(SMALL, 2, state_dtype=jnp.float16), prompt, cu_seqlens=ends(4, 5),
        slots=slots, num_tokens=6, rounding_key=key,
    )  # fmt: skip
    cache = init_cache(SMALL, 2, state_dtype=jnp.float16)
    rounding = StochasticRounding(stream.seeds(0))
    prefill = jax.jit(functools.partial(LanguageModel.prefill, cu_seqlens=ends(4, 5), slots=slots))
    logits, cache = prefill(model, prompt, cache, rounding=rounding)
    for step in range(1, 6):
        tokens = sample(logits, None, 1.0)
        equal(tokens, generated.tokens[:, step - 1])
        rounding = StochasticRounding(stream.seeds(step))
        logits, cache = model_step(model, tokens, cache, rounding)
    for found, expected in zip(generated.cache, cache, strict=True):
        assert found.states.dtype == jnp.float16
        # Another program's sums differ in their last bit, which moves a rounding now and then.
        check(found.states, np.asarray(expected.states, np.float64), jnp.float16, "state")


def test_each_layer_rounds_with_its_own_row_of_seeds(rng):
    model = make_model()
    seeds = jnp.asarray([[1, 2], [3, 4]], jnp.uint32)
    changed = seeds.at[1, 0].set(9)
    token = integers(5)
    empty = init_cache(SMALL, 1, state_dtype=jnp.float16)
    first, second = (model_step(model, token, empty, StochasticRounding(rows))[1] for rows in (seeds, changed))
    equal(first[0].states, second[0].states)
    assert np.any(np.asarray(first[1].states) != np.asarray(second[1].states))


def test_too_few_seeds_are_refused():
    seeds = jnp.asarray([[1, 2]], jnp.uint32)
    cache = init_cache(SMALL, 1, state_dtype=jnp.float16)
    with pytest.raises(ValueError, match="seeds must have at least 2 rows"):
        make_model().step(integers(5), cache, rounding=StochasticRounding(seeds))


@pytest.mark.parametrize("function, rank", [(generate, 1), (generate_with_drafts, 2)])
def test_generation_refuses_a_wrong_call_by_name(function, rank):
    arguments = dict(model=make_model(), prompts=integers(1, 2, 3, 4), cu_seqlens=ends(2, 2))
    good = integers(0, 1) if rank == 1 else integers(0, 1)[:, None]
    with pytest.raises(ValueError, match="num_tokens"):
        function(cache=init_cache(SMALL, 2), slots=good, num_tokens=0, **arguments)
    for slots in (good[:1], jnp.stack([good, good])):
        with pytest.raises(ValueError, match="slots"):
            function(cache=init_cache(SMALL, 2), slots=slots, num_tokens=3, **arguments)


def test_sampling_is_repeatable_and_keeps_to_the_largest_k(rng):
    logits = jnp.asarray(rng.normal(size=(400, 61)), jnp.float32)
    drawn = sample(logits, jax.random.key(0), 1.5, top_k=3)
    equal(drawn, sample(logits, jax.random.key(0), 1.5, top_k=3))
    best = np.argsort(np.asarray(logits), axis=1)[:, -3:]
    assert np.all(np.any(best == np.asarray(drawn)[:, None], axis=1))
    equal(sample(logits, None, 1.0), np.argmax(np.asarray(logits), axis=1))


@pytest.mark.parametrize(
    "field, value",
    [("num_heads", 0), ("num_groups", 3), ("norm_groups", 5), ("time_step_limit", (1.0, 0.5))],
)
def test_a_wrong_configuration_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(SMALL, **{field: value})


def test_a_cache_needs_a_slot():
    with pytest.raises(ValueError, match="num_slots"):
        init_cache(SMALL, 0)
