"""From a call as the user wrote it to a checked, frozen problem and canonical arrays. The only place that validates."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ssd import checks
from jax_ssd.philox import StochasticRounding
from jax_ssd.problem import (
    Array,
    CacheUse,
    Parameters,
    PrefillArrays,
    Present,
    ReplayArrays,
    ScanArrays,
    ScanProblem,
    Sizes,
    StepSize,
    Tokens,
    UpdateArrays,
    UpdateProblem,
)
from jax_ssd.replay import ReplayCache


class TokenCall(NamedTuple):
    """The arguments that all operations share, as given."""

    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any = None
    z: Any = None
    dt_bias: Any = None
    dt_softplus: Any = False
    dt_limit: Any = (0.0, math.inf)


class ScanCall(NamedTuple):
    """`chunk_scan` as called."""

    shared: TokenCall
    initial_states: Any = None
    seq_idx: Any = None
    cu_seqlens: Any = None
    checkpoint_positions: Any = None
    chunk_size: Any = None
    state_dtype: Any = None


class PrefillCall(NamedTuple):
    """`prefill` as called."""

    scan: ScanCall
    cache: Any
    slots: Any
    has_initial_state: Any
    checkpoint_slots: Any = None
    rounding: Any = None


class UpdateCall(NamedTuple):
    """`selective_state_update` as called."""

    shared: TokenCall
    state: Any
    read_slots: Any = None
    write_slots: Any = None
    rounding: Any = None


class ReplayCall(NamedTuple):
    """`replay_update` as called."""

    shared: TokenCall
    cache: Any
    slots: Any = None
    rounding: Any = None


def scan_problem(call: ScanCall) -> ScanProblem:
    """Check a scan."""
    shapes = checks.Shapes()
    batched = _is_batched(call)
    sizes, present = _shared(call.shared, shapes, "bt" if batched else "t")
    if not batched:
        shapes.sizes["s"] = _num_seqs(call.cu_seqlens, shapes.sizes["t"])
    num_seqs = shapes.sizes["b" if batched else "s"]
    if call.initial_states is not None:
        checks.floating("initial_states", checks.array("initial_states", call.initial_states))
        shapes.bind("initial_states", call.initial_states, "bhpn" if batched else "shpn")
    if call.seq_idx is not None:
        shapes.bind("seq_idx", checks.index_dtype("seq_idx", call.seq_idx), "bt")
    if call.checkpoint_positions is not None:
        positions = checks.index_dtype("checkpoint_positions", call.checkpoint_positions)
        shapes.bind("checkpoint_positions", positions, "k")
    dtype = checks.dtype_name(call.shared.x)
    return ScanProblem(
        sizes=sizes,
        num_tokens=shapes.sizes["t"] * (num_seqs if batched else 1),
        num_seqs=num_seqs,
        uniform_length=shapes.sizes["t"] if batched else None,
        num_checkpoints=shapes.sizes.get("k"),
        dtype=dtype,
        dt_dtype=checks.dtype_name(call.shared.dt),
        state_dtype=_state_dtype(call.state_dtype, dtype),
        step_size=_step_size(call.shared),
        present=present._replace(initial_states=call.initial_states is not None, seq_idx=call.seq_idx is not None),
        chunk_size=None if call.chunk_size is None else checks.positive_int("chunk_size", call.chunk_size),
    )


def prefill_problem(call: PrefillCall) -> ScanProblem:
    """Check a prefill: the scan, then the cache and its slots."""
    if call.scan.cu_seqlens is None:
        raise ValueError("cu_seqlens: expected an array (s+1,), got None; `prefill` takes packed sequences only.")
    problem = scan_problem(call.scan)
    use = _cache("cache", call.cache, problem.sizes, problem.dtype, call.rounding)
    shapes = checks.Shapes()
    shapes.sizes.update(s=problem.num_seqs, k=problem.num_checkpoints or 0)
    slots = checks.index_dtype("slots", call.slots)
    shapes.bind("slots", slots, "s")
    checks.slots_in_range("slots", slots, use.num_slots)
    if call.has_initial_state is not None:
        checks.boolean("has_initial_state", checks.array("has_initial_state", call.has_initial_state))
        shapes.bind("has_initial_state", call.has_initial_state, "s")
    if (call.checkpoint_slots is None) != (problem.num_checkpoints is None):
        raise ValueError("checkpoint_slots: expected together with checkpoint_positions, got one without the other.")
    if call.checkpoint_slots is not None:
        checkpoint_slots = checks.index_dtype("checkpoint_slots", call.checkpoint_slots)
        shapes.bind("checkpoint_slots", checkpoint_slots, "k")
        checks.slots_in_range("checkpoint_slots", checkpoint_slots, use.num_slots)
    _prefill_slots_once(call)
    present = problem.present._replace(initial_states=call.has_initial_state is not None)
    return dataclasses.replace(problem, cache=use, present=present)


def update_problem(call: UpdateCall) -> UpdateProblem:
    """Check a decode step."""
    shapes = checks.Shapes()
    sizes, present = _shared(call.shared, shapes, _update_axes(call.shared.x))
    batch, num_tokens = shapes.sizes["b"], shapes.sizes.get("t", 1)
    use = _cache("state", call.state, sizes, checks.dtype_name(call.shared.x), call.rounding)
    read_slots = _row_slots("read_slots", call.read_slots, batch, use.num_slots)
    write_slots, kind = read_slots, "read"
    if call.write_slots is not None:
        write_slots = checks.index_dtype("write_slots", call.write_slots)
        kind = "each" if write_slots.ndim == 2 else "last"
        bound = checks.Shapes()
        bound.sizes.update(b=batch, t=num_tokens)
        bound.bind("write_slots", write_slots, "bt" if kind == "each" else "b")
        checks.slots_in_range("write_slots", write_slots, use.num_slots)
    reads, writes = checks.host_values(read_slots), checks.host_values(write_slots)
    if reads is not None and writes is not None:
        padding = (reads < 0).reshape((-1,) + (1,) * (writes.ndim - 1))
        writes = np.where(padding, -1, writes)
    checks.written_by_one_row("write_slots", [writes], [reads])
    return UpdateProblem(
        sizes=sizes,
        batch=batch,
        num_tokens=num_tokens,
        dtype=checks.dtype_name(call.shared.x),
        dt_dtype=checks.dtype_name(call.shared.dt),
        step_size=_step_size(call.shared),
        present=present,
        cache=use,
        write_slots=kind,
    )


def replay_problem(call: ReplayCall) -> UpdateProblem:
    """Check a decode step with a replay cache."""
    cache = replay_cache(call.cache)
    shapes = checks.Shapes()
    sizes, present = _shared(call.shared, shapes, _update_axes(call.shared.x))
    batch, num_tokens = shapes.sizes["b"], shapes.sizes.get("t", 1)
    dtype = checks.dtype_name(call.shared.x)
    use = _cache("cache.state", cache.state, sizes, dtype, call.rounding)
    checks.same_dtype("cache.x", cache.x, "x", dtype)
    ring_size = cache.x.shape[1]
    shapes.sizes.update(w=use.num_slots, r=ring_size)
    shapes.bind("cache.x", cache.x, "wrhp")
    shapes.bind("cache.B", cache.B, "wrgn")
    if 2 * num_tokens > ring_size:
        raise ValueError(
            f"x: expected at most {ring_size // 2} tokens, half the ring of {ring_size}, got {num_tokens}."
        )
    slots = _row_slots("slots", call.slots, batch, use.num_slots)
    checks.written_by_one_row("slots", [checks.host_values(slots)], [])
    return UpdateProblem(
        sizes=sizes,
        batch=batch,
        num_tokens=num_tokens,
        dtype=dtype,
        dt_dtype=checks.dtype_name(call.shared.dt),
        step_size=_step_size(call.shared),
        present=present,
        cache=use,
        ring_size=ring_size,
    )


def replay_cache(value: Any) -> ReplayCache:
    """A ReplayCache whose parts agree with each other."""
    if not isinstance(value, ReplayCache):
        raise TypeError(f"cache: expected a ReplayCache (see ReplayCache.from_state), got {type(value).__name__}.")
    shapes = checks.Shapes()
    for name, letters in zip(value._fields, ("whpn", "wrhp", "wrh", "wrgn", "w", "w", "w"), strict=True):
        shapes.bind(f"cache.{name}", checks.array(f"cache.{name}", getattr(value, name)), letters)
    return value


def replay_cache_arrays(cache: ReplayCache) -> ReplayCache:
    """A checked cache as JAX arrays."""
    return ReplayCache(*(jnp.asarray(part) for part in cache))


def cache_slots(cache: ReplayCache, slots: Any) -> Array:
    """Checked slots (b,) of a replay cache, int32."""
    num_slots = cache.state.shape[0]
    checked = checks.index_dtype("slots", slots)
    checks.Shapes().bind("slots", checked, "b")
    checks.slots_in_range("slots", checked, num_slots)
    checks.written_by_one_row("slots", [checks.host_values(checked)], [])
    return checks.as_index(checked)


def rewind_arrays(cache: ReplayCache, slots: Any, accepted: Any) -> tuple[Array, Array]:
    """Checked slots (b,) and counts (b,) of a rewind, int32."""
    index = cache_slots(cache, slots)
    counts = checks.index_dtype("accepted", accepted)
    shapes = checks.Shapes()
    shapes.sizes["b"] = index.shape[0]
    shapes.bind("accepted", counts, "b")
    known = checks.host_values(counts)
    if known is not None and known.size and known.min() < 0:
        raise ValueError(f"accepted: expected counts of at least 0, got {known.min()}.")
    return index, checks.as_index(counts)


def materialize_arrays(cache: ReplayCache, A: Any, slots: Any) -> tuple[Array, Array]:
    """A (h,) in the accumulator's dtype and slots (b,), all of them for None."""
    checks.floating("A", checks.array("A", A))
    shapes = checks.Shapes()
    shapes.sizes["h"] = cache.state.shape[1]
    shapes.bind("A", A, "h")
    checks.decay(A)
    everything = np.arange(cache.state.shape[0], dtype=np.int32)
    index = cache_slots(cache, everything if slots is None else slots)
    return jnp.asarray(A).astype(checks.accumulator(checks.dtype_name(cache.x))), index


