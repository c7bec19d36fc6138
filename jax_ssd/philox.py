"""Philox-4x32 and stochastic rounding in jnp, with 32-bit words only, so that x64 may be off."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike, DTypeLike

_MULTIPLIERS = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_WORD = 2**32
_Class = TypeVar("_Class", bound=type)
_State = tuple[list[jax.Array], list[jax.Array]]


def multiply_wide(a: ArrayLike, b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The 64-bit product of two uint32 arrays as (low, high) words."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a = jnp.asarray(a, jnp.uint32)
    b = np.uint32(b) if isinstance(b, int | np.generic) else jnp.asarray(b, jnp.uint32)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    # Neither sum can overflow: (2^16 - 1)^2 + 2^16 - 1 < 2^32.
    middle = a_high * b_low + ((a_low * b_low) >> half)
    cross = a_low * b_high + (middle & mask)
    return a * b, a_high * b_high + (middle >> half) + (cross >> half)


def add_wide(low: ArrayLike, high: ArrayLike, addend: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The 64-bit number (low, high) plus a uint32 `addend`, modulo 2^64, as (low, high) words."""
    addend = jnp.asarray(addend, jnp.uint32)
    total = jnp.asarray(low, jnp.uint32) + addend
    return total, jnp.asarray(high, jnp.uint32) + (total < addend).astype(jnp.uint32)


