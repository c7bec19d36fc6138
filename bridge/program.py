"""One JAX function at one structure, shapes and dtypes: traced once, compiled ahead of time, with its vjp."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax._src import config

from bridge.dlpack import x64_enabled
from bridge.streams import Endpoint

MAX_PROGRAMS = 256
_ARRAYS = (jax.Array, np.ndarray, np.generic)


class CacheInfo(NamedTuple):
    """Counters of a cache of programs, as `functools.lru_cache` names them; a miss is a compilation."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Recipe(NamedTuple):
    """How to make a call again from its dynamic values alone."""

    treedef: Any
    leaves: tuple[Any, ...]
    dynamic: tuple[int, ...]

    def arguments(self, values: Sequence[Any]) -> tuple[tuple, dict]:
        leaves = list(self.leaves)
        for place, value in zip(self.dynamic, values, strict=True):
            leaves[place] = value
        return tree_util.tree_unflatten(self.treedef, leaves)


class Saved(NamedTuple):
    """Where the backward pass finds one residual: kind is "value", "result", "residual" or "constant"."""

    kind: str
    index: int


def trace_context() -> Hashable:
    """All of JAX's settings that a trace depends on."""
    return config.trace_context()


def x64_scope(x64: bool) -> AbstractContextManager:
    """JAX with 64-bit types on or off; the thread that runs the backward pass does not inherit the caller's context."""
    return nullcontext() if x64_enabled() == x64 else jax.enable_x64(x64)


class Program:
    """The traced forward pass, what the backward pass needs of it, and both passes compiled.

    Its outputs are the results, then the residuals that exist nowhere else; `shapes` has all of their shapes and
    dtypes. A residual that is a value passed in, or a result, is no output of its own: `saved` names it, and the
    caller keeps its tensor, whose version torch checks.
    """

    def __init__(self, fn: Callable, recipe: Recipe, values: Sequence[Any], wanted: tuple[int, ...], where: Endpoint):
        self.stamp = 0
        self.where = where
        self.wanted = wanted
        self.traced = recipe.dynamic
        self.x64 = x64_enabled()
        self.value_shapes = tuple((values[i].shape, values[i].dtype) for i in wanted)
        self.results: tuple[int, ...] = ()
        self.static_results: tuple[Any, ...] = ()
        self.differentiable: tuple[bool, ...] = ()
        self.constants: list[Any] = []
        self.out_tree: Any = None
        self._pullback: Any = None
        self._keys: tuple[Any, ...] = ()
        self._fn, self._recipe = fn, recipe
        self._forward: Any = None
        self._backward: dict[tuple[bool, ...], Any] = {}
        self._lock = threading.Lock()
        with jax.default_device(where.jax_device):
            self._jaxpr = jax.make_jaxpr(self._traced)(*values)
        self._kept = self._find_residuals(self._jaxpr)
        self.shapes = tuple((self._jaxpr.out_avals[i].shape, self._jaxpr.out_avals[i].dtype) for i in self._kept)

    def forward(self, values: Sequence[Any]) -> list[jax.Array]:
        """Results, then residuals; compiled at the first call, for the layouts of its values."""
        if self._forward is None:
            with self._lock:
                if self._forward is None:
                    function = _picked(jax.extend.core.jaxpr_as_fun(self._jaxpr), self._kept)
                    with jax.default_device(self.where.jax_device):
                        self._forward = _compiled(function, *values)
                    self._jaxpr = None
        return self._forward(*values)

    def _traced(self, *values: Any) -> list[Any]:
        """Results, then residuals; the structures are left in attributes."""
        if not self.wanted:
            return self._call(values)

        def of_wanted(*primals: Any) -> tuple[list[Any], list[Any]]:
            full = list(values)
            for i, primal in zip(self.wanted, primals, strict=True):
                full[i] = primal
            arrays = self._call(full)
            self.differentiable = tuple(jnp.issubdtype(array.dtype, jnp.inexact) for array in arrays)
            return list(compress(arrays, self.differentiable)), list(compress(arrays, map(not_, self.differentiable)))

        floats, pullback, others = jax.vjp(of_wanted, *[values[i] for i in self.wanted], has_aux=True)
        floats, others = iter(floats), iter(others)
        results = [next(floats) if is_float else next(others) for is_float in self.differentiable]
        residuals, self._pullback = tree_util.tree_flatten(pullback)
        self._keys = tuple(_key_impl(residual) for residual in residuals)
        return results + [
            residual if impl is None else jax.random.key_data(residual)
            for residual, impl in zip(residuals, self._keys, strict=True)
        ]

    def _call(self, values: Sequence[Any]) -> list[Any]:
        """The arrays that the function returns; what else it returns is the same for every call of this program."""
        args, kwargs = self._recipe.arguments(values)
        leaves, self.out_tree = tree_util.tree_flatten(self._fn(*args, **kwargs))
        self.results = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS))
        self.static_results = tuple(None if isinstance(leaf, _ARRAYS) else leaf for leaf in leaves)
        return [jnp.asarray(leaves[i]) for i in self.results]

    def _find_residuals(self, closed: Any) -> list[int]:
        """Which outputs to compute: all results, and the residuals that exist nowhere else."""
        jaxpr, count = closed.jaxpr, len(self.results)
        known: dict[int, Saved] = {}
        for kind, variables in (("result", jaxpr.outvars[:count]), ("value", jaxpr.invars)):
            known |= {id(variable): Saved(kind, i) for i, variable in enumerate(variables)}
        for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            known[id(variable)] = Saved("constant", len(self.constants))
            self.constants.append(constant)
        kept, saved = list(range(count)), []
        for place, variable in enumerate(jaxpr.outvars[count:], count):
            if id(variable) not in known:
                known[id(variable)] = Saved("residual", len(kept) - count)
                kept.append(place)
            saved.append(known[id(variable)])
        self.saved: tuple[Saved, ...] = tuple(saved)
        return kept

    def backward(self, residuals: list[Any], cotangents: list[Any]) -> list[jax.Array]:
        """Gradients of the wanted values; a cotangent of None is zero, and results without one are left out."""
        given = tuple(cotangent is not None for cotangent in cotangents)
        present = [cotangent for cotangent in cotangents if cotangent is not None]
        with x64_scope(self.x64):
            run = self._backward.get(given)
            if run is None:
                run = self._compile_backward(given, residuals, present)
            return run(residuals, present)

    def _compile_backward(self, given: tuple[bool, ...], residuals: list[Any], present: list[Any]) -> Any:
        def pull(residuals: list[Any], present: list[Any]) -> list[jax.Array]:
            residuals = [
                residual if impl is None else jax.random.wrap_key_data(residual, impl=impl)
                for residual, impl in zip(residuals, self._keys, strict=True)
            ]
            pullback, given_ones = tree_util.tree_unflatten(self._pullback, residuals), iter(present)
            # torch's gradient of a complex number is the conjugate of JAX's.
            cotangents = [
                jnp.conj(next(given_ones)) if is_given else jnp.zeros(shape, dtype)
                for is_given, (shape, dtype) in zip(given, compress(self.shapes, self.differentiable), strict=True)
            ]
            return [jnp.conj(gradient) for gradient in pullback(cotangents)]

        with self._lock:
            if given not in self._backward:
                with jax.default_device(self.where.jax_device):
                    self._backward[given] = _compiled(pull, residuals, present)
            return self._backward[given]


