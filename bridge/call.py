"""`torch_call`: any JAX function on torch tensors, with gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bridge.autograd import Node, transforms_active
from bridge.compiled import call_in_graph
from bridge.constants import constant_imports
from bridge.invocation import Call
from bridge.program import MAX_PROGRAMS, CacheInfo, ProgramCache
from bridge.streams import open_endpoints

_shared = ProgramCache(MAX_PROGRAMS)


def torch_call(fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a JAX function with torch tensors and returns torch tensors.

        torch_call(fn, *args, **kwargs) == to_torch(fn(*to_jax(args), **to_jax(kwargs)))

    Memory is shared both ways, the call is ordered on the current torch stream without blocking the host, and
    `torch.autograd` differentiates through it. `fn` is traced and compiled once for each structure, shapes, dtypes,
    static values and set of tensors that require gradients; docs/bridge.md has the rules in full.

    Args:
        fn: the JAX function. It is the key of a cache: keep one made anew for each call (a lambda) with `wrap`.
        *args, **kwargs: pytrees. Tensors, NumPy and JAX arrays, floats and complex numbers are traced; all tensors
            are on one device. Everything else, and a tuple that holds no array, is static and must be hashable;
            a torch dtype becomes the JAX one.

    Returns:
        What `fn` returns, with torch tensors in place of arrays; results that are not arrays are passed on.

    Raises:
        ValueError: tensors on several devices; float64 or complex128, or 64-bit integers out of range, with
            jax_enable_x64 off.
        TypeError: sparse, quantized or meta tensors, tensor subclasses without memory, unhashable static values.
        NotImplementedError: under CUDA-graph capture, torch.func.vmap and jvp, and for second derivatives.
    """
    _check(fn)
    return _call(fn, _shared, args, kwargs)


class Wrapped:
    """A JAX function as a torch one; its compiled programs live as long as it does."""

    def __init__(self, fn: Callable, maxsize: int) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._programs = ProgramCache(maxsize)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self._fn, self._programs, args, kwargs)

    def cache_info(self) -> CacheInfo:
        return self._programs.info()

    def cache_clear(self) -> None:
        self._programs.clear()


def wrap(fn: Callable, *, maxsize: int = MAX_PROGRAMS) -> Wrapped:
    """The function `torch_call` makes of `fn`, with a cache of its own: `wrap(fn)(x)` is `torch_call(fn, x)`.

    Args:
        fn: any JAX function.
        maxsize: how many compiled programs to keep.

    Returns:
        A callable with `cache_info()` and `cache_clear()`.

    Raises:
        TypeError: `fn` is not callable. ValueError: `maxsize` is below 1.
    """
    _check(fn)
    return Wrapped(fn, maxsize)


def cache_info() -> CacheInfo:
    """Counters of the programs that `torch_call` keeps: hits, misses (each one a compilation), maxsize, currsize."""
    return _shared.info()


def cache_clear() -> None:
    """Drops the programs that `torch_call` keeps, and imports that are kept between calls."""
    _shared.clear()
    constant_imports.clear()
    for found in list(open_endpoints.values()):
        found.forget()


def _check(fn: Callable) -> None:
    if not callable(fn) or type(fn).__hash__ is None:
        raise TypeError(f"fn: expected a hashable function, given a {type(fn).__name__}")


def _call(fn: Callable, cache: ProgramCache, args: tuple, kwargs: dict) -> Any:
    if torch.compiler.is_compiling():
        return call_in_graph(fn, args, kwargs)
    call = Call(fn, args, kwargs)
    leaves, places = call.leaves, call.places
    wanted: tuple[int, ...] = ()
    if torch.is_grad_enabled():
        wanted = tuple([i for i, place in enumerate(places) if leaves[place].requires_grad])
    if transforms_active() or wanted:
        return call.results(Node.apply(call, cache, wanted, *[leaves[place] for place in places]))
    return call.results(call.run((), cache))
