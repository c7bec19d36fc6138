"""The public functions: docstring, validation into a problem, dispatch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

from jax_ssd import dispatch, replay_ops, validate
from jax_ssd.philox import StochasticRounding
from jax_ssd.problem import Array, PrefillResult, ScanResult, UpdateResult, Verdict
from jax_ssd.replay import ReplayCache, ReplayResult
from jax_ssd.validate import PrefillCall, ReplayCall, ScanCall, TokenCall, UpdateCall


def chunk_scan(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Array | None = None,
    seq_idx: Array | None = None,
    cu_seqlens: Array | None = None,
    checkpoint_positions: Array | None = None,
    chunk_size: int | None = None,
    state_dtype: Any = None,
    implementation: str | Sequence[str] | None = None,
) -> ScanResult:
    """The SSD scan over whole sequences, by chunks and matrix products.

        dt_t = clip(softplus(dt_t + dt_bias), *dt_limit)
        S_t  = exp(dt_t * A) * S_{t-1} + dt_t * x_t B_t^T
        y_t  = (S_t C_t + D * x_t) * silu(z_t)

    Letters: b batch, t token, s sequence, h head, p headdim, g group, n dstate, k checkpoint. S is (h,p,n); head i
    reads group i // (h / g). Without a batch axis, `cu_seqlens` packs sequences of any length into one token axis.
    Sums are float32 (float64 where the inputs are). Gradients reach every floating-point argument from all three
    results.

    Args:
      x: (b,t,h,p), or (t,h,p) with cu_seqlens; float32, bfloat16, float16 or float64.
      dt: (b,t,h) or (t,h), step size, x's dtype or float32.
      A: (h,), at most 0, any float dtype. Above 0 is refused where its values are known and undefined elsewhere.
      B, C: (b,t,g,n) or (t,g,n), x's dtype.
      D: (h,) or (h,p), any float dtype.
      z: like x; y is multiplied by silu(z).
      dt_bias: (h,), added to dt first, any float dtype.
      dt_softplus: apply softplus to dt + dt_bias.
      dt_limit: (low, high), 0 <= low <= high: clip dt last. Its gradient counts the bounds as inside.
      initial_states: (b,h,p,n) or (s,h,p,n), any float dtype; zero where absent. With seq_idx: the first document's.
      seq_idx: (b,t) integers, batched form only: the state restarts from zero wherever they change.
      cu_seqlens: (s+1,) int32, packed form only: starts of the sequences, from 0, never decreasing; may be traced.
        Tokens at or past its last entry belong to nobody: y and gradients are 0 there whatever the inputs hold.
      checkpoint_positions: (k,) int32, packed form only: also return the state just after these tokens. Negative
        entries and ones that belong to no sequence give zeros.
      chunk_size: tokens of a chunk; never changes the mathematics. None lets the implementation choose.
      state_dtype: dtype of the returned states; float32, or float64 with float64 inputs, by default.
      implementation: "xla", "triton", "mosaic_gpu", several in order of preference, or None for the fastest that can
        serve the call. A named one that cannot is an error.

    Returns:
      ScanResult(y like x, final_states (b,h,p,n) or (s,h,p,n), checkpoint_states (k,h,p,n) or None). An empty
      sequence's final state is its initial state.

    Raises:
      ValueError: a shape, dtype or known value is wrong; the message names the argument.
      TypeError: an argument is the wrong kind of object.
      NotImplementedError: no implementation that was asked for can serve the call.

    Limits: "xla" computes every product in float32 (float64 for float64 inputs) and has no forward-mode derivative.

    Source: Dao and Gu 2024, arXiv 2405.21060, section 6 and Listing 1.
    """
    call = ScanCall(
        shared=TokenCall(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit),
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        checkpoint_positions=checkpoint_positions,
        chunk_size=chunk_size,
        state_dtype=state_dtype,
    )
    problem = validate.scan_problem(call)
    arrays = validate.scan_arrays(call)
    result = dispatch.choose(problem, arrays, implementation).run(problem, arrays)
    return result._replace(y=result.y.reshape(x.shape))


def prefill(
    cache: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    cu_seqlens: Array,
    slots: Array,
    has_initial_state: Array | None,
    checkpoint_positions: Array | None = None,
    checkpoint_slots: Array | None = None,
    rounding: StochasticRounding | None = None,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    chunk_size: int | None = None,
    implementation: str | Sequence[str] | None = None,
) -> PrefillResult:
    """`chunk_scan` over packed sequences whose states live in a cache.

    Sequence i starts from cache[slots[i]] where has_initial_state[i], else from zero, and leaves its final state in
    cache[slots[i]], in the cache's dtype, rounded to nearest unless `rounding` is given. Donate the cache and the
    update is in place. Not differentiable on kernels.

    Args:
      cache: (w,h,p,n) float16, bfloat16 or float32 (float64 with float64 inputs).
      x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, cu_seqlens, chunk_size, implementation: as in `chunk_scan`,
        packed form.
      slots: (s,) int32. Negative (or, on a device, out of range): a padding sequence, nothing is read or written and
        y is 0.
      has_initial_state: (s,) bool, or None: no sequence has one. Where False the slot is not read.
      checkpoint_positions: (k,) int32: states just after these tokens, to be stored too.
      checkpoint_slots: (k,) int32: where. A negative slot or position, or a position that belongs to nobody, writes
        nothing.
      rounding: StochasticRounding, for float16 and bfloat16 caches.

    A slot that one sequence writes may be neither read nor written by another in the same call; a slot given twice is
    refused where the host knows it.

    Returns:
      PrefillResult(y like x, cache).

    Raises:
      ValueError, TypeError, NotImplementedError: as in `chunk_scan`; ValueError also for `rounding` with a float32
        cache.

    Source: Dao and Gu 2024, arXiv 2405.21060, section 6.
    """
    shared = TokenCall(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)
    scan = ScanCall(shared, cu_seqlens=cu_seqlens, checkpoint_positions=checkpoint_positions, chunk_size=chunk_size)
    call = PrefillCall(scan, cache, slots, has_initial_state, checkpoint_slots, rounding)
    problem = validate.prefill_problem(call)
    arrays = validate.prefill_arrays(call)
    return dispatch.choose(problem, arrays, implementation).run(problem, arrays)


def selective_state_update(
    state: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    read_slots: Array | None = None,
    write_slots: Array | None = None,
    rounding: StochasticRounding | None = None,
    implementation: str | Sequence[str] | None = None,
) -> UpdateResult:
    """One decode step, or several tokens of one: the recurrence of `chunk_scan` on states in a pool.

        S = exp(dt * A) * S + dt * x B^T;   y = (S C + D * x) * silu(z)

    y and the next token of the same call use the float32 state; only what is stored is rounded, to nearest unless
    `rounding` is given. Donate the state and the update is in place. Not differentiable on kernels.

    Args:
      state: (w,h,p,n) float16, bfloat16 or float32 (float64 with float64 inputs).
      x: (b,h,p), or (b,t,h,p) for several tokens; float32, bfloat16, float16 or float64.
      dt: (b,h) or (b,t,h), x's dtype or float32.
      B, C: (b,g,n) or (b,t,g,n), x's dtype.
      A, D, z, dt_bias, dt_softplus, dt_limit, implementation: as in `chunk_scan`.
      read_slots: (b,) int32, default 0..b-1. Negative (or, on a device, out of range): a padding row, y is 0 and
        nothing is touched.
      write_slots: default read_slots. (b,) stores the state after the last token, (b,t) the state after each token;
        negative: not stored. Roll back to `a` accepted tokens by reading from write_slots[i, a-1] next time.
      rounding: StochasticRounding, for float16 and bfloat16 states.

    A slot that one row writes may be neither read nor written by another row.

    Returns:
      UpdateResult(y like x, state).

    Raises:
      ValueError, TypeError, NotImplementedError: as in `chunk_scan`; ValueError also for `rounding` with a float32
        state.

    Source: Dao and Gu 2024, arXiv 2405.21060, section 3 (the recurrent form).
    """
    shared = TokenCall(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)
    call = UpdateCall(shared, state, read_slots, write_slots, rounding)
    problem = validate.update_problem(call)
    arrays = validate.update_arrays(call)
    result = dispatch.choose(problem, arrays, implementation).run(problem, arrays)
    return result._replace(y=result.y.reshape(x.shape))


def replay_update(
    cache: ReplayCache,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    slots: Array | None = None,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    rounding: StochasticRounding | None = None,
    implementation: str | Sequence[str] | None = None,
) -> ReplayResult:
    """A decode step that stores its inputs in a ring and its state only when the ring would overflow (ReplaySSM).

        y = exp(total) S0 C + sum_j dt_j exp(total - cum_j) (B_j . C) x_j  + D * x, times silu(z)

    S0 is the stored state, j runs over the ring's tokens and the call's. When the call's tokens do not fit, all tokens
    older than the slot's last call are folded into the state, which is stored, rounded to nearest unless `rounding` is
    given (Philox step 0). Agrees with `selective_state_update` where the state is float32. Not differentiable on
    kernels.

    Args:
      cache: ReplayCache; its ring holds at least twice the call's tokens, its x and B have x's dtype.
      x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, rounding, implementation: as in `selective_state_update`.
      slots: (b,) int32, default 0..b-1, each at most once. Negative (or, on a device, out of range): a padding row.

    Returns:
      ReplayResult(y like x, cache).

    Raises:
      ValueError, TypeError, NotImplementedError: as in `selective_state_update`.

    Source: Dao and Gu 2024, arXiv 2405.21060, section 6 (the dual form, over the ring).
    """
    shared = TokenCall(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)
    call = ReplayCall(shared, cache, slots, rounding)
    problem = validate.replay_problem(call)
    arrays = validate.replay_arrays(call)
    result = dispatch.choose(problem, arrays, implementation).run(problem, arrays)
    return result._replace(y=result.y.reshape(x.shape))


def rewind(cache: ReplayCache, slots: Array, accepted: Array) -> ReplayCache:
    """Keep the first `accepted` tokens of each slot's last call and forget its others: a cursor moves, no state does.

    Args:
      cache: ReplayCache.
      slots: (b,) int32, each at most once; negative or out of range: nothing happens.
      accepted: (b,) int32, at least 0; more than the last call had counts as all of it. Call it once after a call.

    Returns:
      The cache; the accepted tokens now count as the slot's last call.

    Raises:
      ValueError, TypeError: a shape, dtype, known slot or known count is wrong.
    """
    validate.replay_cache(cache)
    checked, counts = validate.rewind_arrays(cache, slots, accepted)
    return replay_ops.rewind(validate.replay_cache_arrays(cache), checked, counts)


def materialize(cache: ReplayCache, A: Array, *, slots: Array | None = None) -> Array:
    """The states with their rings folded in: exp(total) S0 + sum_j dt_j exp(total - cum_j) x_j B_j^T.

    Args:
      cache: ReplayCache.
      A: (h,), at most 0, any float dtype.
      slots: (b,) int32, default all slots; zeros for a negative one or one out of range.

    Returns:
      (b,h,p,n) float32 (float64 where x is).

    Raises:
      ValueError, TypeError: a shape, dtype or known slot is wrong.
    """
    validate.replay_cache(cache)
    decay, checked = validate.materialize_arrays(cache, A, slots)
    return replay_ops.materialize(validate.replay_cache_arrays(cache), decay, checked)


def reset(cache: ReplayCache, slots: Array) -> ReplayCache:
    """Empty the rings of `slots (b,)` int32, after a prefill wrote their states.

    Args:
      cache: ReplayCache.
      slots: (b,) int32, each at most once; negative or out of range: nothing happens.

    Raises:
      ValueError, TypeError: a shape, dtype or known slot is wrong.
    """
    validate.replay_cache(cache)
    checked = validate.cache_slots(cache, slots)
    return replay_ops.reset(validate.replay_cache_arrays(cache), checked)


def implementations() -> tuple[str, ...]:
    """Names of the implementations that this version has, fastest first."""
    return dispatch.implementations()


def explain(op: str, *args: Any, device: Any = None, **kwargs: Any) -> list[Verdict]:
    """Which implementation would serve a call, with what configuration, and why the others would not.

    Args:
      op: "chunk_scan", "prefill", "selective_state_update" or "replay_update".
      *args, **kwargs: the call's arguments; arrays may be jax.ShapeDtypeStruct. `implementation` is not one of them.
      device: a jax.Device, a DeviceInfo, or None for the device that the call would run on.

    Returns:
      A Verdict(name, reason, configuration) for every implementation, the choice first. `reason` is None for those
      that can.

    Raises:
      ValueError: an unknown operation, or the call itself is wrong.
      TypeError: the arguments do not fit the operation's signature.
    """
    if op not in _PROBLEMS:
        raise ValueError(f"op: expected one of {', '.join(_PROBLEMS)}, got {op!r}.")
    function, make_problem = _PROBLEMS[op]
    signature = inspect.signature(function)
    public = signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "implementation"])
    bound = public.bind(*args, **kwargs)
    bound.apply_defaults()
    where = dispatch.device_of((args, kwargs)) if device is None else dispatch.describe(device)
    return dispatch.explain(make_problem(dict(bound.arguments)), where)


def _take(arguments: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    return {name: arguments[name] for name in fields if name in arguments}


def _shared(arguments: dict[str, Any]) -> TokenCall:
    return TokenCall(**_take(arguments, TokenCall._fields))


def _scan(arguments: dict[str, Any]) -> ScanCall:
    return ScanCall(_shared(arguments), **_take(arguments, ScanCall._fields))


_PROBLEMS = {
    "chunk_scan": (chunk_scan, lambda arguments: validate.scan_problem(_scan(arguments))),
    "prefill": (
        prefill,
        lambda arguments: validate.prefill_problem(
            PrefillCall(_scan(arguments), **_take(arguments, PrefillCall._fields))
        ),
    ),
    "selective_state_update": (
        selective_state_update,
        lambda arguments: validate.update_problem(
            UpdateCall(_shared(arguments), **_take(arguments, UpdateCall._fields))
        ),
    ),
    "replay_update": (
        replay_update,
        lambda arguments: validate.replay_problem(
            ReplayCall(_shared(arguments), **_take(arguments, ReplayCall._fields))
        ),
    ),
}
