"""Where the host time of a call goes: each step of `torch_call` by itself, in microseconds."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import torch

from bridge import streams, wrap
from bridge.dlpack import alias, export_array, import_tensor
from bridge.invocation import Call
from bridge.program import trace_context

CALLS, SAMPLES = 50, 30


def timed(action: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Least and median of the samples, with the queue drained in between."""
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(CALLS):
            action()
        samples.append((time.perf_counter() - start) / CALLS * 1e6)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return min(samples), statistics.median(samples)


@torch.no_grad()
def breakdown(function: Callable, tensors: list[torch.Tensor]) -> list[tuple[str, float, float]]:
    """Steps with their least and median time; some exist on a GPU only."""
    device, wrapped = tensors[0].device, wrap(function)
    for _ in range(3):
        results = wrapped(*tensors)
    where: Any = streams.endpoint(device)
    (program,) = wrapped._programs._programs.values()
    call = Call(function, tuple(tensors), {})
    signature = call._prepare(where)
    key = (function, call._treedef, (), where, trace_context(), signature)
    order = where.enter()
    arrays = [where.take(tensor, order) for tensor in tensors]
    outputs = program.forward(arrays)
    jitted = jax.jit(function)
    jitted(*arrays)
    kept: list[Any] = []
    pointer = None if order is None else order.current.pointer
    steps: dict[str, Callable[[], Any]] = {
        "the whole call": lambda: wrapped(*tensors),
        "the whole call, results kept": lambda: kept.append(wrapped(*tensors)),
        "take apart": lambda: Call(function, tuple(tensors), {}),
        "check (capture)": where.check,
        "key of the leaves": lambda: call._prepare(where),
        "trace context": trace_context,
        "find the program": lambda: wrapped._programs.find(key),
        "enter": where.enter,
        "import 7, owned": lambda: [where.take(tensor, order) for tensor in tensors],
        "import 1 of them": lambda: where.take(tensors[0], order),
        "program, arguments imported before": lambda: program.forward(arrays),
        "the same by jax.jit": lambda: jitted(*arrays),
        "program, one argument imported anew (import included)": lambda: program.forward(
            [where.take(tensors[0], order), *arrays[1:]]
        ),
        "program, all imported anew (imports included)": lambda: program.forward(
            [where.take(tensor, order) for tensor in tensors]
        ),
        "export 1, no lease": lambda: export_array(outputs[0], pointer),
        "give and drop 1": lambda: where.give(outputs[0], order),
        "unflatten the results": lambda: call_results(call, program, results),
        "a torch operator (x + x)": lambda: tensors[0] + tensors[0],
    }
    if device.type == "cuda":
        steps |= cuda_steps(where, order, tensors)
    found = []
    for name, action in steps.items():
        action()
        found.append((name, *timed(action, device)))
        kept.clear()
    return found


def call_results(call: Call, program: Any, results: Any) -> Any:
    call.program = program
    return call.results(results)


def cuda_steps(where: Any, order: Any, tensors: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Steps that a CPU does not have, and those they replace."""
    event, stream, first = torch.cuda.Event(), order.current.stream, tensors[0]
    order = order._replace(idle=False)
    bare = alias(first)
    where.borrow(tensors, order)
    return {
        "borrow 7 at known addresses": lambda: where.borrow(tensors, order),
        "borrow 7 at known addresses, idle stream": lambda: where.borrow(tensors, order._replace(idle=True)),
        "borrow 1 at a known address, imported to wait": lambda: where.borrow(tensors[:1], order),
        "record_stream 1": lambda: first.record_stream(stream),
        "alias 1": lambda: alias(first),
        "raw import 1, no order": lambda: import_tensor(bare, where.jax_device, None),
        "raw import 1, ordered": lambda: import_tensor(bare, where.jax_device, where._pointer),
        "current stream, raw": where._current,
        "torch.cuda.current_stream": lambda: torch.cuda.current_stream(where.device),
        "record an event": lambda: event.record(stream),
        "make and record an event": stream.record_event,
        "wait for an event": lambda: where._ready.wait_event(event),
        "ask an event": event.query,
        "ask a stream": stream.query,
        "release what was dropped": where.collect,
    }
