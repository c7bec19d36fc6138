"""Failures that users of other bridges met (C30 to C37), with right values."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ssd import chunk_scan
from tests.tolerances import check

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge import torch_call  # noqa: E402
from bridge.streams import endpoint, starvation  # noqa: E402
from tests import bridge_harness, torch_oracle  # noqa: E402, F401

ROOT = Path(__file__).parents[1]


def problem(device="cpu", *, num_tokens=13, headdim=4, dstate=8, seed=0):
    """Packed x, dt, A, B, C of two heads and one group."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 2, headdim, generator=generator)
    dt = 0.5 * torch.rand(num_tokens, 2, generator=generator)
    A = -torch.rand(2, generator=generator)
    B, C = torch.randn(2, num_tokens, 1, dstate, generator=generator)
    return [one.to(device) for one in (x, dt, A, B, C)]


def whole(tensors):
    """cu_seqlens of one sequence."""
    return torch.tensor([0, len(tensors[0])], dtype=torch.int32, device=tensors[0].device)


def scan(*tensors, **options):
    return torch_call(chunk_scan, *tensors, implementation="xla", **options)


def sliced(tensor):
    """The same values as columns of a wider tensor."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan)
    wide[..., 1:-2] = tensor
    return wide[..., 1:-2]


def permuted(tensor):
    order = tuple(range(tensor.ndim))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def expanded(tensor):
    return tensor[:1].expand(tensor.shape)


@pytest.mark.parametrize("view", [sliced, permuted, expanded])
def test_c30_strided_import_equals_the_contiguous_one(view):
    tensors, cu = problem(), torch.tensor([0, 5, 13], dtype=torch.int32)
    strided = [view(tensor).requires_grad_() for tensor in tensors]
    copies = [tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for tensor in strided]
    results, expected = scan(*strided, cu_seqlens=cu), scan(*copies, cu_seqlens=cu)
    results.y.square().sum().backward()
    expected.y.square().sum().backward()
    for result, other in zip(results[:2], expected[:2], strict=True):
        assert torch.equal(result, other)
    for tensor, copy in zip(strided, copies, strict=True):
        assert tensor.grad.shape == tensor.shape
        assert torch.equal(tensor.grad, copy.grad)


def test_c32_int64_cu_seqlens_are_those_of_int32():
    tensors, cu = problem(), torch.tensor([0, 5, 13])
    assert cu.dtype == torch.int64
    for wide, narrow in zip(scan(*tensors, cu_seqlens=cu)[:2], scan(*tensors, cu_seqlens=cu.int())[:2], strict=True):
        assert torch.equal(wide, narrow)


@pytest.mark.parametrize("value", [2**31 + 1, 2**31, -(2**31) - 1, 2**32 + 5])
def test_c32_int64_that_does_not_fit_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"cu_seqlens: .*int64"):
        scan(*problem(), cu_seqlens=torch.tensor([0, 5, value]))
    with pytest.raises(ValueError, match=r"data: .*int64"):
        torch_call(lambda data: data + 1, torch.tensor([value]))


def test_c32_int64_at_the_limits_passes():
    limits = torch.tensor([2**31 - 1, -(2**31)])
    assert torch_call(lambda data: data ^ jnp.int32(0), limits).tolist() == limits.tolist()


def test_c32_with_x64_int64_passes_whole():
    with jax.enable_x64(True):
        result = torch_call(lambda data: data + jnp.int64(1), torch.tensor([2**31 + 1]))
    assert result.dtype == torch.int64 and result.item() == 2**31 + 2


def resident():
    """Bytes of the process that are in memory."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live(device="cpu"):
    """Bytes held by torch (on a GPU) and by JAX arrays, those that only point at torch's memory left out."""
    gc.collect()
    endpoint(torch.device(device, 0) if device == "cuda" else torch.device(device)).forget()
    if device == "cuda":
        torch.cuda.synchronize()
        bridge.collect()
    torch_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
    return torch_bytes, sum(array.nbytes for array in jax.live_arrays())


def refused(device):
    """Calls that are refused at their second tensor, after the first was found good."""
    kept = torch.zeros(1 << 12, device=device)
    for bad in (
        kept.double(),
        kept.to_sparse(),
        kept.to(torch.complex128),
        torch.full((1 << 11,), 2**31 + 1, device=device),
        torch.zeros(4, device="meta"),
    ):
        with pytest.raises((TypeError, ValueError)):
            torch_call(jnp.add, kept, bad)
    with pytest.raises(TypeError, match="float32"):  # a float8 tensor crosses, and the function refuses it
        torch_call(jax.lax.add, kept.to(torch.float8_e4m3fn), kept)


def empty(device):
    x, dt, A, B, C = problem(device)
    cu = torch.zeros(2, dtype=torch.int32, device=device)
    result = scan(x[:0], dt[:0], A, B[:0], C[:0], cu_seqlens=cu)
    assert result.y.shape == (0, 2, 4) and not result.final_states.any()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("action", "rounds"), [(refused, 170), (empty, 1000)], ids=["refused", "empty"])
