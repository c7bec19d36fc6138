"""The Mamba-2 mixer: projection, causal convolution, scan, gated norm, projection."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_ssd import StochasticRounding, chunk_scan, prefill, selective_state_update
from jax_ssd.models.cache import LayerCache, read_windows, write_windows
from jax_ssd.models.config import Mamba2Config, sum_dtype
from jax_ssd.models.conv import batched_conv, packed_conv, step_conv
from jax_ssd.models.norm import gated_rms_norm


class Mamba2Mixer(nnx.Module):
    """One Mamba-2 layer without its residual connection.

        z, xBC, dt = in_proj(u);   x, B, C = silu(conv(xBC))
        out = out_proj(norm(scan(x, dt, A, B, C) + D x, z))

    Calling it trains on whole sequences; `prefill` and `step` read and write a `LayerCache`. Parameters are
    float32 and are cast to `config.dtype` where they meet activations; A, D and dt_bias stay float32.

    Args:
        config: sizes and options.
        rngs: where the first parameters come from.

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7.
    """

    def __init__(self, config: Mamba2Config, *, rngs: nnx.Rngs):
        self.config = config
        shared: dict[str, Any] = {"use_bias": config.proj_bias, "dtype": config.dtype, "rngs": rngs}
        self.in_proj = nnx.Linear(config.hidden_size, config.projection_size, **shared)
        # Every layer adds to the residual stream: 1 / num_layers keeps their sum at one layer's size.
        scaled = nnx.initializers.variance_scaling(1 / config.num_layers, "fan_in", "truncated_normal")
        self.out_proj = nnx.Linear(config.inner_size, config.hidden_size, kernel_init=scaled, **shared)
        self.conv_weight = nnx.Param(_first_conv_weight(config, rngs.params()))
        self.conv_bias = nnx.Param(jnp.zeros(config.conv_size, jnp.float32)) if config.conv_bias else None
        self.A_log = nnx.Param(_first_A_log(config, rngs.params()))
        self.D = nnx.Param(jnp.ones(config.num_heads, jnp.float32))
        self.dt_bias = nnx.Param(_first_dt_bias(config, rngs.params()))
        self.norm_scale = nnx.Param(jnp.ones(config.inner_size, jnp.float32))

    def __call__(self, u: jax.Array, *, seq_idx: jax.Array | None = None) -> jax.Array:
        """Whole sequences, for training.

        Args:
            u: (b, t, hidden_size).
            seq_idx: (b, t) int32; state and convolution restart wherever it changes.

        Returns:
            (b, t, hidden_size) in `config.dtype`.
        """
        z, xbc, dt = self._project(u)
        x, b, c = self._split(batched_conv(xbc, self.conv_weight[...], self._bias(), seq_idx))
        y = chunk_scan(
            x,
            dt,
            self._decay(),
            b,
            c,
            seq_idx=seq_idx,
            chunk_size=self.config.chunk_size,
            **self._scan_options(),
        ).y
        return self._finish(y, z)

    def prefill(
        self,
        u: jax.Array,
        cache: LayerCache,
        *,
        cu_seqlens: jax.Array,
        slots: jax.Array,
        has_initial_state: jax.Array | None = None,
        rounding: StochasticRounding | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Packed sequences, each continuing from its slot and leaving its window and state there.

        Args:
            u: (t, hidden_size); tokens past `cu_seqlens[-1]` may hold anything.
            cache: the layer's pool.
            cu_seqlens: (s + 1,) int32. slots: (s,) int32, negative for padding.
            has_initial_state: (s,) bool, whether the slot holds the sequence's past; None for none.
            rounding: how float16 and bfloat16 states are stored; None for to nearest.

        Returns:
            out (t, hidden_size) and the new pool.
        """
        inside = jnp.arange(u.shape[0]) < cu_seqlens[-1]
        z, xbc, dt = self._project(jnp.where(inside[:, None], u, jnp.zeros_like(u)))
        keep = jnp.zeros(slots.shape, bool) if has_initial_state is None else has_initial_state
        past = read_windows(cache.windows, slots, keep)
        xbc, rows = packed_conv(xbc, self.conv_weight[...], self._bias(), windows=past, cu_seqlens=cu_seqlens)
        x, b, c = self._split(xbc)
        options: dict[str, Any] = {
            "chunk_size": self.config.chunk_size,
            "rounding": rounding,
        } | self._scan_options()
        y, states = prefill(
            cache.states, x, dt, self._decay(), b, c,
            cu_seqlens=cu_seqlens, slots=slots, has_initial_state=has_initial_state, **options,
        )  # fmt: skip
        return self._finish(y, z), LayerCache(write_windows(cache.windows, slots, rows), states)

    def step(
        self,
        u: jax.Array,
        cache: LayerCache,
        *,
        read_slots: jax.Array | None = None,
        write_slots: jax.Array | None = None,
        rounding: StochasticRounding | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """One token a row, or several (drafts to verify).

        Args:
            u: (b, hidden_size) or (b, t, hidden_size).
            cache: the layer's pool.
            read_slots: (b,) int32, 0 to b - 1 by default; negative for a padding row.
            write_slots: (b,) for what is left after the last token, `read_slots` by default, or (b, t) for
                what is left after each, so that drafts are taken back by reading an earlier slot; negative
                stores nothing.
            rounding: how float16 and bfloat16 states are stored; None for to nearest.

        Returns:
            out, shaped like u, and the new pool.
        """
        one = u.ndim == 2
        tokens = u[:, None] if one else u
        read = jnp.arange(u.shape[0], dtype=jnp.int32) if read_slots is None else read_slots
        write = read if write_slots is None else write_slots
        z, xbc, dt = self._project(tokens)
        xbc, rows = step_conv(xbc, self.conv_weight[...], self._bias(), read_windows(cache.windows, read))
        x, b, c = self._split(xbc)
        if one:
            x, dt, b, c, write = x[:, 0], dt[:, 0], b[:, 0], c[:, 0], write.reshape(read.shape)
        y, states = selective_state_update(
            cache.states, x, dt, self._decay(), b, c,
            read_slots=read, write_slots=write, rounding=rounding, **self._scan_options(),
        )  # fmt: skip
        out = self._finish(y[:, None] if one else y, z)
        stored = jnp.where((read >= 0).reshape(-1, *[1] * (write.ndim - 1)), write, -1)
        windows = write_windows(cache.windows, stored, rows if write.ndim == 2 else rows[:, -1])
        return out[:, 0] if one else out, LayerCache(windows, states)

    def _project(self, u):
        config = self.config
        cuts = [config.inner_size, config.inner_size + config.conv_size]
        return jnp.split(self.in_proj(u), cuts, axis=-1)

    def _split(self, xbc):
        """x (..., h, p), B and C (..., g, n) from the convolution's output (..., h * p + 2 * g * n)."""
        config = self.config
        bc = config.num_groups * config.dstate
        x, b, c = jnp.split(jax.nn.silu(xbc), [config.inner_size, config.inner_size + bc], axis=-1)
        lead, group = xbc.shape[:-1], (config.num_groups, config.dstate)
        return (
            x.reshape(*lead, config.num_heads, config.headdim),
            b.reshape(*lead, *group),
            c.reshape(*lead, *group),
        )

    def _decay(self):
        return -jnp.exp(self.A_log[...].astype(sum_dtype(self.config.dtype)))

    def _bias(self):
        return None if self.conv_bias is None else self.conv_bias[...]

    def _scan_options(self) -> dict[str, Any]:
        return {
            "D": self.D[...],
            "dt_bias": self.dt_bias[...],
            "dt_softplus": True,
            "dt_limit": self.config.time_step_limit,
            "implementation": self.config.implementation,
        }

    def _finish(self, y, z):
        config = self.config
        value = gated_rms_norm(
            y.reshape(z.shape), z, self.norm_scale[...],
            num_groups=config.gate_groups, eps=config.norm_eps, norm_before_gate=config.norm_before_gate,
        )  # fmt: skip
        return self.out_proj(value)


def _first_conv_weight(config, key):
    """(width, h * p + 2 * g * n), drawn as torch's Conv1d draws."""
    bound = config.conv_width**-0.5
    return jax.random.uniform(key, (config.conv_width, config.conv_size), jnp.float32, -bound, bound)


def _first_A_log(config, key):
    """The logarithm of decays drawn evenly between 1 and 16."""
    return jnp.log(jax.random.uniform(key, (config.num_heads,), jnp.float32, 1.0, 16.0))


def _first_dt_bias(config, key):
    """The inverse softplus of time steps drawn evenly in their logarithm."""
    bounds = math.log(config.time_step_min), math.log(config.time_step_max)
    dt = jnp.exp(jax.random.uniform(key, (config.num_heads,), jnp.float32, *bounds))
    dt = jnp.maximum(dt, config.time_step_floor)
    return dt + jnp.log(-jnp.expm1(-dt))
