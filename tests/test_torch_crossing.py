"""What crosses between torch and JAX: dtypes, layouts, shared memory, and refusals by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridge import dlpack, torch_call  # noqa: E402
from tests.bridge_harness import close, crossings, gradients, seed  # noqa: E402, F401

X64 = {torch.float64, torch.int64, torch.uint64, torch.complex128}


def sample(dtype):
    if dtype == torch.bool:
        return torch.arange(24) % 3 == 0
    values = torch.arange(24, dtype=torch.float32)
    return values.to(dtype) if dtype.itemsize > 1 or not dtype.is_floating_point else (values % 5).to(dtype)


@pytest.mark.parametrize("dtype", sorted(dlpack.WIDE, key=str), ids=str)
def test_both_directions_share_memory(dtype):
    x = sample(dtype)
    with jax.enable_x64(dtype in X64), crossings() as seen:
        results = torch_call(lambda x: (x, x.reshape(4, 6)), x)
    assert [result.dtype for result in results] == [dtype, dtype]
    for result in results:
        assert torch.equal(result.flatten().view(torch.uint8), x.view(torch.uint8))
    assert [tensor == array for tensor, array in seen["in"] + seen["out"]] == [True] * 3


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_permuted_tensors_share_memory(order):
    x = torch.randn(2, 3, 4).permute(order)
    with crossings() as seen:
        y = torch_call(lambda x: x * 2, x)
    close(y, x * 2)
    assert y.is_contiguous()
    assert seen["in"][0] == (x.data_ptr(), x.data_ptr())


def test_singleton_dimensions_share_memory():
    for x in (torch.randn(4, 1, 3), torch.randn(3, 4).t()[None], torch.randn(5, 2)[:, :1].contiguous()):
        with crossings() as seen:
            close(torch_call(lambda x: x + 1, x), x + 1)
        assert all(tensor == array for tensor, array in seen["in"])


STRIDED = {
    "sliced": lambda: torch.randn(4, 6)[:, 1:4],
    "stepped": lambda: torch.randn(12)[::3],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "scalar expanded": lambda: torch.tensor(2.0).expand(3, 4),
    "misaligned": lambda: torch.randn(13)[1:],
    "flipped": lambda: torch.randn(4).flip(0),
}


@pytest.mark.parametrize("name", STRIDED)
def test_other_strides_are_copied_once(name):
    x = STRIDED[name]().requires_grad_()
    with crossings() as seen:
        y = torch_call(lambda x: jnp.sin(x) * x, x)
        y.sum().backward()
    inputs = {tensor for tensor, _ in seen["in"][:1]}
    assert all(tensor == array for tensor, array in seen["in"])
    if name != "flipped":
        assert x.data_ptr() not in inputs
    assert inputs < {tensor for tensor, _ in seen["in"][1:]}  # the backward pass reads the same copy
    close(x.grad, gradients(lambda x: torch.sin(x) * x, x)[0])
    assert x.grad.shape == x.shape


def test_conjugate_and_negative_views_are_resolved():
    z = torch.randn(4, dtype=torch.complex64)
    close(torch_call(lambda z: z * 2, z.conj()), z.conj().resolve_conj() * 2)
    negative = z.conj().imag
    assert negative.is_neg()
    close(torch_call(lambda x: x * 2, negative), -2 * z.imag)
    close(torch_call(lambda x: x * 2, torch._neg_view(torch.ones(3))), torch.full((3,), -2.0))


def test_the_wider_unsigned_integers_are_narrowed():
    x = torch.tensor([0, 2**32 - 1], dtype=torch.uint64)
    assert torch_call(lambda x: x, x).dtype == torch.uint32
    assert torch_call(lambda x: x, x).tolist() == x.tolist()
    with pytest.raises(ValueError, match=r"x: .*uint64"):
        torch_call(lambda x: x, torch.tensor([2**32], dtype=torch.uint64))
    with pytest.raises(ValueError, match=r"x: .*uint64"):
        torch_call(lambda x: x, torch.tensor([2**63], dtype=torch.uint64))


def test_numpy_arrays_follow_the_same_rules():
    x = torch.zeros(1)
    assert torch_call(lambda x, n: n, x, np.array([5])).dtype == torch.int32
    with pytest.raises(ValueError, match=r"n: .*int64"):
        torch_call(lambda x, n: n, x, np.array([2**31]))
    with pytest.raises(ValueError, match=r"n: .*float64"):
        torch_call(lambda x, n: n, x, np.array([0.5]))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of these kinds prototypes, or deprecated
def refused():
    dense = torch.ones(2, 2)
    with torch.device("meta"):
        meta = torch.ones(2, 2)
    return {
        "sparse": (dense.to_sparse(), TypeError, "sparse"),
        "csr": (dense.to_sparse_csr(), TypeError, "sparse"),
        "quantized": (torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), TypeError, "quantized"),
        "meta": (meta, TypeError, "meta"),
        "float64": (dense.double(), ValueError, "float64"),
        "complex128": (dense.to(torch.complex128), ValueError, "complex128"),
        "complex32": (dense.to(torch.complex32), TypeError, "complex32"),
        "uninitialized": (torch.nn.UninitializedParameter(), TypeError, "UninitializedParameter"),
        "fake": (fake(), TypeError, "FakeTensor"),
    }


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, 2)


KINDS = ("sparse", "csr", "quantized", "meta", "float64", "complex128", "complex32", "uninitialized", "fake")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_refusals_name_the_argument(kind):
    tensor, error, words = refused()[kind]
    good = torch.ones(2, 2)
    with pytest.raises(error, match=rf"second: .*{words}"):
        torch_call(lambda first, second: first, good, tensor)
    with pytest.raises(error, match=rf"first: .*{words}"):
        torch_call(lambda first, second: first, tensor, good)
    with pytest.raises(error, match=rf"table\['b'\]\[0\]: .*{words}"):
        torch_call(lambda first, *, table: first, good, table={"b": [tensor]})


def test_a_function_without_a_signature_is_named_by_position():
    with pytest.raises(TypeError, match=r"args\[1\]: .*sparse"):
        torch_call(functools_partial_without_signature(), torch.ones(2), torch.ones(2).to_sparse())


def functools_partial_without_signature():
    class Opaque:
        __signature__ = "none"

        def __call__(self, *args):
            return args[0]

    return Opaque()


def test_a_jax_tracer_is_refused():
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"second: .*tracer"):
        jax.jit(lambda j: torch_call(lambda first, second: first, x, j).sum().item())(jnp.ones(2))


def test_a_jax_array_elsewhere_is_refused():
    if jax.device_count() < 2:
        pytest.skip("JAX has one device")
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[1])
    with pytest.raises(ValueError, match="second: expected an array on"):
        torch_call(lambda first, second: first, torch.ones(2), elsewhere)


@pytest.mark.parametrize("failure", ["missing", "signature"])
def test_without_the_raw_functions_the_public_ones_serve(failure, monkeypatch):
    def other_signature(*args, **kwargs):
        raise TypeError("incompatible function arguments")

    replacement = None if failure == "missing" else other_signature
    monkeypatch.setattr(dlpack, "_raw_import", replacement)
    monkeypatch.setattr(dlpack, "_raw_export", replacement)
    x = torch.randn(3, requires_grad=True)
    y = torch_call(jnp.sin, x)
    y.sum().backward()
    close(x.grad, x.detach().cos())
