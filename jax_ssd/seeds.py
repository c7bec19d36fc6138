"""Seeds for stochastic rounding: a row of two uint32 words a layer, fresh every step."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_ssd.philox import add_wide, check_scalar, check_static, frozen_pytree, multiply_wide, philox4x32

_THREEFRY = "threefry2x32"
_Mode = Literal["identical", "one_draw"]


@frozen_pytree(data=("key",), static=("num_layers",))
@dataclasses.dataclass(frozen=True, eq=False)
class SeedStream:
    """Seeds by JAX key splitting: independent per layer, fresh per step, equal whenever the step is equal.

    seeds(step, micro_batch) = key_data(split(fold_in(fold_in(key, step), micro_batch), num_layers)): a few
    small operations, as many for 4 layers as for 400. There is no hidden state: to replay or restart, pass
    the same step.

    Args:
      key: a threefry key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`, (2,) uint32).
      num_layers: rows to make, static.

    Raises:
      ValueError: if the key is not a single threefry key, or `num_layers` is less than 1.
      TypeError: if `key` is not an array, or `num_layers` is not a Python integer.

    Keys of other generators (rbg, unsafe_rbg) are refused: their words are not fit to seed Philox.
    """

    key: Any
    num_layers: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", check_static("num_layers", self.num_layers, 1))
        shape, dtype = getattr(self.key, "shape", None), getattr(self.key, "dtype", None)
        if shape is None or dtype is None:
            raise TypeError(f"key: expected a jax.random key, got {type(self.key).__name__}.")
        if _is_typed(self.key):
            kind = str(jax.random.key_impl(self.key))
            if kind != _THREEFRY or shape != ():
                raise ValueError(f"key: expected one {_THREEFRY} key of shape (), got {kind} {tuple(shape)}.")
        elif dtype != jnp.uint32 or shape != (2,):
            raise ValueError(f"key: expected one raw {_THREEFRY} key, uint32 (2,), got {dtype} {tuple(shape)}.")

    def seeds(self, step: ArrayLike, micro_batch: ArrayLike = 0) -> jax.Array:
        """The step's seeds.

        Args:
          step: an integer in [0, 2^32), may be traced.
          micro_batch: the same, for several forward passes of one step.

        Returns:
          (num_layers, 2) uint32.

        Raises:
          ValueError: if a number is out of range or not a scalar.
          TypeError: if it is not an integer.
        """
        key = self.key if _is_typed(self.key) else jax.random.wrap_key_data(self.key, impl=_THREEFRY)
        for name, value in (("step", step), ("micro_batch", micro_batch)):
            check_scalar(name, value)
            key = jax.random.fold_in(key, value)
        return jax.random.key_data(jax.random.split(key, self.num_layers))


def _is_typed(key: Any) -> bool:
    """Whether `key` is a key array rather than raw words."""
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


@frozen_pytree(data=("key", "counter"), static=("num_layers", "mode"))
@dataclasses.dataclass(frozen=True, init=False, eq=False)
class TorchSeedStream:
    """The seeds that PyTorch's CUDA generator would have drawn, so that JAX and PyTorch round alike.

    "identical": layer l of step s is call number i = s * num_layers + l of `torch.randint(0, 2**32, (1,),
    device="cuda")`: word 1 of Philox-4x32-10 at counter (offset / 4 + i, 0), as the row (value, 0).
    "one_draw": step s is call number s of `random_()` on an int64 buffer with a slot a layer: the number
    (W0 << 32 | W1) mod 2^63 at counter (offset / 4 + s, l), as the row (W1, W0 mod 2^31).
    The Philox key is the seed's two words.

    Args:
      seed: the generator's seed, from -2^63 to 2^64 - 1; a negative one wraps, as in `torch.manual_seed`.
      num_layers: rows to make, static.
      offset: the generator's offset before step 0, a multiple of 4.
      mode: "identical" or "one_draw".

    Raises:
      ValueError: if a number is out of range, `offset` is no multiple of 4 or `mode` is unknown.
      TypeError: if a number is not a Python integer.

    It holds as long as nothing else draws from that generator. PyTorch's CPU generator is another one.
    """

    key: Any
    counter: Any
    num_layers: int
    mode: _Mode

    def __init__(self, seed: int, num_layers: int, offset: int = 0, *, mode: _Mode = "identical") -> None:
        seed = check_static("seed", seed, -(2**63), 2**64)
        offset = check_static("offset", offset, 0, 2**64)
        if offset % 4:
            raise ValueError(f"offset: expected a multiple of 4, got {offset}.")
        if mode not in get_args(_Mode):
            raise ValueError(f"mode: expected one of {get_args(_Mode)}, got {mode!r}.")
        fields = {
            "key": _split_words(seed),
            "counter": _split_words(offset // 4),
            "num_layers": check_static("num_layers", num_layers, 1),
            "mode": mode,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def seeds(self, step: ArrayLike) -> jax.Array:
        """The step's seeds.

        Args:
          step: an integer in [0, 2^64), may be traced.

        Returns:
          (num_layers, 2) uint32, low word and high word.

        Raises:
          ValueError: if `step` is out of range or not a scalar.
          TypeError: if it is not an integer.
        """
        key, layers = jnp.asarray(self.key), jnp.arange(self.num_layers, dtype=jnp.uint32)
        calls, within, subsequence = (self.num_layers, layers, np.uint32(0))
        if self.mode == "one_draw":
            calls, within, subsequence = (1, np.uint32(0), layers)
        counter = jnp.asarray(self.counter)
        step_low, step_high = _step_words(step)
        low, high = multiply_wide(step_low, np.uint32(calls))
        high = high + step_high * np.uint32(calls) + counter[1]
        low, high = add_wide(*add_wide(low, high, counter[0]), within)
        word0, word1, _, _ = philox4x32((low, high, subsequence, np.uint32(0)), (key[0], key[1]))
        last = word0 & np.uint32(0x7FFFFFFF) if self.mode == "one_draw" else jnp.zeros_like(word1)
        return jnp.stack([word1, last], axis=-1)


def _split_words(number: int) -> np.ndarray:
    """A 64-bit number as (low, high) uint32 words; negative ones wrap."""
    number %= 2**64
    return np.array([number % 2**32, number >> 32], np.uint32)


def _step_words(step: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The low and high words of a step, known or traced."""
    known = check_scalar("step", step, 2**64)
    if known is not None:
        low, high = _split_words(known)
        return jnp.asarray(low), jnp.asarray(high)
    step = jnp.asarray(step)
    wide = step.dtype.itemsize == 8
    high = (step >> 32).astype(jnp.uint32) if wide else jnp.zeros_like(step, jnp.uint32)
    return step.astype(jnp.uint32), high
