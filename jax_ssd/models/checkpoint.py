"""Checkpoints: `config.json` and safetensors, in the names of transformers and of state-spaces."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from safetensors import safe_open
from safetensors.flax import save_file

from jax_ssd.models.config import Mamba2Config
from jax_ssd.models.language_model import LanguageModel

_WEIGHTS = "model.safetensors"


def load_checkpoint(directory: str | Path, *, dtype: Any = jnp.float32, **overrides: Any) -> LanguageModel:
    """A language model from a directory with `config.json` and `*.safetensors` (one file or several).

    Both sets of names are understood: transformers' Mamba2 (`backbone.embeddings.weight`) and state-spaces'
    (`backbone.embedding.weight`). Parameters become float32.

    Args:
        directory: where the files are.
        dtype: what the model computes in.
        overrides: fields of `Mamba2Config` to set against the file, for instance `norm_groups=1` for a
            checkpoint that was trained with one norm over the whole width in spite of its n_groups.

    Raises:
        ValueError: another kind of model, or weights that are missing, left over or of the wrong shape.
        FileNotFoundError: no configuration or no weights there.

    Cannot read pickled weights (`pytorch_model.bin`): convert them to safetensors first.
    """
    directory = Path(directory)
    fields = config_fields(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    config = Mamba2Config(**(fields | {"dtype": dtype} | overrides))
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    tensors = _read_tensors(directory)
    if "backbone.embedding.weight" in tensors:
        tensors["backbone.embeddings.weight"] = tensors.pop("backbone.embedding.weight")
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    parameters = _parameters(model)
    missing, extra = sorted(set(parameters) - set(tensors)), sorted(set(tensors) - set(parameters))
    if missing or extra:
        raise ValueError(f"weights in {directory} do not fit the configuration: missing {missing}, left over {extra}")
    for name, (parameter, kind) in parameters.items():
        value = _from_file(tensors[name], kind).astype(jnp.float32)
        if value.shape != parameter.shape:
            expected = _to_file(jnp.zeros(parameter.shape), kind).shape
            raise ValueError(f"{name} must have shape {expected}, got {tensors[name].shape}")
        parameter.set_value(value)
    return model


def save_checkpoint(model: LanguageModel, directory: str | Path) -> None:
    """Writes `config.json` and a float32 `model.safetensors` in transformers' names.

    Args:
        model: the language model.
        directory: made if it does not exist.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_config_to_file(model.config), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    tensors = {name: _to_file(parameter[...], kind) for name, (parameter, kind) in _parameters(model).items()}
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})


