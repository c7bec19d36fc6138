"""Other scans on the rows of the speed table: for a row, a function of its arrays that gives (y, final states)."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.scan_rows import Row

Tensors = dict[str, torch.Tensor]


def vllm_triton(row: Row, chunk: int) -> Callable[[Tensors], Any]:
    """vLLM's five launches; its chunk tables are made beforehand, as vLLM makes them once a step."""
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    bounds, last, seq_idx, position = [0], [], [], 0
    for seq, length in enumerate(row.seqlens):
        for start in range(0, length, chunk):
            bounds.append(position + min(start + chunk, length))
            seq_idx.append(seq)
        position += length
        last.append(len(bounds) - 2)
    tables = [torch.tensor(table, dtype=torch.int32, device="cuda") for table in (bounds, last, seq_idx)]

    def call(arrays: Tensors) -> Any:
        out = torch.empty_like(arrays["x"])
        final = mamba_chunk_scan_combined_varlen(
            arrays["x"], arrays["dt"], arrays["A"], arrays["B"], arrays["C"], chunk, arrays["cu_seqlens"], *tables, out,
            state_dtype=torch.float32,
        )  # fmt: skip
        return out, final

    return call


def mamba_ssm(row: Row, chunk: int) -> Callable[[Tensors], Any]:
    """mamba_ssm's Triton scan; equal lengths go in as a batch."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    batch = len(row.seqlens)

    def call(arrays: Tensors) -> Any:
        x, dt, B, C = (arrays[name].unflatten(0, (batch, -1)) for name in ("x", "dt", "B", "C"))
        with torch.no_grad():
            y, final = mamba_chunk_scan_combined(x, dt, arrays["A"], B, C, chunk, return_final_states=True)
        return y.flatten(0, 1), final

    return call


# Name, chunk size; the faster of vLLM's two counts.
TORCH_PEERS = (("vllm_triton", 128), ("vllm_triton", 256), ("mamba_ssm", 256))
_TORCH = {"vllm_triton": vllm_triton, "mamba_ssm": mamba_ssm}


def torch_peer(name: str, chunk: int, row: Row) -> Callable[[Tensors], Any]:
    return _TORCH[name](row, chunk)


class Candidate(NamedTuple):
    """A peer on a row, with the `pick`-th configuration of each of its autotuned kernels."""

    name: str
    chunk: int
    row: Row
    pick: int


MOST_CONFIGURATIONS = {"vllm_triton": 23, "mamba_ssm": 11}
_every: dict[int, list[Any]] = {}


def _autotuners() -> Iterator[Any]:
    seen = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith(("vllm.", "mamba_ssm.")):
            continue
        for kernel in list(vars(module).values()):
            while hasattr(kernel, "fn") and not hasattr(kernel, "configs"):
                kernel = kernel.fn
            if hasattr(kernel, "configs") and hasattr(kernel, "fn") and id(kernel) not in seen:
                seen.add(id(kernel))
                yield kernel


def compile_candidate(candidate: Candidate) -> str | None:
    """In a process of its own: run a peer once with given configurations, which leaves them in Triton's disk cache."""
    try:
        call = torch_peer(candidate.name, candidate.chunk, candidate.row)
        for kernel in _autotuners():
            configurations = _every.setdefault(id(kernel), kernel.configs)
            kernel.configs = [configurations[candidate.pick % len(configurations)]]
            kernel.cache.clear()
        _forget_choices()
        call(candidate.row.arrays())
        torch.cuda.synchronize()
    except Exception as fault:  # some configurations need more than the GPU has
        return f"{candidate.name}: {type(fault).__name__}: {fault}"[:120]
    return None


def _forget_choices() -> None:
    """vLLM keeps configurations in a table of its own."""
    helpers = sys.modules.get("vllm.model_executor.layers.mamba.ops.triton_helpers")
    if helpers is not None:
        vars(helpers)["_autotuned_configs"].clear()


# JAX.


def jax_linear_attention(row: Row) -> Callable[..., Any]:
    """jla's simple_gla with q = C, k = B, v = dt x, g = dt A."""
    import jax.numpy as jnp
    from jla.ops import linear_attention

    batch = len(row.seqlens)

    def call(x: Any, dt: Any, A: Any, B: Any, C: Any, cu_seqlens: Any) -> Any:
        x, dt, B, C = (value.reshape(batch, -1, *value.shape[1:]) for value in (x, dt, B, C))
        step = dt.astype(jnp.float32)
        v = (x * step[..., None]).astype(x.dtype)
        y, final = linear_attention("simple_gla", C, B, v, g=step * A, scale=1.0, output_final_state=True)
        return y.reshape(-1, *y.shape[2:]), jnp.swapaxes(final.astype(jnp.float32), -1, -2)

    return call


def _own(implementation: str) -> Callable[[Row], Callable[..., Any]]:
    def peer(row: Row) -> Callable[..., Any]:
        import jax_ssd

        def call(x: Any, dt: Any, A: Any, B: Any, C: Any, cu_seqlens: Any) -> Any:
            result = jax_ssd.chunk_scan(x, dt, A, B, C, cu_seqlens=cu_seqlens, implementation=implementation)
            return result.y, result.final_states

        return call

    return peer


JAX_PEERS = {"jax_linear_attention": jax_linear_attention, "jax_triton": _own("triton"), "jax_xla": _own("xla")}
_NAMES = ("x", "dt", "A", "B", "C", "cu_seqlens")


class Program(NamedTuple):
    """A compiled JAX program that serves some sets of inputs, one after another."""

    run: Callable[..., Any]
    num_sets: int


def jax_program(name: str, row: Row, num_sets: int) -> tuple[Callable[[], Any], int]:
    """What compiles a peer, and the sets of inputs that it will serve; plain XLA, which is slow, has one."""
    import jax

    num_sets = 1 if name == "jax_xla" else num_sets
    function = JAX_PEERS[name](row)
    small = {name: _shape(value) for name, value in row.arrays().items()}
    inputs = [[small[name] for name in _NAMES] for _ in range(num_sets)]
    every = jax.jit(lambda sets: [function(*one) for one in sets])
    return every.lower(inputs).compile, num_sets


def _shape(value: torch.Tensor) -> Any:
    import jax

    return jax.ShapeDtypeStruct(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def loop_time(program: Program, sets: list[Tensors], rounds: int = 10) -> tuple[float, Any]:
    """Median microseconds of a call, one dispatch after another, and the first set's (y, final states)."""
    import jax

    inputs = [[jax.dlpack.from_dlpack(arrays[name]) for name in _NAMES] for arrays in sets[: program.num_sets]]
    results = jax.block_until_ready(program.run(inputs))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(rounds):
            results = program.run(inputs)
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) * 1e6 / rounds / program.num_sets)
    return statistics.median(times), tuple(torch.from_dlpack(value) for value in results[0])
