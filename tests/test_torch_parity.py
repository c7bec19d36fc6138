"""jax_ssd.chunk_scan and its gradients through torch_call, against a token-by-token scan in PyTorch and float64."""

from typing import Any

import pytest

from jax_ssd import chunk_scan
from tests.tolerances import check

torch = pytest.importorskip("torch")

from bridge import torch_call  # noqa: E402
from tests import torch_oracle  # noqa: E402

HEADS, HEADDIM, GROUPS, DSTATE = 4, 16, 2, 8
SEQUENCES = [0, 5, 5, 30, 37]


def tensors(lead, num_states, dtype, *, seed=0):
    """Every floating-point argument of a scan whose token axes are `lead`."""
    torch.manual_seed(seed)
    return dict(
        x=torch.randn(*lead, HEADS, HEADDIM).to(dtype),
        dt=torch.randn(*lead, HEADS).to(dtype),
        A=-torch.rand(HEADS),
        B=torch.randn(*lead, GROUPS, DSTATE).to(dtype),
        C=torch.randn(*lead, GROUPS, DSTATE).to(dtype),
        D=torch.randn(HEADS),
        z=torch.randn(*lead, HEADS, HEADDIM).to(dtype),
        dt_bias=torch.randn(HEADS) - 1.0,
        initial_states=torch.randn(num_states, HEADS, HEADDIM, DSTATE),
    )


def batched(dtype):
    return tensors((2, 37), 2, dtype), {}


def documents(dtype):
    seq_idx = torch.tensor([[0] * 10 + [1] * 20 + [2] * 7, [3] * 37], dtype=torch.int32)
    return tensors((2, 37), 2, dtype), dict(seq_idx=seq_idx)


def packed(dtype):
    cu_seqlens = torch.tensor(SEQUENCES, dtype=torch.int32)
    positions = torch.tensor([0, 17, 36, -1, 4], dtype=torch.int32)
    values = tensors((40,), len(SEQUENCES) - 1, dtype)  # three tokens belong to nobody
    return values, dict(cu_seqlens=cu_seqlens, checkpoint_positions=positions)


def run(function, inputs) -> tuple[list[Any], dict[str, Any]]:
    """(results, argument tensors by name)."""
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    return [result for result in function(**leaves)[:3] if isinstance(result, torch.Tensor)], leaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", [batched, documents, packed])
def test_scan_and_gradients_equal_the_float64_scan(form, dtype):
    inputs, integers = form(dtype)
    options = dict(dt_softplus=True, dt_limit=(0.01, 2.0), **integers)
    found, leaves = run(lambda **leaves: torch_call(chunk_scan, **leaves, **options), inputs)
    wide = {name: value.double() for name, value in inputs.items()}
    expected, wide_leaves = run(lambda **leaves: torch_oracle.chunk_scan(**leaves, **options), wide)
    cotangents = [torch.randn(result.shape).to(result.dtype) for result in found]
    torch.autograd.backward(found, cotangents)
    torch.autograd.backward(expected, [cotangent.double() for cotangent in cotangents])
    name = str(dtype).removeprefix("torch.")
    for i, kind in enumerate(("value", "state", "state")[: len(found)]):
        check(found[i].detach().float(), expected[i].detach(), name, kind)
    for argument, leaf in leaves.items():
        assert leaf.grad.dtype == inputs[argument].dtype
        check(leaf.grad.float(), wide_leaves[argument].grad, name, "gradient", name=argument)