def test_c36_refused_and_empty_calls_leave_memory_flat(action, rounds, device):
    for _ in range(rounds // 10):
        action(device)
    before, resident_before = live(device), resident()
    for _ in range(rounds):
        action(device)
    assert live(device) == before
    assert resident() - resident_before < 16 * 2**20


@pytest.mark.parametrize(("device", "rounds"), [("cpu", 3), pytest.param("cuda", 200, marks=pytest.mark.gpu)])
def test_c31_overwriting_an_input_at_once_never_changes_the_result(device, rounds):
    tensors = problem(device, num_tokens=2048, headdim=64, dstate=64)
    cu = whole(tensors)
    expected = scan(*tensors, cu_seqlens=cu).y
    assert expected.isfinite().all()
    for _ in range(rounds):
        x = tensors[0].clone()
        y = scan(x, *tensors[1:], cu_seqlens=cu).y
        x.fill_(torch.nan)
        check(y.cpu(), expected.cpu(), "float32", "value")


@pytest.mark.parametrize(("device", "rounds"), [("cpu", 3), pytest.param("cuda", 200, marks=pytest.mark.gpu)])
def test_c31_the_backward_pass_is_right_or_refused(device, rounds):
    tensors = problem(device, num_tokens=2048, headdim=64, dstate=64)
    cu = whole(tensors)
    weight = tensors[2].clone().requires_grad_()
    scan(*tensors[:2], weight, *tensors[3:], cu_seqlens=cu).y.sum().backward()
    expected = weight.grad.clone()
    assert expected.isfinite().all()
    for _ in range(rounds):
        weight.grad = None
        x = tensors[0].clone()
        y = scan(x, tensors[1], weight, *tensors[3:], cu_seqlens=cu).y
        x.fill_(torch.nan)
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert weight.grad is not None
            check(weight.grad.cpu(), expected.cpu(), "float32", "gradient")


@pytest.mark.parametrize(("device", "rounds"), [("cpu", 200), pytest.param("cuda", 1000, marks=pytest.mark.gpu)])
def test_c33_nothing_is_remembered_by_identity(device, rounds):
    """Random lengths; tensors are freed in between, so that their addresses come back with other contents."""
    rng = np.random.default_rng(0)
    for seed in range(rounds):
        tensors = problem(device, num_tokens=24, seed=seed)
        ends = sorted(rng.integers(0, 25, 2).tolist())
        cu = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        result = scan(*tensors, cu_seqlens=cu)
        expected = torch_oracle.chunk_scan(*tensors, cu_seqlens=cu)
        check(result.y.cpu(), expected[0].cpu(), "float32", "value")
        check(result.final_states.cpu(), expected[1].cpu(), "float32", "state")


@pytest.mark.multi_gpu
def test_c34_the_tensors_device_decides_not_the_current_one():
    first, second = problem("cuda:0"), problem("cuda:1")
    assert torch.cuda.current_device() == 0
    expected, results = scan(*first, cu_seqlens=whole(first)), scan(*second, cu_seqlens=whole(second))
    for result, other in zip(results[:2], expected[:2], strict=True):
        assert result.device == torch.device("cuda", 1)
        assert torch.equal(result.cpu(), other.cpu())
    with pytest.raises(ValueError, match=r"B: .*cuda:1.*cuda:0"):
        scan(*second[:3], first[3], second[4], cu_seqlens=whole(second))


@pytest.mark.gpu
def test_c35_capture_is_refused_and_the_stream_stays_usable():
    tensors = problem("cuda")
    cu = whole(tensors)
    expected = scan(*tensors, cu_seqlens=cu).y
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        doubled = x * 2
        with pytest.raises(NotImplementedError, match="CUDA graph"):
            scan(*tensors, cu_seqlens=cu)
    x.fill_(3.0)
    graph.replay()
    assert doubled.eq(6.0).all()
    assert torch.equal(scan(*tensors, cu_seqlens=cu).y, expected)


_BOTH_FRAMEWORKS = """
import torch, warnings
warnings.filterwarnings("error", message="cuda")
free, total = torch.cuda.mem_get_info()
held = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
import jax.numpy as jnp
from bridge import torch_call
x = torch.ones(1 << 20, device="cuda")
assert torch_call(lambda x: x + 1, x).eq(2).all()
more = torch.empty(total // 8, dtype=torch.uint8, device="cuda")
ones = jnp.ones((total // 64,))  # a sixteenth of the device; autotuning its sum takes as much again
assert float(ones.sum()) > 0 and torch_call(lambda x: x + 1, x).eq(2).all()
assert held.nbytes + more.nbytes + ones.nbytes > 0.6 * total
"""


@pytest.mark.gpu
def test_c37_with_preallocation_off_both_frameworks_work():
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run([sys.executable, "-c", _BOTH_FRAMEWORKS], check=True, env=environment, cwd=ROOT)


def test_c37_starvation_is_noticed():
    gib = 2**30
    assert starvation(80 * gib, free=80 * gib, torch_pool=0, jax_pool=0) is None
    assert starvation(80 * gib, free=39 * gib, torch_pool=40 * gib, jax_pool=gib) is None
    assert "torch can reach 20.0 of 80.0 GiB" in str(
        starvation(80 * gib, free=20 * gib, torch_pool=0, jax_pool=60 * gib)
    )
    assert "JAX can reach" in str(starvation(80 * gib, free=10 * gib, torch_pool=70 * gib, jax_pool=0))
