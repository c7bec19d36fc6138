"""Mamba-2 models in Flax NNX (extra `flax`): mixer, language model, cache, generation, checkpoints."""

from jax_ssd.models.cache import LayerCache, init_cache
from jax_ssd.models.checkpoint import config_fields, load_checkpoint, save_checkpoint
from jax_ssd.models.config import Mamba2Config
from jax_ssd.models.conv import batched_conv, packed_conv, step_conv
from jax_ssd.models.generation import (
    Generated,
    GeneratedWithDrafts,
    generate,
    generate_with_drafts,
    lookup_drafts,
    sample,
)
from jax_ssd.models.language_model import LanguageModel
from jax_ssd.models.mixer import Mamba2Mixer
from jax_ssd.models.norm import gated_rms_norm

__all__ = [
    "Generated",
    "GeneratedWithDrafts",
    "LanguageModel",
    "LayerCache",
    "Mamba2Config",
    "Mamba2Mixer",
    "batched_conv",
    "config_fields",
    "gated_rms_norm",
    "generate",
    "generate_with_drafts",
    "init_cache",
    "load_checkpoint",
    "lookup_drafts",
    "packed_conv",
    "sample",
    "save_checkpoint",
    "step_conv",
]
