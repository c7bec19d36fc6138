"""The Triton scan launched by torch on torch tensors, on torch's current stream.

`run_plan` launches any plan through Triton's own call. `scan` keeps a `Launcher` for each kind of call: repeats cost a
look-up, the allocation of results and scratch, and launches whose pointers go straight to the driver.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from jax_ssd import settings
from jax_ssd.implementations import triton_plan
from jax_ssd.implementations.triton_plan import Launch, Plan, Strides
from jax_ssd.problem import ScanProblem

Tensors = dict[str, torch.Tensor]

# Kernels are compiled for addresses that are multiples of 16; torch's allocator gives multiples of 512.
_UNALIGNED = 15
_SCRATCH_ALIGNMENT = 256


def run_plan(plan: Plan, arrays: Tensors, kernels: ModuleType | None = None) -> Tensors:
    """Launch a plan's kernels on `arrays` by name; returns what they wrote. An alias is written in place."""
    kernels = kernels or _kernels()
    device = arrays["x"].device
    env = dict(arrays)
    for name, buffer in plan.buffers.items():
        if name in plan.aliases:
            env[name] = arrays[plan.aliases[name]]
        else:
            env[name] = torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype), device=device)
    for launch in plan.launches:
        getattr(kernels, launch.kernel)[(launch.programs,)](
            *(env[name] for name in launch.inputs),
            *launch.numbers,
            *(env[name] for name in launch.outputs),
            **launch.constants,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return {name: env[name] for name in plan.buffers}


def scan(problem: ScanProblem, arrays: Tensors, total_heads: int | None = None) -> Tensors:
    """`y`, `final` and `checkpoints` of a problem that the kernels serve; a cache is written in place.

    Inside a token arrays are dense; tokens may be any distance apart, as in a slice of a larger projection.
    """
    x, dt, B, C = (arrays[name] for name in ("x", "dt", "B", "C"))
    strides = Strides(x.stride(0), dt.stride(0), B.stride(0), C.stride(0), arrays.get("z", x).stride(0))
    return _launcher(problem, strides, x.device, total_heads)(arrays)


@functools.lru_cache(maxsize=4096)
def _launcher(
    problem: ScanProblem, strides: Strides, device: torch.device, total_heads: int | None
) -> Callable[[Tensors], Tensors]:
    if device.type == "cpu":
        tile = settings.triton_scan_tile(problem, None)
    else:
        found = torch.cuda.get_device_properties(device)
        tile = settings.triton_scan_tile(
            problem, found.multi_processor_count, found.shared_memory_per_block_optin, (found.major, found.minor)
        )
    if tile is None:
        raise NotImplementedError(f"triton: no tile fits the shared memory of {device}.")
    plan = triton_plan.scan_plan(problem, tile, strides, upcast=device.type == "cpu", total_heads=total_heads)
    return functools.partial(run_plan, plan) if device.type == "cpu" else Launcher(plan, device)


class _Prepared(NamedTuple):
    """A compiled kernel's launch: `pick` takes its arguments out of the call's values."""

    run: Callable[..., None]
    head: tuple[int, int, int]
    function: Any
    metadata: Any
    pick: Callable[[list[Any]], tuple[Any, ...]]


class Launcher:
    """A plan with its kernels compiled for tensors whose addresses are multiples of 16."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self._device = plan, device
        results = {name: buffer for name, buffer in plan.buffers.items() if name in triton_plan.RESULTS}
        self._made = [
            (name, buffer.shape, getattr(torch, buffer.dtype))
            for name, buffer in results.items()
            if name not in plan.aliases
        ]
        self._results = tuple(results)
        scratch = {name: buffer for name, buffer in plan.buffers.items() if name not in results}
        sizes = [
            -(-math.prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize // _SCRATCH_ALIGNMENT)
            for buffer in scratch.values()
        ]
        self._scratch = dict(zip(scratch, itertools.accumulate(sizes, initial=0), strict=False))
        self._scratch_bytes = sum(sizes) * _SCRATCH_ALIGNMENT
        used = {name for launch in plan.launches for name in (*launch.inputs, *launch.outputs)}
        self._inputs = tuple(sorted(used - set(plan.buffers)))
        self._launches: tuple[_Prepared, ...] = ()

    def __call__(self, arrays: Tensors) -> Tensors:
        """What the kernels wrote, but not their scratch."""
        index = self._device.index
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self(arrays)
        env = {name: torch.empty(shape, dtype=dtype, device=self._device) for name, shape, dtype in self._made}
        for name, source in self.plan.aliases.items():
            env[name] = arrays[source]
        pointers = [arrays[name].data_ptr() for name in self._inputs]
        if functools.reduce(operator.or_, pointers) & _UNALIGNED:
            written = run_plan(self.plan, arrays)
            return {name: written[name] for name in self._results}
        scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)
        base = scratch.data_ptr()
        pointers += [env[name].data_ptr() for name in self._results]
        pointers += [base + offset * _SCRATCH_ALIGNMENT for offset in self._scratch.values()]
        stream = torch._C._cuda_getCurrentRawStream(index)
        for run, head, function, metadata, pick in self._launches or self._compile(arrays | env):
            run(*head, stream, function, metadata, None, None, None, *pick(pointers))
        return env

    def _compile(self, arrays: Tensors) -> tuple[_Prepared, ...]:
        """The first call's kernels, compiled for its tensors."""
        kernels = _kernels()
        places = {name: place for place, name in enumerate((*self._inputs, *self._results, *self._scratch))}
        types = {name: getattr(torch, buffer.dtype) for name, buffer in self.plan.buffers.items()}
        self._launches = tuple(
            _prepared(launch, getattr(kernels, launch.kernel), types | arrays, places) for launch in self.plan.launches
        )
        return self._launches


def _prepared(launch: Launch, kernel: Any, arrays: dict[str, Any], places: dict[str, int]) -> _Prepared:
    compiled = kernel.warmup(
        *(arrays[name] for name in launch.inputs),
        *launch.numbers,
        *(arrays[name] for name in launch.outputs),
        **launch.constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        grid=(launch.programs,),
    )
    before = operator.itemgetter(*(places[name] for name in launch.inputs))
    after = operator.itemgetter(*(places[name] for name in launch.outputs))
    # The driver's call has a place for each compile-time constant and ignores what stands there.
    constants = (None,) * len(launch.constants)

    def pick(values: list[Any]) -> tuple[Any, ...]:
        return (*before(values), *launch.numbers, *after(values), *constants)

    run = compiled.run  # first: it loads the kernel, and the function is known then
    return _Prepared(run, (launch.programs, 1, 1), compiled.function, compiled.packed_metadata, pick)


def _kernels() -> ModuleType:
    """Imported when first launched: Triton is missing where torch is a CPU build."""
    from jax_ssd.kernels.triton import scan as kernels

    return kernels