def config_fields(contents: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Mamba2Config` from the contents of a `config.json` of transformers or of state-spaces.

    The clamp of dt is `time_step_limit` (state-spaces: `dt_limit`) and nothing else; `time_step_min` and its
    like only say how dt_bias was first drawn.

    Raises:
        ValueError: another kind of model, or one with parts that this one does not have.
    """
    if "ssm_cfg" in contents:
        return _from_state_spaces(contents)
    if contents.get("model_type") != "mamba2":
        raise ValueError(f"model_type must be 'mamba2' (or state-spaces' ssm_cfg), got {contents.get('model_type')!r}")
    if contents.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be 'silu', got {contents['hidden_act']!r}")
    # Defaults are those of transformers' Mamba2Config, which leaves out of the file what equals them.
    fields = {
        "vocab_size": contents.get("vocab_size", 32768),
        "hidden_size": contents.get("hidden_size", 4096),
        "num_layers": contents.get("num_hidden_layers", 64),
        "num_heads": contents.get("num_heads", 128),
        "headdim": contents.get("head_dim", 64),
        "num_groups": contents.get("n_groups", 8),
        "dstate": contents.get("state_size", 128),
        "conv_width": contents.get("conv_kernel", 4),
        "conv_bias": contents.get("use_conv_bias", True),
        "proj_bias": contents.get("use_bias", False),
        "norm_eps": contents.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": contents.get("tie_word_embeddings", False),
        "time_step_limit": _limit(contents.get("time_step_limit", (0.0, math.inf))),
    }
    same = ("time_step_min", "time_step_max", "time_step_floor", "norm_groups", "norm_before_gate")
    return fields | {name: contents[name] for name in same if name in contents}


def _from_state_spaces(contents):
    layer = contents["ssm_cfg"]
    if layer.get("layer") != "Mamba2":
        raise ValueError(f"ssm_cfg's layer must be 'Mamba2', got {layer.get('layer')!r}")
    if contents.get("attn_layer_idx") or contents.get("d_intermediate") or not contents.get("rms_norm", True):
        raise ValueError("attn_layer_idx, d_intermediate and rms_norm=False must be absent: only mixers and RMS norms")
    if layer.get("D_has_hdim") or not layer.get("rmsnorm", True) or layer.get("d_ssm"):
        raise ValueError("ssm_cfg's D_has_hdim, d_ssm and rmsnorm=False must be absent")
    multiple, vocab = contents.get("pad_vocab_size_multiple", 8), contents["vocab_size"]
    headdim = layer.get("headdim", 64)
    return {
        "vocab_size": -(-vocab // multiple) * multiple,
        "hidden_size": contents["d_model"],
        "num_layers": contents["n_layer"],
        "num_heads": layer.get("expand", 2) * contents["d_model"] // headdim,
        "headdim": headdim,
        "num_groups": layer.get("ngroups", 1),
        "dstate": layer.get("d_state", 128),
        "conv_width": layer.get("d_conv", 4),
        "conv_bias": layer.get("conv_bias", True),
        "proj_bias": layer.get("bias", False),
        "norm_before_gate": layer.get("norm_before_gate", False),
        "tie_embeddings": contents.get("tie_embeddings", True),
        "time_step_limit": _limit(layer.get("dt_limit", (0.0, math.inf))),
    }


def _config_to_file(config):
    contents = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_heads": config.num_heads,
        "head_dim": config.headdim,
        # transformers takes an integer, and only models whose inner width is a multiple of hidden_size.
        "expand": config.inner_size // config.hidden_size,
        "n_groups": config.num_groups,
        "state_size": config.dstate,
        "conv_kernel": config.conv_width,
        "use_conv_bias": config.conv_bias,
        "use_bias": config.proj_bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "time_step_limit": list(config.time_step_limit),
        "time_step_min": config.time_step_min,
        "time_step_max": config.time_step_max,
        "time_step_floor": config.time_step_floor,
        "norm_before_gate": config.norm_before_gate,
    }
    return contents if config.norm_groups is None else contents | {"norm_groups": config.norm_groups}


def _limit(pair):
    """(low, high); transformers 5 writes infinity as {"__float__": "Infinity"}, json as Infinity."""
    low, high = (float(bound["__float__"]) if isinstance(bound, dict) else float(bound) for bound in pair)
    return low, high


def _parameters(model):
    """transformers' name of every parameter -> (the parameter, how the file lays it out)."""
    named = {
        "backbone.embeddings.weight": (model.embedding.embedding, "plain"),
        "backbone.norm_f.weight": (model.norm.scale, "plain"),
    }
    if model.head is not None:
        named["lm_head.weight"] = (model.head.kernel, "linear")
    for index, block in enumerate(model.blocks):
        mixer, prefix = block.mixer, f"backbone.layers.{index}."
        layer = {
            "norm.weight": (block.norm.scale, "plain"),
            "mixer.in_proj.weight": (mixer.in_proj.kernel, "linear"),
            "mixer.in_proj.bias": (mixer.in_proj.bias, "plain"),
            "mixer.conv1d.weight": (mixer.conv_weight, "conv"),
            "mixer.conv1d.bias": (mixer.conv_bias, "plain"),
            "mixer.A_log": (mixer.A_log, "plain"),
            "mixer.D": (mixer.D, "plain"),
            "mixer.dt_bias": (mixer.dt_bias, "plain"),
            "mixer.norm.weight": (mixer.norm_scale, "plain"),
            "mixer.out_proj.weight": (mixer.out_proj.kernel, "linear"),
            "mixer.out_proj.bias": (mixer.out_proj.bias, "plain"),
        }
        named |= {prefix + name: entry for name, entry in layer.items() if entry[0] is not None}
    return named


def _from_file(value, kind):
    """A Linear's weight is (out, in) in the file, a Conv1d's (channels, 1, width)."""
    if kind == "conv":
        return value[:, 0].T
    return value.T if kind == "linear" else value


def _to_file(value, kind):
    if kind == "conv":
        return value.T[:, None]
    return value.T if kind == "linear" else value


def _read_tensors(directory):
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    tensors = {}
    for path in paths:
        with safe_open(path, framework="flax") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors
