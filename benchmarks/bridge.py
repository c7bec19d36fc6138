"""Host time of calling JAX from PyTorch: bridge.torch_call, the public DLPack functions, jax2torch and torchax.

    python -m benchmarks.bridge [--device cpu|cuda] [--output FILE] [--breakdown]

Every path first has to give the right result and gradients; one that is missing or wrong gets its reason instead of a
figure. Paths take turns, so that a busy moment hits all of them. On a GPU the queue is drained between samples and not
within one: the figure is what the host pays to issue a call. `--breakdown` times the steps of a call instead.
"""

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# JAX would leave torch a quarter of a GPU; read when JAX first looks for devices.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.dlpack
import jax.numpy as jnp
import torch

from benchmarks.bridge_steps import breakdown
from bridge import torch_call, wrap
from bridge.streams import endpoint

ROOT = Path(__file__).parents[1]
CALLS, SAMPLES, WARM = 50, 60, 3
SECONDS = 6.0  # a case stops sampling then
BUSY = 200_000_000  # cycles, some 110 ms: more than a sample takes
SHAPE = (8, 8)
FIGURES = "{median_us:9.1f} median {least_us:9.1f} least {to_public:7.3f} of public"


def two_of_seven(a, b, c, d, e, f, g):
    """Seven arrays in, two out, and next to no work between."""
    return a + b * c, d * e + f * g


class Route(NamedTuple):
    name: str
    make: Callable[[], Callable]


class Case(NamedTuple):
    """Calls on the same tensors, while a GPU is idle but for them.

    `unseen`: on tensors at addresses that the bridge has not met. `busy`: behind work that outlasts the sample.
    """

    name: str
    parameters: int = 0
    backward: bool = False
    unseen: bool = False
    busy: bool = False


CASES = (
    Case("7 in, 2 out"),
    Case("7 in, 2 out, behind other work", busy=True),
    Case("7 in (4 parameters), 2 out", parameters=4),
    Case("7 in at new addresses, 2 out", unseen=True),
    Case("7 in, 2 out, and backward", backward=True),
)


def ours() -> Callable:
    return lambda *tensors: torch_call(two_of_seven, *tensors)


def ours_wrapped() -> Callable:
    return wrap(two_of_seven)


def public() -> Callable:
    """The public functions, with compiled forward and backward passes: the best that a user writes by hand."""
    forward = jax.jit(two_of_seven)
    forward_vjp = jax.jit(lambda *arrays: jax.vjp(two_of_seven, *arrays))
    pull = jax.jit(lambda pullback, cotangents: pullback(cotangents))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results, ctx.pullback = forward_vjp(*(jax.dlpack.from_dlpack(one.detach()) for one in tensors))
            return tuple(torch.from_dlpack(one) for one in results)

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            arrays = tuple(jax.dlpack.from_dlpack(one.contiguous()) for one in cotangents)
            return tuple(torch.from_dlpack(one) for one in pull(ctx.pullback, arrays))

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            return Function.apply(*tensors)
        results = forward(*(jax.dlpack.from_dlpack(one.detach()) for one in tensors))
        return tuple(torch.from_dlpack(one) for one in results)

    return call


def jax2torch() -> Callable:
    from jax2torch import jax2torch as convert

    return convert(two_of_seven)


