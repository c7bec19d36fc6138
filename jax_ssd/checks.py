"""Checks of arguments. Every message names the argument, what it should be and what it is."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ssd.problem import Array

LETTERS = {
    "b": "batch",
    "t": "num_tokens",
    "s": "num_seqs",
    "h": "num_heads",
    "p": "headdim",
    "g": "num_groups",
    "n": "dstate",
    "r": "ring_size",
    "k": "number of checkpoints",
    "w": "number of slots",
}
_TOKEN_DTYPES = ("float32", "bfloat16", "float16", "float64")
_INT32 = np.iinfo(np.int32)


class Shapes:
    """Binds letters to sizes, argument by argument, and says which argument disagrees with what came before."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def bind(self, name: str, array: Array, letters: str) -> None:
        """Check `array` against `letters`, one per axis, and bind the new ones."""
        shape = tuple(array.shape)
        fits = len(shape) == len(letters)
        fits = fits and all(self.sizes.get(letter, size) == size for letter, size in zip(letters, shape, strict=True))
        if not fits:
            raise ValueError(f"{name}: expected shape {self.describe(letters)}, got {shape}.")
        self.sizes.update(zip(letters, shape, strict=True))

    def describe(self, letters: str) -> str:
        """(t, h) = (16, ?)."""
        sizes = ", ".join(str(self.sizes.get(letter, "?")) for letter in letters)
        comma = "," if len(letters) == 1 else ""
        return f"({', '.join(letters)}{comma}) = ({sizes}{comma})"

    def require_nonzero(self, letters: str) -> None:
        """Refuse sizes for which no state exists."""
        for letter in letters:
            if self.sizes[letter] == 0:
                raise ValueError(f"{LETTERS[letter]} ({letter}): expected at least 1, got 0.")


def array(name: str, value: Any) -> Array:
    """A JAX array, a tracer, a NumPy array or a ShapeDtypeStruct as it is; anything else is a TypeError."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return value
    hint = ""
    if type(value).__module__.split(".")[0] == "torch":
        hint = " Call it through `bridge.torch_call`, or use the functions of `bridge`."
    raise TypeError(
        f"{name}: expected a JAX or NumPy array, got {type(value).__module__}.{type(value).__name__}.{hint}"
    )


def host_values(value: Any) -> np.ndarray | None:
    """The values where the host has them without asking a device."""
    return np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else None


def dtype_name(value: Array) -> str:
    """The dtype that JAX will use: NumPy's 64-bit values become 32-bit ones where x64 is off."""
    return jax.dtypes.canonicalize_dtype(value.dtype).name


def token_dtype(name: str, dtype: Any) -> Any:
    """One of the dtypes that x, B, C and z may have."""
    try:
        known = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{name}: expected a dtype, got {dtype!r}.") from error
    if known.name not in _TOKEN_DTYPES:
        raise ValueError(f"{name}: expected dtype {_list(_TOKEN_DTYPES)}, got {known.name}.")
    return known


def accumulator(dtype: Any) -> Any:
    """float64 for float64, else float32."""
    return jnp.dtype("float64" if jnp.dtype(dtype).name == "float64" else "float32")


def same_dtype(name: str, value: Array, other: str, dtype: Any) -> None:
    if dtype_name(value) != jnp.dtype(dtype).name:
        raise ValueError(f"{name}: expected {other}'s dtype {jnp.dtype(dtype).name}, got {dtype_name(value)}.")


def step_dtype(value: Array, dtype: Any) -> None:
    """dt has x's dtype or float32."""
    allowed = dict.fromkeys((jnp.dtype(dtype).name, "float32"))
    if dtype_name(value) not in allowed:
        raise ValueError(f"dt: expected dtype {_list(allowed)}, got {dtype_name(value)}.")


def floating(name: str, value: Array) -> None:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(f"{name}: expected a floating-point dtype, got {dtype_name(value)}.")


def boolean(name: str, value: Array) -> None:
    if value.dtype != jnp.bool_:
        raise ValueError(f"{name}: expected dtype bool, got {dtype_name(value)}.")