def philox4x32(counter: Sequence[ArrayLike], key: Sequence[ArrayLike], rounds: int = 10) -> list[jax.Array]:
    """Philox-4x32: four random words for each counter.

    One round: (c0, c1, c2, c3) <- (high(M1 c2) ^ c1 ^ k0, low(M1 c2), high(M0 c0) ^ c3 ^ k1, low(M0 c0));
    both key words grow by a constant between rounds.

    Args:
      counter: four uint32 arrays, the least significant word first; they broadcast.
      key: two uint32 arrays that broadcast with them.
      rounds: static, at least 1; 7 is the fewest that passes BigCrush, 10 the usual number.

    Returns:
      Four uint32 arrays of the common shape.

    Raises:
      ValueError: if there are not four counter words and two key words, or `rounds` is less than 1.
      TypeError: if `rounds` is not a Python integer.

    Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    if len(counter) != 4 or len(key) != 2:
        raise ValueError(f"counter, key: expected 4 and 2 words, got {len(counter)} and {len(key)}.")
    rounds = check_static("rounds", rounds, 1)
    k0, k1 = (jnp.asarray(word, jnp.uint32) for word in key)
    shape = jnp.broadcast_shapes(k0.shape, k1.shape, *(jnp.shape(word) for word in counter))
    words = [jnp.broadcast_to(jnp.asarray(word, jnp.uint32), shape) for word in counter]
    return _philox_rounds(words, [k0, k1], rounds=rounds)[0]


# Outside jit, hundreds of operations would be launched one by one; inside, this is inlined.
@functools.partial(jax.jit, static_argnames="rounds", inline=True)
def _philox_rounds(counter: list[jax.Array], key: list[jax.Array], *, rounds: int) -> _State:
    """The words and the key after some rounds."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        low0, high0 = multiply_wide(c0, _MULTIPLIERS[0])
        low1, high1 = multiply_wide(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return [c0, c1, c2, c3], [k0, k1]


def round_stochastically(values: ArrayLike, random: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Round float32 to float16 or bfloat16, away from zero with the probability of the part that is cut off.

    result = (scaled magnitude + r) >> dropped bits, with the sign; r is the low 13 (float16) or 16 (bfloat16)
    bits of `random`. A value that `dtype` holds exactly never changes, NaN and infinities stay.

    Args:
      values: float32 (other floats are first converted to it), any shape.
      random: uint32, broadcasts with `values`.
      dtype: float16 or bfloat16.

    Returns:
      An array of `dtype`.

    Raises:
      ValueError: for any other `dtype`.

    Below float16's normal range the digits of the magnitude under 2^-37 are cut off before r is added: a bias
    under 2^-13 of a unit in the last place, towards 0. Normal results and bfloat16 are unbiased.
    """
    dtype = check_rounded_dtype(dtype)
    bits = lax.bitcast_convert_type(jnp.asarray(values).astype(jnp.float32), jnp.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    random = jnp.asarray(random, jnp.uint32)
    to_bits, not_a_number = (
        (_float16_bits, np.uint32(0x7E00)) if dtype == jnp.float16 else (_bfloat16_bits, np.uint32(0x7FC0))
    )
    rounded = jnp.where(magnitude > np.uint32(0x7F800000), not_a_number, to_bits(magnitude, random))
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    return lax.bitcast_convert_type((rounded | sign).astype(jnp.uint16), dtype)


def _float16_bits(magnitude: jax.Array, random: jax.Array) -> jax.Array:
    """Magnitude bits of the float16 that `magnitude` rounds to; overflow gives infinity."""
    exponent = magnitude >> np.uint32(23)
    mantissa = (magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    # A shift of 24 or more leaves 0, so exponents below 90 need no case of their own; 31 keeps it defined.
    subnormal = mantissa >> jnp.minimum(np.uint32(113) - exponent, np.uint32(31))
    scaled = jnp.where(exponent >= np.uint32(113), magnitude - np.uint32(112 << 23), subnormal)
    return jnp.minimum((scaled + (random & np.uint32(0x1FFF))) >> np.uint32(13), np.uint32(0x7C00))


def _bfloat16_bits(magnitude: jax.Array, random: jax.Array) -> jax.Array:
    """Magnitude bits of the bfloat16 that `magnitude` rounds to."""
    return (magnitude + (random & np.uint32(0xFFFF))) >> np.uint32(16)


def element_words(
    slots: ArrayLike,
    shape: Sequence[int],
    key: ArrayLike,
    *,
    rounds: int,
    step: ArrayLike = 0,
    head_offset: ArrayLike = 0,
    total_heads: int | None = None,
) -> jax.Array:
    """The random word of every element of some slots of a state pool.

    Element e = ((slot * total_heads + head_offset + head) * p + row) * n + column of the whole model's pool
    takes word e % 4 of Philox at counter (low, high, step, 0) of e - e % 4, 64 bits in two words.

    Args:
      slots: (b,) integers, below 2^32. The words of a negative slot are valid but mean nothing.
      shape: (h, p, n) of one slot's state.
      key: (2,) uint32.
      rounds: Philox rounds, static.
      step: the token's index in the call, a scalar or (b,), below 2^32.
      head_offset: the first head's index in the whole model.
      total_heads: heads of the whole model, static; None means h.

    Returns:
      (b, h, p, n) uint32.

    Raises:
      ValueError: if a shape is wrong, or the heads do not fit into `total_heads`.
      TypeError: if `slots` are not integers, or a static argument is not a Python integer.
    """
    shape = tuple(check_static("shape", size, 0) for size in shape)
    total_heads = check_heads(shape[0], head_offset, total_heads)
    slots, key = _integers("slots", slots), jnp.asarray(key, jnp.uint32)
    if slots.ndim != 1 or key.shape != (2,):
        raise ValueError(f"slots, key: expected shapes (b,) and (2,), got {slots.shape} and {key.shape}.")
    return _words(slots, shape, key, _to_word(step), _to_word(head_offset), rounds=rounds, total_heads=total_heads)


def _words(slots, shape, key, step, head_offset, *, rounds, total_heads, in_memory=False):
    """`element_words` on checked arguments; `in_memory` is for `_round_by_row`."""
    headdim, dstate = shape[1:]
    by_fours = headdim * dstate % 4 == 0
    low, high = _offsets(slots.astype(jnp.uint32), shape, head_offset, total_heads, 4 if by_fours else 1)
    step = jnp.broadcast_to(step, slots.shape)[:, None, None]
    counter = (low & np.uint32(0xFFFFFFFC), high, step, np.uint32(0))
    words = (_philox_in_memory if in_memory else philox4x32)(counter, (key[0], key[1]), rounds)
    if not by_fours:
        chosen = _select_word(words, low & np.uint32(3))
    elif in_memory:
        chosen = jnp.stack(words, axis=-1)
    else:
        lane = jnp.arange(4, dtype=jnp.uint32).reshape(1, 1, 1, 4)
        chosen = _select_word([word[..., None] for word in words], lane)
    return chosen.reshape(slots.shape[0], *shape)


def _offsets(slots, shape, head_offset, total_heads, every):
    """Offsets (b, h, p * n / every) of every so many elements of each head, as (low, high) words."""
    num_heads, headdim, dstate = shape
    heads = jnp.arange(num_heads, dtype=jnp.uint32) + head_offset
    low, high = multiply_wide(slots[:, None], np.uint32(total_heads))
    low, high = add_wide(low, high, heads[None])
    head_size = np.uint32(headdim * dstate)
    (low, carry), high = multiply_wide(low, head_size), high * head_size
    within = np.arange(0, headdim * dstate, every, dtype=np.uint32)
    return add_wide(low[..., None], (high + carry)[..., None], within[None, None])


def _select_word(words: Sequence[jax.Array], lane: jax.Array) -> jax.Array:
    """words[lane]."""
    first = jnp.where(lane == np.uint32(0), words[0], words[1])
    second = jnp.where(lane == np.uint32(2), words[2], words[3])
    return jnp.where(lane < np.uint32(2), first, second)


def _philox_in_memory(counter: Sequence[ArrayLike], key: Sequence[jax.Array], rounds: int) -> list[jax.Array]:
    """`philox4x32` as a loop over pairs of rounds, whose words XLA has to keep in memory."""
    counter = jnp.broadcast_arrays(*counter)
    # All words of a loop have to vary over the same mesh axes under shard_map; XLA drops the zeros.
    zero = (functools.reduce(jnp.bitwise_xor, counter) ^ key[0] ^ key[1]) & np.uint32(0)
    words, key = [word | zero for word in counter], list(key)
    words, key = _philox_rounds(words, key, rounds=rounds % 2)
    words, _ = lax.fori_loop(0, rounds // 2, lambda _, state: _philox_rounds(*state, rounds=2), (words, key))
    return words


def frozen_pytree(*, data: tuple[str, ...], static: tuple[str, ...]) -> Callable[[_Class], _Class]:
    """Register a frozen class as a pytree; unlike jax's `register_dataclass`, rebuilding skips validation."""
    # Transforms rebuild pytrees with placeholders and batched leaves, which a constructor would refuse.

    def register(cls: _Class) -> _Class:
        def flatten_with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            leaves = [(jax.tree_util.GetAttrKey(name), getattr(instance, name)) for name in data]
            return leaves, tuple(getattr(instance, name) for name in static)

        def unflatten(static_values: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
            instance = object.__new__(cls)
            for name, value in zip((*data, *static), (*leaves, *static_values), strict=True):
                object.__setattr__(instance, name, value)
            return instance

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"jax_ssd.{cls.__name__}",
            serialize_auxdata=lambda values: json.dumps(values).encode(),
            deserialize_auxdata=lambda text: tuple(json.loads(text)),
        )
        return cls

    return register


@frozen_pytree(data=("seeds", "layer", "head_offset"), static=("rounds", "total_heads"))
@dataclasses.dataclass(frozen=True, eq=False)
class StochasticRounding:
    """How a float16 or bfloat16 state is rounded when it is stored: stochastically, with Philox bits.

    key = seeds[layer]; the bits of an element depend on its place in the whole model's state pool (the slot
    written), on the token's index in the call and on nothing else: `element_words` has the formula,
    `round_stochastically` the rule. The mean of many roundings is the value, for normal float16 results and
    for bfloat16; below float16's normal range the bias is under 2^-13 of a unit in the last place.

    Args:
      seeds: (layers, 2) uint32, low and high word, fresh every step (see `SeedStream`, `TorchSeedStream`).
      layer: the row to use, an integer or a traced scalar; a traced one is never checked against the table.
      rounds: Philox rounds, static, at least 1.
      head_offset: where a shard's heads start in the whole model, an integer or a traced scalar.
      total_heads: heads of the whole model, static; None means the state's own heads.

    Raises:
      ValueError: if a shape, a dtype or a known number is wrong, or `head_offset` is given alone.
      TypeError: if `seeds` is not an array, or a number is not an integer.
    """

    seeds: Any
    layer: Any = 0
    rounds: int = 10
    _: dataclasses.KW_ONLY
    head_offset: Any = 0
    total_heads: int | None = None

    def __post_init__(self) -> None:
        shape, dtype = getattr(self.seeds, "shape", None), getattr(self.seeds, "dtype", None)
        if shape is None or dtype is None:
            raise TypeError(f"seeds: expected a uint32 array (layers, 2), got {type(self.seeds).__name__}.")
        if dtype != jnp.uint32 or len(shape) != 2 or shape[0] < 1 or shape[1] != 2:
            raise ValueError(f"seeds: expected uint32 of shape (layers, 2), got {dtype} {tuple(shape)}.")
        check_scalar("layer", self.layer, upper=shape[0])
        object.__setattr__(self, "rounds", check_static("rounds", self.rounds, 1))
        head_offset = check_scalar("head_offset", self.head_offset)
        if self.total_heads is not None:
            object.__setattr__(self, "total_heads", check_heads(0, self.head_offset, self.total_heads))
        elif head_offset != 0:
            raise ValueError("total_heads: expected an integer with head_offset, got None.")

    @property
    def key(self) -> jax.Array:
        """The layer's own row, (2,) uint32."""
        return lax.dynamic_index_in_dim(jnp.asarray(self.seeds), self.layer, keepdims=False)

    def check_heads(self, num_heads: int) -> int:
        """The whole model's number of heads; ValueError if a state of `num_heads` does not fit into it."""
        return check_heads(num_heads, self.head_offset, self.total_heads)

    def round(self, values: ArrayLike, slots: ArrayLike, dtype: DTypeLike, *, step: ArrayLike = 0) -> jax.Array:
        """Round states for storage in `slots`.

        Args:
          values: (b, h, p, n) float32.
          slots: (b,) integers, the slots written.
          dtype: float16 or bfloat16.
          step: the token's index in the call, a scalar or (b,).

        Returns:
          (b, h, p, n) of `dtype`.

        Raises:
          ValueError: if a shape or `dtype` is wrong, or the heads do not fit into `total_heads`.
          TypeError: if `slots` are not integers.
        """
        values, slots, dtype = jnp.asarray(values), _integers("slots", slots), check_rounded_dtype(dtype)
        if values.ndim != 4 or slots.shape != values.shape[:1]:
            raise ValueError(
                f"values, slots: expected shapes (b, h, p, n) and (b,), got {values.shape} and {slots.shape}."
            )
        place = (self.key, _to_word(step), _to_word(self.head_offset))
        total_heads = self.check_heads(values.shape[1])
        return _round_states(values, slots, *place, dtype=dtype, rounds=self.rounds, total_heads=total_heads)


@functools.partial(jax.jit, static_argnames=("dtype", "rounds", "total_heads"), inline=True)
def _round_states(values, slots, key, step, head_offset, *, dtype, rounds, total_heads):
    """`StochasticRounding.round` on checked arguments."""
    static = dict(dtype=dtype, rounds=rounds, total_heads=total_heads)
    arrays = (values, slots, key, jnp.broadcast_to(step, slots.shape), head_offset)
    by_row, at_once = (functools.partial(f, **static) for f in (_round_by_row, _round_at_once))
    return lax.platform_dependent(*arrays, cpu=by_row, default=at_once)


def _round_at_once(values, slots, key, step, head_offset, *, dtype, in_memory=False, **static):
    """Words and rounding as one fused operation: nothing the size of the states is stored."""
    words = _words(slots, values.shape[1:], key, step, head_offset, in_memory=in_memory, **static)
    return round_stochastically(values, words, dtype)


# XLA on a CPU, given the fused form, computes the words once or four times an element, scalar or vectorised, as the
# surroundings have it: 3 to 50 ns an element, up to 9 s to compile. This takes 5 ns and the memory of one row.
def _round_by_row(values, slots, key, step, head_offset, *, dtype, **static):
    """Row after row, the words of each kept in memory."""

    def one_row(row):
        value, slot, step = (array[None] for array in row)
        rounded = _round_at_once(value, slot, key, step, head_offset, dtype=dtype, in_memory=True, **static)
        return lax.bitcast_convert_type(rounded[0], carried)

    # XLA on a CPU keeps a loop's bfloat16 arrays in float32.
    carried = jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else dtype
    return lax.bitcast_convert_type(lax.map(one_row, (values, slots, step)), dtype)


def check_rounded_dtype(dtype: DTypeLike) -> np.dtype:
    """`dtype` as a NumPy dtype, if a state of it can be rounded stochastically."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"dtype: expected float16 or bfloat16 for stochastic rounding, got {dtype}.")
    return dtype


def check_heads(num_heads: int, head_offset: ArrayLike, total_heads: int | None) -> int:
    """The whole model's number of heads, if `num_heads` fit in at `head_offset` as far as the host knows."""
    total = num_heads if total_heads is None else check_static("total_heads", total_heads, 1)
    first = check_scalar("head_offset", head_offset) or 0
    if first + num_heads > total:
        raise ValueError(
            f"total_heads: expected at least head_offset + num_heads = {first} + {num_heads}, got {total}."
        )
    return total


def check_static(name: str, value: Any, lower: int, upper: int = _WORD) -> int:
    """`value` as an int, if it is a Python integer in [lower, upper)."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected a static integer, got {value!r} of type {type(value).__name__}.")
    if not lower <= value < upper:
        raise ValueError(f"{name}: expected at least {lower} and less than {upper}, got {value}.")
    return int(value)


def check_scalar(name: str, value: Any, upper: int = _WORD) -> int | None:
    """Check a number that may be traced: its value if the host has it, else None."""
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if isinstance(value, bool | int | np.generic):
        return check_static(name, value, 0, upper)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer or an integer scalar array, got {value!r}.")
    if shape != ():
        raise ValueError(f"{name}: expected a scalar, got shape {shape}.")
    return None


def _integers(name: str, value: ArrayLike) -> jax.Array:
    """`value` as an array, if it holds integers."""
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {array.dtype}.")
    return array


def _to_word(value: ArrayLike) -> jax.Array:
    """Non-negative integers as uint32; a Python int may exceed int32."""
    return jnp.asarray(value, jnp.uint32) if isinstance(value, int) else jnp.asarray(value).astype(jnp.uint32)