def scan_arrays(call: ScanCall) -> ScanArrays:
    """Canonical arrays of a checked scan: tokens in one axis, parameters in the accumulator's dtype."""
    dtype = checks.accumulator(checks.dtype_name(call.shared.x))
    axes = 2 if call.cu_seqlens is None else 1
    return ScanArrays(
        tokens=Tokens(*(_merge_axes(value, axes) for value in _token_values(call.shared))),
        parameters=_parameters(call.shared, dtype),
        initial_states=_cast(call.initial_states, dtype),
        cu_seqlens=_index(call.cu_seqlens),
        seq_idx=None if call.seq_idx is None else checks.as_index(call.seq_idx).reshape(-1),
        checkpoint_positions=_index(call.checkpoint_positions),
    )


def prefill_arrays(call: PrefillCall) -> PrefillArrays:
    """Canonical arrays of a checked prefill."""
    has_initial = None if call.has_initial_state is None else jnp.asarray(call.has_initial_state)
    return PrefillArrays(
        scan=scan_arrays(call.scan),
        cache=jnp.asarray(call.cache),
        slots=checks.as_index(call.slots),
        has_initial_state=has_initial,
        checkpoint_slots=_index(call.checkpoint_slots),
        rounding=call.rounding,
    )


def update_arrays(call: UpdateCall) -> UpdateArrays:
    """Canonical arrays of a checked update: a token axis, explicit slots to read."""
    tokens, parameters = _update_tokens(call.shared)
    return UpdateArrays(
        tokens=tokens,
        parameters=parameters,
        state=jnp.asarray(call.state),
        read_slots=_row_index(call.read_slots, tokens.x.shape[0]),
        write_slots=_index(call.write_slots),
        rounding=call.rounding,
    )