def _compiled(function: Callable, *values: Any) -> Any:
    # An argument that nothing reads may be the one that makes the program wait for the caller's stream.
    return jax.jit(function, keep_unused=True).lower(*values).compile()


def _key_impl(array: Any) -> Any:
    """The generator of a typed PRNG key, which cannot cross as such; None for other arrays."""
    return jax.random.key_impl(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else None


def _picked(function: Callable, kept: list[int]) -> Callable:
    def picked(*values: Any) -> list[Any]:
        outputs = function(*values)
        return [outputs[i] for i in kept]

    return picked


class ProgramCache:
    """The least recently used programs go first; a program in a live autograd graph stays with the graph."""

    def __init__(self, maxsize: int) -> None:
        if maxsize < 1:
            raise ValueError(f"maxsize: expected at least 1 program, given {maxsize}")
        self.maxsize = maxsize
        self._programs: dict[Hashable, Program] = {}
        self._hits = self._misses = 0
        self._lock = threading.RLock()

    def find(self, key: Hashable) -> Program | None:
        # A stamp costs one hash of the key; moving it to a list's end would cost a second one.
        program = self._programs.get(key)
        if program is not None:
            self._hits += 1
            program.stamp = self._hits + self._misses
        return program

    def add(self, key: Hashable, build: Callable[[], Program]) -> Program:
        """The program that `build` makes, or the one that another thread made meanwhile."""
        with self._lock:
            program = self.find(key)
            if program is None:
                program = build()
                self._misses += 1
                program.stamp = self._hits + self._misses
                while len(self._programs) >= self.maxsize:
                    del self._programs[min(self._programs, key=lambda other: self._programs[other].stamp)]
                self._programs[key] = program
            return program

    def info(self) -> CacheInfo:
        return CacheInfo(self._hits, self._misses, self.maxsize, len(self._programs))

    def clear(self) -> None:
        with self._lock:
            self._programs.clear()
            self._hits = self._misses = 0