def index_dtype(name: str, value: Any) -> Array:
    """A signed integer array whose values, where they are known, fit int32."""
    checked = array(name, value)
    if not jnp.issubdtype(checked.dtype, jnp.signedinteger):
        raise ValueError(f"{name}: expected dtype int32, got {checked.dtype.name}.")
    known = host_values(checked)
    if known is not None and known.size and not _INT32.min <= known.min() <= known.max() <= _INT32.max:
        raise ValueError(f"{name}: expected values that fit int32, got {known.min()} to {known.max()}.")
    return checked


def as_index(value: Array) -> Array:
    """int32. A device's 64-bit values are clamped first, so that what is out of range stays so."""
    if value.dtype.itemsize > 4 and not isinstance(value, np.ndarray):
        value = jnp.clip(value, _INT32.min, _INT32.max)
    return jnp.asarray(value, jnp.int32)


def positive_int(name: str, value: Any) -> int:
    """A Python integer of at least 1."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}.")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}: expected a Python integer, got {type(value).__name__}.") from error
    if number < 1:
        raise ValueError(f"{name}: expected at least 1, got {number}.")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}.")
    return bool(value)


def limits(value: Any) -> tuple[float, float]:
    """dt_limit as (low, high) with 0 <= low <= high."""
    try:
        low, high = (float(bound) for bound in value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dt_limit: expected a pair of Python numbers (low, high), got {value!r}.") from error
    if math.isnan(low) or math.isnan(high) or not 0.0 <= low <= high:
        raise ValueError(f"dt_limit: expected 0 <= low <= high, got ({low}, {high}).")
    return low, high


def groups_divide_heads(num_heads: int, num_groups: int) -> None:
    if num_heads % num_groups:
        raise ValueError(
            f"B: expected a number of groups that divides the {num_heads} heads of x, got {num_groups} groups."
        )


def decay(value: Array) -> None:
    """A is at most 0, where its values are known."""
    known = host_values(value)
    if known is not None and not np.all(np.asarray(known, np.float64) <= 0.0):
        raise ValueError(f"A: expected values of at most 0, got {np.asarray(known, np.float64).max()}.")


def state_pool(name: str, value: Any) -> tuple[int, int, int, int]:
    """The sizes of a pool (w,h,p,n) of a state's dtype."""
    pool = array(name, value)
    shapes = Shapes()
    shapes.bind(name, pool, "whpn")
    shapes.require_nonzero("hpn")
    token_dtype(name, pool.dtype)
    return tuple(pool.shape)


def sequence_bounds(value: Array, num_tokens: int) -> None:
    """cu_seqlens starts at 0, never decreases and stays within the tokens, where its values are known."""
    known = host_values(value)
    if known is None:
        return
    if known[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {known[0]}.")
    if np.any(np.diff(known) < 0):
        raise ValueError(f"cu_seqlens: expected values that never decrease, got {known.tolist()}.")
    if known[-1] > num_tokens:
        raise ValueError(f"cu_seqlens: expected at most the {num_tokens} tokens of x, got {known[-1]}.")


def slots_in_range(name: str, value: Array | None, num_slots: int) -> None:
    """Slots are negative or below the number of slots, where their values are known."""
    known = host_values(value)
    if known is not None and known.size and known.max() >= num_slots:
        raise ValueError(f"{name}: expected slots below {num_slots} or negative, got {known.max()}.")


def written_by_one_row(message: str, writes: list[np.ndarray | None], reads: list[np.ndarray | None]) -> None:
    """No slot that one row writes is read or written by another. Arrays are (b,) or (b,t); None: not known."""
    writers: dict[int, int] = {}
    for array_ in writes:
        for slot, row in _slot_rows(array_):
            if writers.setdefault(slot, row) != row:
                raise ValueError(f"{message}: expected each slot to be written by one row, got slot {slot} twice.")
    for array_ in reads:
        for slot, row in _slot_rows(array_):
            if writers.get(slot, row) != row:
                raise ValueError(f"{message}: expected no row to read what another writes, got slot {slot}.")


def _slot_rows(slots: np.ndarray | None) -> list[tuple[int, int]]:
    """(slot, row) of every slot that is not negative."""
    if slots is None:
        return []
    return [(int(slot), where[0]) for where, slot in np.ndenumerate(slots) if slot >= 0]


def _list(names: Any) -> str:
    return " or ".join(names)
