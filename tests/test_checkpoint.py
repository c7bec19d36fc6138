"""Checkpoints: the names and layouts of published files, made here with random values."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.flax import save_file

from jax_ssd.models import LanguageModel, Mamba2Config, config_fields, load_checkpoint, save_checkpoint
from tests import mixer_reference as reference
from tests.harness import FLOAT32
from tests.tolerances import check

VOCAB, HIDDEN, LAYERS, HEADS, HEADDIM, GROUPS, DSTATE = 40, 16, 2, 4, 8, 2, 16
INNER, CONV = HEADS * HEADDIM, HEADS * HEADDIM + 2 * GROUPS * DSTATE

TRANSFORMERS = {
    "model_type": "mamba2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_heads": HEADS,
    "head_dim": HEADDIM,
    "n_groups": GROUPS,
    "state_size": DSTATE,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "time_step_min": 0.001,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
}

STATE_SPACES = {
    "d_model": HIDDEN,
    "d_intermediate": 0,
    "n_layer": LAYERS,
    "vocab_size": VOCAB - 3,
    "ssm_cfg": {"layer": "Mamba2", "ngroups": GROUPS, "d_state": DSTATE, "headdim": HEADDIM},
    "attn_layer_idx": [],
    "rms_norm": True,
    "pad_vocab_size_multiple": 8,
    "tie_embeddings": True,
}


@jax.jit
def forward(model, tokens):
    return model(tokens)


def layer_shapes(index):
    """Names and shapes of one layer, the same in both libraries."""
    mixer = f"backbone.layers.{index}.mixer."
    return {
        f"backbone.layers.{index}.norm.weight": (HIDDEN,),
        mixer + "in_proj.weight": (INNER + CONV + HEADS, HIDDEN),
        mixer + "conv1d.weight": (CONV, 1, 4),
        mixer + "conv1d.bias": (CONV,),
        mixer + "A_log": (HEADS,),
        mixer + "D": (HEADS,),
        mixer + "dt_bias": (HEADS,),
        mixer + "norm.weight": (INNER,),
        mixer + "out_proj.weight": (HIDDEN, INNER),
    }


def random_tensors(embedding, head):
    """A small random checkpoint in the names of a library."""
    shapes = {embedding: (VOCAB, HIDDEN), "backbone.norm_f.weight": (HIDDEN,)}
    for index in range(LAYERS):
        shapes |= layer_shapes(index)
    rng = np.random.default_rng(11)
    tensors = {name: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    if head == "tied":
        return tensors | {"lm_head.weight": tensors[embedding]}
    return tensors | {"lm_head.weight": jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32)}


def write(directory, config, tensors, parts=1):
    """config.json and the tensors, in as many files as asked for."""
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for part in range(parts):
        chosen = {name: tensors[name] for name in names[part::parts]}
        save_file(chosen, directory / f"model-{part + 1:05}-of-{parts:05}.safetensors")


def check_layout(model, tensors, embedding):
    """Every weight of the file is where it belongs, transposed as torch lays it out."""
    for index, block in enumerate(model.blocks):
        prefix = f"backbone.layers.{index}."
        mixer = prefix + "mixer."
        for name, found in {
            prefix + "norm.weight": block.norm.scale,
            mixer + "A_log": block.mixer.A_log,
            mixer + "D": block.mixer.D,
            mixer + "dt_bias": block.mixer.dt_bias,
            mixer + "conv1d.bias": block.mixer.conv_bias,
            mixer + "norm.weight": block.mixer.norm_scale,
        }.items():
            np.testing.assert_array_equal(found[...], tensors[name])
        np.testing.assert_array_equal(block.mixer.in_proj.kernel[...].T, tensors[mixer + "in_proj.weight"])
        np.testing.assert_array_equal(block.mixer.out_proj.kernel[...].T, tensors[mixer + "out_proj.weight"])
        conv = np.moveaxis(np.asarray(block.mixer.conv_weight[...]), 0, 1)[:, None]
        np.testing.assert_array_equal(conv, tensors[mixer + "conv1d.weight"])
    np.testing.assert_array_equal(model.embedding.embedding[...], tensors[embedding])


@pytest.mark.parametrize(
    "config, embedding, head",
    [
        (TRANSFORMERS, "backbone.embeddings.weight", "own"),
        (STATE_SPACES, "backbone.embedding.weight", "tied"),
    ],
    ids=["transformers", "state_spaces"],
)
def test_a_checkpoint_with_published_names_gives_the_references_logits(config, embedding, head, tmp_path, rng):
    tensors = random_tensors(embedding, head)
    write(tmp_path, config, tensors, parts=2)
    model = load_checkpoint(tmp_path)
    check_layout(model, tensors, embedding)
    tokens = rng.integers(0, VOCAB, (1, 9))
    logits = forward(model, jnp.asarray(tokens, jnp.int32))
    check(logits[0], reference.language_model(model, tokens[0]), FLOAT32, "value")


def test_bfloat16_weights_become_float32(tmp_path):
    tensors = random_tensors("backbone.embeddings.weight", "own")
    write(tmp_path, TRANSFORMERS, {name: value.astype(jnp.bfloat16) for name, value in tensors.items()})
    kernel = load_checkpoint(tmp_path, dtype=jnp.bfloat16).blocks[0].mixer.in_proj.kernel[...]
    expected = tensors["backbone.layers.0.mixer.in_proj.weight"].astype(jnp.bfloat16).astype(jnp.float32).T
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(kernel, expected)


def test_saving_writes_transformers_names_and_loading_gives_the_model_back(tmp_path, rng):
    config = Mamba2Config(
        VOCAB, HIDDEN, LAYERS, HEADS, headdim=HEADDIM, num_groups=GROUPS, dstate=DSTATE, norm_groups=1,
        proj_bias=True, tie_embeddings=False, time_step_limit=(0.0, 0.5), norm_before_gate=True,
    )  # fmt: skip
    model = LanguageModel(config, rngs=nnx.Rngs(3))
    save_checkpoint(model, tmp_path / "new" / "folder")
    loaded = load_checkpoint(tmp_path / "new" / "folder")
    assert loaded.config == config
    written = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    assert type(written["expand"]) is int and written["expand"] == INNER // HIDDEN
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, 7)), jnp.int32)
    np.testing.assert_array_equal(forward(loaded, tokens), forward(model, tokens))
    with safe_open(tmp_path / "new" / "folder" / "model.safetensors", framework="numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = {"backbone.embeddings.weight": (VOCAB, HIDDEN), "backbone.norm_f.weight": (HIDDEN,)}
    expected["lm_head.weight"] = (VOCAB, HIDDEN)
    for index in range(LAYERS):
        mixer = f"backbone.layers.{index}.mixer."
        expected |= layer_shapes(index)
        expected |= {mixer + "in_proj.bias": (INNER + CONV + HEADS,), mixer + "out_proj.bias": (HIDDEN,)}
    assert shapes == expected


def test_C25_a_file_without_limits_clips_nothing():
    for contents in (TRANSFORMERS, {"model_type": "mamba2"}, STATE_SPACES):
        assert config_fields(contents)["time_step_limit"] == (0.0, math.inf)
    limited = STATE_SPACES | {"ssm_cfg": STATE_SPACES["ssm_cfg"] | {"dt_limit": [0.001, 0.1]}}
    assert config_fields(limited)["time_step_limit"] == (0.001, 0.1)


def test_state_spaces_vocabulary_is_padded():
    assert config_fields(STATE_SPACES)["vocab_size"] == VOCAB


@pytest.mark.parametrize(
    "change, message",
    [
        ({"missing": "backbone.layers.1.mixer.D"}, r"missing \['backbone.layers.1.mixer.D'\]"),
        ({"extra": "backbone.layers.2.norm.weight"}, r"left over \['backbone.layers.2.norm.weight'\]"),
        ({"shape": "backbone.layers.0.mixer.conv1d.weight"}, r"conv1d.weight must have shape \(96, 1, 4\)"),
    ],
    ids=["missing", "left_over", "shape"],
)
def test_weights_that_do_not_fit_are_named(change, message, tmp_path):
    tensors = random_tensors("backbone.embeddings.weight", "own")
    if "missing" in change:
        del tensors[change["missing"]]
    if "extra" in change:
        tensors[change["extra"]] = jnp.ones(HIDDEN)
    if "shape" in change:
        tensors[change["shape"]] = jnp.ones((CONV, 1, 3))
    write(tmp_path, TRANSFORMERS, tensors)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "contents, message",
    [
        ({"model_type": "llama"}, "model_type"),
        (TRANSFORMERS | {"hidden_act": "gelu"}, "hidden_act"),
        (STATE_SPACES | {"attn_layer_idx": [1]}, "attn_layer_idx"),
        (STATE_SPACES | {"ssm_cfg": {"layer": "Mamba1"}}, "Mamba1"),
        (STATE_SPACES | {"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "D_has_hdim"),
    ],
)
def test_other_models_are_refused(contents, message):
    with pytest.raises(ValueError, match=message):
        config_fields(contents)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TRANSFORMERS))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_checkpoint(tmp_path)
