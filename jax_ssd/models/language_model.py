"""A language model of Mamba-2 mixers: embedding, residual blocks, norm, head."""

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ssd import StochasticRounding
from jax_ssd.models.cache import LayerCache
from jax_ssd.models.config import Mamba2Config, sum_dtype
from jax_ssd.models.mixer import Mamba2Mixer


class Block(nnx.Module):
    """A mixer behind its norm: u + mixer(norm(u)) is the model's business."""

    def __init__(self, config: Mamba2Config, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.norm_eps, rngs=rngs)
        self.mixer = Mamba2Mixer(config, rngs=rngs)


class LanguageModel(nnx.Module):
    """Tokens in, logits out.

        u = embedding[tokens];   u = u + mixer_i(norm_i(u)) for each layer;   logits = norm(u) head

    The residual stream, the norms and the logits are float32 (float64 where `config.dtype` is).

    Args:
        config: sizes and options.
        rngs: where the first parameters come from.

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 9.
    """

    def __init__(self, config: Mamba2Config, *, rngs: nnx.Rngs):
        self.config = config
        small = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(config.vocab_size, config.hidden_size, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.norm_eps, rngs=rngs)
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)
        )

    def __call__(self, tokens: jax.Array, *, seq_idx: jax.Array | None = None) -> jax.Array:
        """Logits (b, t, vocab) of sequences (b, t), for training; `seq_idx` (b, t) parts documents."""
        u = self._embed(tokens)
        for block in self.blocks:
            u = u + block.mixer(block.norm(u), seq_idx=seq_idx).astype(u.dtype)
        return self._logits(u)

    def prefill(
        self,
        tokens: jax.Array,
        cache: tuple[LayerCache, ...],
        *,
        cu_seqlens: jax.Array,
        slots: jax.Array,
        has_initial_state: jax.Array | None = None,
        rounding: StochasticRounding | None = None,
        all_logits: bool = False,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Packed prompts into the cache.

        Args:
            tokens: (t,) int32, prompts end to end; what lies past `cu_seqlens[-1]` is padding.
            cache: from `init_cache`, or what an earlier call returned.
            cu_seqlens: (s + 1,) int32. slots: (s,) int32, negative for padding.
            has_initial_state: (s,) bool, whether the slot holds the prompt's past; None for none.
            rounding: for float16 and bfloat16 states; its `layer` is that of this model's first layer.
            all_logits: logits of every token instead of each sequence's last.

        Returns:
            Logits (s, vocab), or (t, vocab) with `all_logits`, and the new cache. An empty sequence's logits
            and those of padding mean nothing.
        """
        u = self._embed(tokens)
        layers = []
        roundings = _by_layer(rounding, len(self.blocks))
        for block, layer, layer_rounding in zip(self.blocks, cache, roundings, strict=True):
            out, layer = block.mixer.prefill(
                block.norm(u), layer,
                cu_seqlens=cu_seqlens, slots=slots, has_initial_state=has_initial_state,
                rounding=layer_rounding,
            )  # fmt: skip
            u = u + out.astype(u.dtype)
            layers.append(layer)
        if not all_logits:
            u = u[jnp.clip(cu_seqlens[1:] - 1, 0, tokens.shape[0] - 1)]
        return self._logits(u), tuple(layers)

    def step(
        self,
        tokens: jax.Array,
        cache: tuple[LayerCache, ...],
        *,
        read_slots: jax.Array | None = None,
        write_slots: jax.Array | None = None,
        rounding: StochasticRounding | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """One token a row (b,), or several (b, t), on from the cache.

        Args:
            tokens: (b,) or (b, t) int32.
            cache: from `prefill` or an earlier step.
            read_slots, write_slots: as in `Mamba2Mixer.step`.
            rounding: as in `prefill`.

        Returns:
            Logits (b, vocab) or (b, t, vocab), and the new cache.
        """
        u = self._embed(tokens)
        layers = []
        roundings = _by_layer(rounding, len(self.blocks))
        for block, layer, layer_rounding in zip(self.blocks, cache, roundings, strict=True):
            out, layer = block.mixer.step(
                block.norm(u), layer,
                read_slots=read_slots, write_slots=write_slots, rounding=layer_rounding,
            )  # fmt: skip
            u = u + out.astype(u.dtype)
            layers.append(layer)
        return self._logits(u), tuple(layers)

    def _embed(self, tokens):
        return self.embedding(tokens).astype(sum_dtype(self.config.dtype))

    def _logits(self, u):
        dtype = self.config.dtype
        weight = self.embedding.embedding[...].T if self.head is None else self.head.kernel[...]
        logits = jnp.matmul(self.norm(u).astype(dtype), weight.astype(dtype), preferred_element_type=u.dtype)
        return logits.astype(u.dtype)


def _by_layer(rounding, num_layers):
    """The rounding of each layer: rows of the seeds from `rounding.layer` on."""
    if rounding is None:
        return [None] * num_layers
    needed = num_layers + (rounding.layer if isinstance(rounding.layer, int) else 0)
    if rounding.seeds.shape[0] < needed:
        raise ValueError(f"rounding's seeds must have at least {needed} rows, got {rounding.seeds.shape[0]}")
    return [_later(rounding, index) for index in range(num_layers)]


def _later(rounding, index):
    """The same rounding `index` layers on; as a pytree, since its constructor refuses what jit made of it."""

    def move(path, leaf):
        return leaf + index if path[0].name == "layer" else leaf

    return jax.tree_util.tree_map_with_path(move, rounding)