def torchax() -> Callable:
    from torchax import interop
    from torchax.ops import mappings

    jitted = jax.jit(two_of_seven)

    def through_numpy_or_dlpack(fn: Callable, *tensors: torch.Tensor) -> Any:
        results = fn(*(mappings.t2j(one.detach()) for one in tensors))
        return jax.tree.map(mappings.j2t, results)

    differentiable = interop.j2t_autograd(jitted, call_jax=through_numpy_or_dlpack)

    def call(*tensors: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
            return differentiable(*tensors)
        return through_numpy_or_dlpack(jitted, *tensors)

    return call


ROUTES = (
    Route("public DLPack", public),
    Route("torch_call", ours),
    Route("wrap", ours_wrapped),
    Route("jax2torch", jax2torch),
    Route("torchax", torchax),
)


def tensors_of(case: Case, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(SHAPE, device=device) for _ in range(7)]
    for i in range(case.parameters):
        tensors[i] = torch.nn.Parameter(tensors[i], requires_grad=False)
    return [one.requires_grad_() for one in tensors] if case.backward else tensors


def action_of(call: Callable, case: Case, tensors: list[torch.Tensor]) -> Callable[[], Any]:
    if case.unseen:
        several = itertools.cycle([[one.clone() for one in tensors] for _ in range(CALLS)])
        return lambda: call(*next(several))
    if not case.backward:
        return lambda: call(*tensors)
    cotangents = [torch.ones(SHAPE, device=tensors[0].device) for _ in range(2)]
    return lambda: torch.autograd.grad(call(*tensors), tensors, cotangents)


def wrong(call: Callable, case: Case, device: str) -> str | None:
    """Why a path gets no figure, or None; fresh tensors, so that nothing kept from an earlier call helps."""
    tensors = tensors_of(case, device)
    try:
        results = action_of(call, case, tensors)()
        expected = action_of(two_of_seven, case, tensors)()
        torch.testing.assert_close(list(results), list(expected))
    except Exception as error:  # whatever a peer raises is its reason
        return said(error)
    return None


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def measure(actions: dict[str, Callable[[], Any]], case: Case, device: str) -> dict[str, list[float]]:
    """Microseconds a call, one figure a sample, the paths taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in actions}
    where, began = endpoint(torch.device(device, 0) if device == "cuda" else torch.device(device)), time.perf_counter()
    for i in range(SAMPLES + WARM):
        for name, action in actions.items():
            if case.unseen:
                where.forget()
            if case.busy and device == "cuda":
                torch.cuda._sleep(BUSY)
            start = time.perf_counter()
            for _ in range(CALLS):
                action()
            elapsed = (time.perf_counter() - start) / CALLS * 1e6
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= WARM:
                samples[name].append(elapsed)
        if i > WARM and time.perf_counter() - began > SECONDS:
            break
    return samples


def run(case: Case, device: str) -> list[dict[str, Any]]:
    actions, rows = {}, []
    for route in ROUTES:
        try:
            call = route.make()
        except ModuleNotFoundError as error:
            rows.append({"path": route.name, "reason": f"not installed ({error.name})"})
            continue
        except Exception as error:  # a peer that does not start with this torch or JAX
            rows.append({"path": route.name, "reason": said(error)})
            continue
        reason = wrong(call, case, device)
        if reason is None:
            actions[route.name] = action_of(call, case, tensors_of(case, device))
        else:
            rows.append({"path": route.name, "reason": reason})
    samples = measure(actions, case, device)
    base = statistics.median(samples["public DLPack"]) if "public DLPack" in samples else None
    measured = [
        {
            "path": name,
            "median_us": round(statistics.median(values), 1),
            "least_us": round(min(values), 1),
            "to_public": round(statistics.median(values) / base, 3) if base else None,
        }
        for name, values in samples.items()
    ]
    return measured + rows


def context(device: str) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "jax": jax.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--breakdown", action="store_true")
    arguments = parser.parse_args()
    if arguments.breakdown:
        for step, least, median in breakdown(two_of_seven, tensors_of(CASES[0], arguments.device)):
            print(f"  {step:58s} {least:8.2f} least {median:8.2f} median")
        return
    output = arguments.output or ROOT / "benchmarks" / "results" / f"bridge_{arguments.device}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    jnp.zeros(1).block_until_ready()
    where = context(arguments.device)
    with output.open("w") as lines:
        for case in CASES:
            print(f"\n{case.name} (host microseconds a call, {where['device']})")
            for row in run(case, arguments.device):
                lines.write(json.dumps({"case": case.name, **row, **where}) + "\n")
                text = row.get("reason") or FIGURES.format(**row)
                print(f"  {row['path']:14s} {text}")
    print(f"\nwritten to {output}")


if __name__ == "__main__":
    main()
