"""The cache of ReplaySSM: a state pool, and a ring of recent inputs for each of its slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import export

from jax_ssd import checks
from jax_ssd.problem import Array


class ReplayCache(NamedTuple):
    """A state cache whose recent inputs wait in a ring per slot.

    `state` is the state before the ring's tokens. `x dt B` hold the tokens, the oldest at `start`, `length` of them;
    the newest `last` came with the slot's last call and can still be rewound. dt is kept after bias, softplus and clip.
    Make one with `ReplayCache.from_state`; once a prefill has written `state`, call `reset`.
    """

    state: Array  # (w,h,p,n)
    x: Array  # (w,r,h,p)
    dt: Array  # (w,r,h) float32 (float64 where the state is)
    B: Array  # (w,r,g,n)
    start: Array  # (w,) int32
    length: Array  # (w,) int32
    last: Array  # (w,) int32

    @classmethod
    def from_state(cls, state: Array, *, ring_size: int, num_groups: int, dtype: Any) -> ReplayCache:
        """A cache over `state (w,h,p,n)` with empty rings.

        Args:
          state: (w,h,p,n), float16, bfloat16, float32 or float64.
          ring_size: tokens a ring holds, r: at least twice the tokens of one call.
          num_groups: groups of B, a divisor of h.
          dtype: dtype of x and B in the ring: that of x in the calls to come.

        Raises:
          ValueError: a shape, dtype or size is not as above.
          TypeError: an argument is the wrong kind of object.
        """
        slots, heads, headdim, dstate = checks.state_pool("state", state)
        ring = checks.positive_int("ring_size", ring_size)
        groups = checks.positive_int("num_groups", num_groups)
        checks.groups_divide_heads(heads, groups)
        token_dtype = checks.token_dtype("dtype", dtype)
        empty = jnp.zeros((slots,), jnp.int32)
        return cls(
            state=state,
            x=jnp.zeros((slots, ring, heads, headdim), token_dtype),
            dt=jnp.zeros((slots, ring, heads), checks.accumulator(token_dtype)),
            B=jnp.zeros((slots, ring, groups, dstate), token_dtype),
            start=empty,
            length=empty,
            last=empty,
        )


class ReplayResult(NamedTuple):
    """`y` like x; the cache with the tokens appended."""

    y: Array
    cache: ReplayCache


for _class in (ReplayCache, ReplayResult):
    export.register_namedtuple_serialization(_class, serialized_name=f"jax_ssd.{_class.__name__}")