def replay_arrays(call: ReplayCall) -> ReplayArrays:
    """Canonical arrays of a checked replay update."""
    tokens, parameters = _update_tokens(call.shared)
    return ReplayArrays(
        tokens=tokens,
        parameters=parameters,
        cache=replay_cache_arrays(call.cache),
        slots=_row_index(call.slots, tokens.x.shape[0]),
        rounding=call.rounding,
    )


def _is_batched(call: ScanCall) -> bool:
    """Whether x has a batch axis; what belongs to one form only is refused in the other."""
    ndim = checks.array("x", call.shared.x).ndim
    if ndim == 4 and call.cu_seqlens is None:
        if call.checkpoint_positions is not None:
            raise ValueError("checkpoint_positions: expected None in the batched form; pack with cu_seqlens instead.")
        return True
    if ndim == 3 and call.cu_seqlens is not None:
        if call.seq_idx is not None:
            raise ValueError("seq_idx: expected None in the packed form; cu_seqlens says where sequences start.")
        return False
    shape = tuple(call.shared.x.shape)
    if ndim == 4:
        raise ValueError(f"cu_seqlens: expected None with a batched x (b, t, h, p), got an array; x is {shape}.")
    if ndim == 3:
        raise ValueError(f"cu_seqlens: expected an array (s+1,) with a packed x (t, h, p), got None; x is {shape}.")
    raise ValueError(f"x: expected shape (b, t, h, p), or (t, h, p) with cu_seqlens, got {shape}.")


