"""Generation: sampling, greedy, and greedy with drafts that are verified several at a time."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ssd import SeedStream, StochasticRounding
from jax_ssd.models.cache import LayerCache
from jax_ssd.models.language_model import LanguageModel


class Generated(NamedTuple):
    """tokens (s, num_tokens) int32, and the cache, in which all of them but the last are."""

    tokens: jax.Array
    cache: tuple[LayerCache, ...]


class GeneratedWithDrafts(NamedTuple):
    """tokens (s, num_tokens) int32, the cache, and how many verification steps it took."""

    tokens: jax.Array
    cache: tuple[LayerCache, ...]
    steps: jax.Array


def sample(logits: jax.Array, key: jax.Array | None, temperature: jax.Array | float, top_k: int | None = None):
    """The next tokens (b,) int32: the likeliest without a key, else drawn at the temperature.

    Args:
        logits: (b, vocab).
        key: a JAX key, or None for greedy.
        temperature: above 0; logits are divided by it.
        top_k: draw among the k largest only; None for all.
    """
    if key is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is not None:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("num_tokens", "top_k", "rounds"), donate_argnames=("cache",))
def generate(
    model: LanguageModel,
    cache: tuple[LayerCache, ...],
    prompts: jax.Array,
    *,
    cu_seqlens: jax.Array,
    slots: jax.Array,
    num_tokens: int,
    has_initial_state: jax.Array | None = None,
    key: jax.Array | None = None,
    temperature: jax.Array | float = 1.0,
    top_k: int | None = None,
    rounding_key: jax.Array | None = None,
    rounds: int = 10,
) -> Generated:
    """Continues packed prompts: one prefill, then a scan of single steps, all in one program.

    Args:
        model: the language model.
        cache: its pool; donated.
        prompts: (t,) int32, none of them empty. cu_seqlens: (s + 1,) int32. slots: (s,) int32, all different.
        num_tokens: how many to generate.
        has_initial_state: (s,) bool, whether the slot holds the prompt's past; None for none.
        key: a JAX key to draw tokens with; None for the most likely token each time.
        temperature, top_k: as in `sample`; used with a key only.
        rounding_key: a threefry key: states are rounded stochastically with its `SeedStream`, step 0 being
            the prefill.
        rounds: rounds of Philox.

    Returns:
        Generated(tokens, cache).

    Raises:
        ValueError: fewer than one token, or slots that are not one a prompt.
    """
    _check(num_tokens, slots, cu_seqlens, 1)

    def rounding(step):
        return _rounding(rounding_key, step, len(cache), rounds)

    def draw(logits, step):
        return sample(logits, None if key is None else jax.random.fold_in(key, step), temperature, top_k)

    def body(carry, step):
        tokens, cache = carry
        logits, cache = model.step(tokens, cache, read_slots=slots, rounding=rounding(step))
        following = draw(logits, step)
        return (following, cache), following

    logits, cache = model.prefill(
        prompts, cache,
        cu_seqlens=cu_seqlens, slots=slots, has_initial_state=has_initial_state, rounding=rounding(0),
    )  # fmt: skip
    first = draw(logits, 0)
    (_, cache), rest = jax.lax.scan(body, (first, cache), jnp.arange(1, num_tokens))
    return Generated(jnp.concatenate([first[None], rest]).T, cache)


def lookup_drafts(history: jax.Array, lengths: jax.Array, num_drafts: int) -> jax.Array:
    """Guesses (s, num_drafts) int32: what followed the last two tokens where they last occurred before.

    Args:
        history: (s, l) int32, each row's prompt and tokens so far.
        lengths: (s,) int32, how much of a row is in use.
        num_drafts: how many tokens to guess.
    """
    position = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    last = jnp.take_along_axis(history, lengths[:, None] - 1, axis=1)
    previous = jnp.take_along_axis(history, jnp.maximum(lengths[:, None] - 2, 0), axis=1)
    before = jnp.pad(history, ((0, 0), (1, 0)))[:, :-1]
    found = (history == last) & (before == previous) & (position < lengths[:, None] - 1)
    latest = jnp.max(jnp.where(found, position, -1), axis=1)
    index = latest[:, None] + 1 + jnp.arange(num_drafts, dtype=jnp.int32)[None]
    return jnp.take_along_axis(history, jnp.minimum(index, lengths[:, None] - 1), axis=1)


@functools.partial(jax.jit, static_argnames=("num_tokens", "draft", "rounds"), donate_argnames=("cache",))
def generate_with_drafts(
    model: LanguageModel,
    cache: tuple[LayerCache, ...],
    prompts: jax.Array,
    *,
    cu_seqlens: jax.Array,
    slots: jax.Array,
    num_tokens: int,
    draft: Callable[[jax.Array, jax.Array, int], jax.Array] = lookup_drafts,
    rounding_key: jax.Array | None = None,
    rounds: int = 10,
) -> GeneratedWithDrafts:
    """Greedy generation that verifies drafts: the same tokens as `generate` without a key, in fewer steps.

    Each step feeds a row's last token and its drafts at once, and stores the state after each in a slot of
    its own; the next step reads the slot of the last draft that the model agrees with.

    Args:
        model, cache, prompts, cu_seqlens, num_tokens, rounding_key, rounds: as in `generate`.
        slots: (s, k + 1) int32 for k drafts a step, all different.
        draft: (history (s, l), lengths (s,), k) -> (s, k) guesses; any guesses give the same tokens.

    Returns:
        GeneratedWithDrafts(tokens, cache, steps). The tokens are equal as far as the model's logits are: a
        step of several tokens adds up in another order than single ones, so exact ties may fall otherwise.

    Raises:
        ValueError: fewer than one token, or slots that are not a row a prompt.
    """
    _check(num_tokens, slots, cu_seqlens, 2)
    width = slots.shape[1]
    first, cache = model.prefill(
        prompts, cache,
        cu_seqlens=cu_seqlens, slots=slots[:, 0], rounding=_rounding(rounding_key, 0, len(cache), rounds),
    )  # fmt: skip
    prompt_lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).astype(jnp.int32)
    history = _rows(prompts, cu_seqlens, prompts.shape[0] + num_tokens + width)
    history = _write(history, prompt_lengths, sample(first, None, 1.0)[:, None])
    goal = prompt_lengths + num_tokens

    def unfinished(carry):
        return jnp.any(carry[1] < goal)

    def body(carry):
        history, lengths, read, cache, step = carry
        active = lengths < goal
        last = jnp.take_along_axis(history, lengths[:, None] - 1, axis=1)
        fed = jnp.concatenate([last, draft(history, lengths, width - 1)], axis=1)
        logits, cache = model.step(
            fed, cache,
            read_slots=jnp.where(active, read, -1), write_slots=slots,
            rounding=_rounding(rounding_key, step, len(cache), rounds),
        )  # fmt: skip
        chosen = sample(logits, None, 1.0)
        agreed = jnp.cumprod((fed[:, 1:] == chosen[:, :-1]).astype(jnp.int32), axis=1)
        accepted = jnp.where(active, 1 + jnp.sum(agreed, axis=1, dtype=jnp.int32), 0)
        history = jnp.where(active[:, None], _write(history, lengths, chosen), history)
        kept = jnp.take_along_axis(slots, jnp.maximum(accepted - 1, 0)[:, None], axis=1)[:, 0]
        return history, lengths + accepted, jnp.where(active, kept, read), cache, step + 1

    start = (history, prompt_lengths + 1, slots[:, 0], cache, jnp.int32(1))
    history, _, _, cache, step = jax.lax.while_loop(unfinished, body, start)
    index = prompt_lengths[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    return GeneratedWithDrafts(jnp.take_along_axis(history, index, axis=1), cache, step - 1)


def _check(num_tokens, slots, cu_seqlens, rank):
    """Refuses a call that could not return what its docstring says."""
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    expected = (cu_seqlens.shape[0] - 1, "k + 1")[:rank]
    if slots.ndim != rank or slots.shape[0] != expected[0]:
        raise ValueError(f"slots must have shape {expected}, got {slots.shape}")


def _rounding(key, step, num_layers, rounds):
    """The rounding of one step, or None without a key."""
    return None if key is None else StochasticRounding(SeedStream(key, num_layers).seeds(step), rounds=rounds)


def _rows(packed, cu_seqlens, length):
    """Packed tokens (t,) as rows (s, length), each followed by zeros."""
    index = cu_seqlens[:-1, None] + jnp.arange(length, dtype=jnp.int32)[None]
    tokens = packed[jnp.clip(index, 0, packed.shape[0] - 1)]
    return jnp.where(index < cu_seqlens[1:, None], tokens, jnp.zeros_like(tokens))


def _write(history, lengths, tokens):
    """history with tokens (s, k) written from each row's length on."""
    index = lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return history.at[jnp.arange(history.shape[0])[:, None], index].set(tokens, mode="drop")
