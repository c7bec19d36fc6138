"""One ordered table per operation: which implementations it has, which one serves a call, and why the others do not."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
from jax.core import Tracer

from jax_ssd.problem import DeviceInfo, Problem, Verdict

_logger = logging.getLogger("jax_ssd")

NAMES = ("mosaic_gpu", "triton", "flashinfer", "xla")

# Fastest first. A name that is missing from an operation's row has no kernel for it.
_TABLE: dict[str, tuple[str, ...]] = {
    "chunk_scan": ("triton", "xla"),
    "prefill": ("triton", "xla"),
    "selective_state_update": ("triton", "xla"),
    "replay_update": ("triton", "xla"),
}

Implementation = str | Sequence[str] | None


def implementations() -> tuple[str, ...]:
    """Names of the implementations that serve at least one operation, fastest first."""
    return tuple(name for name in NAMES if any(name in row for row in _TABLE.values()))


def choose(problem: Problem, arrays: Any, implementation: Implementation) -> ModuleType:
    """The implementation that serves this call."""
    device = device_of(arrays)
    reasons = []
    for name in _order(problem.op, implementation):
        reason = _reason(name, problem, device)
        if reason is None:
            _logger.debug("%s: %s on %s", problem.op, name, device.platform)
            return _module(name)
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"{problem.op}: no implementation asked for can serve this call. " + " ".join(reasons))


def explain(problem: Problem, device: DeviceInfo) -> list[Verdict]:
    """A verdict for every implementation, the one that None chooses first."""
    verdicts = []
    for name in _order(problem.op, None) + tuple(n for n in NAMES if n not in _TABLE[problem.op]):
        reason = _reason(name, problem, device)
        configuration = {} if reason else _module(name).configuration(problem, device)
        verdicts.append(Verdict(name, reason, configuration))
    return sorted(verdicts, key=lambda verdict: verdict.reason is not None)


def device_of(arrays: Any) -> DeviceInfo:
    """The device of the first array that has one; under tracing, the mesh's or the default device."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    if leaves and not any(isinstance(leaf, Tracer) for leaf in leaves):
        return describe(next(iter(leaves[0].devices())))
    return describe(_default_device())


def describe(device: Any) -> DeviceInfo:
    """DeviceInfo of a live device; a DeviceInfo stays as it is."""
    if isinstance(device, DeviceInfo):
        return device
    if not isinstance(device, jax.Device):
        raise TypeError(f"device: expected a jax.Device or a DeviceInfo, got {type(device).__name__}.")
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    capability = getattr(device, "compute_capability", None) if platform == "gpu" else None
    version = tuple(int(part) for part in capability.split(".")) if capability and "gfx" not in capability else None
    return DeviceInfo(
        platform=platform,
        compute_capability=(version[0], version[1]) if version else None,
        multiprocessors=getattr(device, "core_count", None) if version else None,
        shared_memory_per_block=getattr(device, "shared_memory_per_block_optin", None) if version else None,
    )


def _default_device() -> Any:
    """The mesh's kind of device where tracing happens under one, else the default device."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    default: Any = getattr(jax.config, "jax_default_device", None)
    first = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    if abstract is None or abstract.device_kind == first.device_kind:
        return first
    return next(device for device in jax.devices(abstract.platform) if device.device_kind == abstract.device_kind)


def _order(op: str, implementation: Implementation) -> tuple[str, ...]:
    """Names in order of preference, checked."""
    if implementation is None:
        return _TABLE[op]
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"implementation: expected a name, a sequence of names or None, got {implementation!r}.")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"implementation: expected one of {', '.join(NAMES)}, got {name!r}.")
    if not names:
        raise ValueError("implementation: expected at least one name, got an empty sequence.")
    return tuple(names)


def _reason(name: str, problem: Problem, device: DeviceInfo) -> str | None:
    if name not in _TABLE[problem.op]:
        return f"this version has no {name} kernel for {problem.op}."
    return _module(name).supports(problem, device)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"jax_ssd.implementations.{name}")