def _update_axes(x: Any) -> str:
    """The leading letters of an update's x."""
    ndim = checks.array("x", x).ndim
    if ndim not in (3, 4):
        raise ValueError(f"x: expected shape (b, h, p) or (b, t, h, p), got {tuple(x.shape)}.")
    return "b" if ndim == 3 else "bt"


def _shared(call: TokenCall, shapes: checks.Shapes, rows: str) -> tuple[Sizes, Present]:
    """Check what all operations share; `rows` are the leading letters of the tokens."""
    for name in ("x", "dt", "A", "B", "C"):
        checks.array(name, getattr(call, name))
    shapes.bind("x", call.x, rows + "hp")
    dtype = checks.token_dtype("x", checks.dtype_name(call.x))
    shapes.bind("dt", call.dt, rows + "h")
    checks.step_dtype(call.dt, dtype)
    checks.floating("A", call.A)
    shapes.bind("A", call.A, "h")
    checks.decay(call.A)
    for name in ("B", "C"):
        shapes.bind(name, getattr(call, name), rows + "gn")
        checks.same_dtype(name, getattr(call, name), "x", dtype)
    shapes.require_nonzero("hpgn")
    checks.groups_divide_heads(shapes.sizes["h"], shapes.sizes["g"])
    if call.z is not None:
        shapes.bind("z", checks.array("z", call.z), rows + "hp")
        checks.same_dtype("z", call.z, "x", dtype)
    present = Present(D=_skip_kind(call.D, shapes), z=call.z is not None, dt_bias=call.dt_bias is not None)
    if call.dt_bias is not None:
        checks.floating("dt_bias", checks.array("dt_bias", call.dt_bias))
        shapes.bind("dt_bias", call.dt_bias, "h")
    return Sizes(*(shapes.sizes[letter] for letter in "hpgn")), present


def _skip_kind(D: Any, shapes: checks.Shapes) -> Literal["none", "head", "channel"]:
    """Whether D is absent, one value a head, or one a channel."""
    if D is None:
        return "none"
    checks.floating("D", checks.array("D", D))
    shapes.bind("D", D, "hp" if D.ndim == 2 else "h")
    return "channel" if D.ndim == 2 else "head"


def _step_size(call: TokenCall) -> StepSize:
    return StepSize(checks.flag("dt_softplus", call.dt_softplus), checks.limits(call.dt_limit))


def _num_seqs(cu_seqlens: Any, num_tokens: int) -> int:
    """The number of packed sequences."""
    bounds = checks.index_dtype("cu_seqlens", cu_seqlens)
    if bounds.ndim != 1 or bounds.shape[0] == 0:
        raise ValueError(f"cu_seqlens: expected shape (s+1,), got {tuple(bounds.shape)}.")
    checks.sequence_bounds(bounds, num_tokens)
    return bounds.shape[0] - 1


