"""Decode calls on the Triton kernels through torch tensors on a CPU; to be run by `interpreter.interpreted`."""

import jax.numpy as jnp
import numpy as np
import torch

from bridge.native_scan import run_plan
from jax_ssd import ReplayCache, settings, validate
from jax_ssd.implementations.triton_update_plan import CACHE_FIELDS, replay_plan, update_plan
from jax_ssd.validate import ReplayCall, TokenCall, UpdateCall


def to_torch(array):
    array = np.array(array)
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array)


def to_numpy(tensor):
    return tensor.view(torch.int16).numpy().view(jnp.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _tokens(arrays, options):
    return TokenCall(**{name: value for name, value in arrays.items() if name in TokenCall._fields}, **options)


def _named(canonical, rounding):
    """Tensors by the kernels' names, and where the heads and the seeds are."""
    named = canonical.tokens._asdict() | canonical.parameters._asdict()
    place = {}
    if rounding is not None:
        one = {name: np.array([getattr(rounding, name)], np.int32) for name in ("layer", "head_offset")}
        named |= one | {"seeds": rounding.seeds}
        total = rounding.total_heads
        place = {"layers": rounding.seeds.shape[0], "total_heads": total, "shifted": total is not None}
    return named, place


def update(arrays, options, rounding=None, write_slots=None, tile=None):
    """(y, state) of `selective_state_update`."""
    call = UpdateCall(_tokens(arrays, options), arrays["state"], arrays.get("read_slots"), write_slots, rounding)
    problem, canonical = validate.update_problem(call), validate.update_arrays(call)
    named, place = _named(canonical, rounding)
    named |= {name: getattr(canonical, name) for name in ("state", "read_slots", "write_slots")}
    plan = update_plan(problem, tile or settings.triton_update_tile(problem), native=False, **place)
    return _launched(plan, named, "update", arrays["x"].shape)


def replay(cache, arrays, options, rounding=None, slots=None, tile=None):
    """(y, cache) of `replay_update`."""
    call = ReplayCall(_tokens(arrays, options), ReplayCache(*cache), slots, rounding)
    problem, canonical = validate.replay_problem(call), validate.replay_arrays(call)
    named, place = _named(canonical, rounding)
    named |= dict(zip(CACHE_FIELDS, canonical.cache, strict=True), slots=canonical.slots)
    plan = replay_plan(problem, tile or settings.triton_update_tile(problem), native=False, **place)
    y, *parts = _launched(plan, named, "replay", arrays["x"].shape)
    return y, tuple(parts)


def _launched(plan, named, module, shape):
    from jax_ssd.kernels.triton import replay, update

    kernels = {"update": update, "replay": replay}[module]
    written = run_plan(plan, {name: to_torch(value) for name, value in named.items() if value is not None}, kernels)
    y, *rest = (to_numpy(value) for value in written.values())
    return y.reshape(shape), *rest