def _state_dtype(state_dtype: Any, dtype: str) -> str:
    """The dtype of returned states; float64 only with float64 inputs."""
    if state_dtype is None:
        return checks.accumulator(dtype).name
    known = checks.token_dtype("state_dtype", state_dtype).name
    if known == "float64" and dtype != "float64":
        raise ValueError(f"state_dtype: expected float64 only with float64 inputs, got x of {dtype}.")
    return known


def _cache(name: str, pool: Any, sizes: Sizes, dtype: str, rounding: Any) -> CacheUse:
    """Check a state pool against the tokens' sizes, and the rounding against its dtype."""
    num_slots, *rest = checks.state_pool(name, pool)
    expected = (sizes.num_heads, sizes.headdim, sizes.dstate)
    if tuple(rest) != expected:
        raise ValueError(
            f"{name}: expected shape (w, h, p, n) = (?, {', '.join(map(str, expected))}), got {tuple(pool.shape)}."
        )
    pool_dtype = checks.dtype_name(pool)
    if pool_dtype == "float64" and dtype != "float64":
        raise ValueError(f"{name}: expected float64 only with float64 inputs, got x of {dtype}.")
    if rounding is None:
        return CacheUse(num_slots, pool_dtype)
    if not isinstance(rounding, StochasticRounding):
        raise TypeError(f"rounding: expected a StochasticRounding or None, got {type(rounding).__name__}.")
    if pool_dtype not in ("float16", "bfloat16"):
        raise ValueError(f"rounding: expected a float16 or bfloat16 {name} to round to, got {pool_dtype}.")
    rounding.check_heads(sizes.num_heads)
    return CacheUse(num_slots, pool_dtype, rounding.rounds)


def _row_slots(name: str, slots: Any, batch: int, num_slots: int) -> Array:
    """Slots (b,); None is 0..b-1, which must exist."""
    if slots is None:
        if batch > num_slots:
            raise ValueError(f"{name}: expected slots for {batch} rows, got None and a pool of {num_slots} slots.")
        return np.arange(batch, dtype=np.int32)
    checked = checks.index_dtype(name, slots)
    shapes = checks.Shapes()
    shapes.sizes["b"] = batch
    shapes.bind(name, checked, "b")
    checks.slots_in_range(name, checked, num_slots)
    return checked


def _prefill_slots_once(call: PrefillCall) -> None:
    """Each slot is written at most once in a call, as far as the host knows."""
    known = [checks.host_values(value) for value in (call.slots, call.checkpoint_slots) if value is not None]
    rows = [value for value in known if value is not None]
    if rows:
        checks.written_by_one_row("slots and checkpoint_slots", [np.concatenate(rows)], [])


def _token_values(call: TokenCall) -> tuple[Array | None, ...]:
    return tuple(None if value is None else jnp.asarray(value) for value in (call.x, call.dt, call.B, call.C, call.z))


def _update_tokens(call: TokenCall) -> tuple[Tokens, Parameters]:
    """An update's tokens with a token axis, and its parameters."""
    values = _token_values(call)
    if call.x.ndim == 3:
        values = tuple(None if value is None else value[:, None] for value in values)
    return Tokens(*values), _parameters(call, checks.accumulator(checks.dtype_name(call.x)))


def _parameters(call: TokenCall, dtype: Any) -> Parameters:
    return Parameters(*(_cast(value, dtype) for value in (call.A, call.D, call.dt_bias)))


def _merge_axes(value: Array | None, axes: int) -> Array | None:
    """One token axis in place of the first `axes`."""
    if value is None:
        return None
    return value.reshape((math.prod(value.shape[:axes]), *value.shape[axes:]))


def _cast(value: Any, dtype: Any) -> Array | None:
    return None if value is None else jnp.asarray(value).astype(dtype)


def _index(value: Any) -> Array | None:
    return None if value is None else checks.as_index(value)


def _row_index(value: Any, batch: int) -> Array:
    return jnp.asarray(np.arange(batch, dtype=np.int32)) if value is None else checks.as_index(value)
