"""What crosses between torch and JAX, and how: dtype, layout and device rules, and the raw DLPack capsules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.dlpack
import torch
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from torch._C import _from_dlpack, _to_dlpack

# Bytes. XLA copies a CPU buffer below this alignment, and fails at launch on a CUDA one.
ALIGNMENT = {"cpu": 64, "cuda": 16}

_DISPATCH = "__torch_dispatch__"
_NAMES = """bool int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32 complex64
float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"""
NARROW = frozenset(getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name))
NARROWED = {torch.int64: torch.int32, torch.uint64: torch.uint32}
WIDE = NARROW | {torch.int64, torch.uint64, torch.float64, torch.complex128}

_SIMPLE = frozenset(dtype for dtype in NARROW if not dtype.is_complex)
_SIMPLE_WIDE = frozenset(dtype for dtype in WIDE if not dtype.is_complex)
SIMPLE_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

JaxDevice = Any  # jax.Device, which type checkers do not take for a class

# The public functions cost five times as much; None where a JAX version lacks the raw ones.
_raw_import: Callable[..., jax.Array] | None = getattr(_jax, "dlpack_managed_tensor_to_buffer", None)
_raw_export: Callable[..., Any] | None = getattr(_jax, "buffer_to_dlpack_managed_tensor", None)

_storage_at: Callable[..., Any] | None = getattr(torch._C, "_construct_storage_from_data_pointer", None)
CAN_ALIAS = _storage_at is not None and _raw_import is not None


def jax_dtype(dtype: torch.dtype) -> jax.numpy.dtype:
    return jax.numpy.dtype(str(dtype).removeprefix("torch."))


def torch_dtype(dtype: Any) -> torch.dtype:
    return getattr(torch, jax.numpy.dtype(dtype).name)


def import_tensor(tensor: torch.Tensor, device: JaxDevice, stream: int | None) -> jax.Array:
    """A JAX array on the tensor's memory, ready when `stream` (the one JAX waits on) has reached this point."""
    global _raw_import
    # A detached view shares memory and version; the tensor itself would keep its graph alive.
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if _raw_import is not None:
        try:
            return _raw_import(_to_dlpack(tensor), device, stream, None)
        except TypeError:  # the signature of a JAX version that this file does not know
            _raw_import = None
    if tensor.device.type == "cpu":
        return jax.dlpack.from_dlpack(tensor)
    with torch.cuda.device(tensor.device):
        return jax.dlpack.from_dlpack(tensor)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of one without gaps that does not keep it alive; needs CAN_ALIAS."""
    storage: Any = _storage_at(  # pyright: ignore[reportOptionalCall]
        tensor.data_ptr(), tensor.device, tensor.numel() * tensor.element_size()
    )
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def export_array(array: jax.Array, stream: int | None) -> torch.Tensor:
    """A tensor on the array's memory; `stream` waits for the array, or the host does where it is None."""
    global _raw_export
    if _raw_export is not None:
        try:
            return _from_dlpack(_raw_export(array, stream=stream))
        except TypeError:
            _raw_export = None
    return torch.from_dlpack(array)


def x64_enabled() -> bool:
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def simple_dtypes(x64: bool) -> frozenset[torch.dtype]:
    """The dtypes that cross as they are and have no conjugate bit."""
    return _SIMPLE_WIDE if x64 else _SIMPLE


def conform(tensor: torch.Tensor, name: Callable[[], str], device: torch.device, x64: bool) -> torch.Tensor:
    """The tensor as DLPack can carry it: itself where possible, else one copy."""
    if (  # what the rest would find for most tensors, at a fifth of its cost
        type(tensor) in SIMPLE_TYPES
        and tensor.dtype in simple_dtypes(x64)
        and tensor.device == device
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.data_ptr() % ALIGNMENT[device.type]
    ):
        return tensor
    _refuse(tensor, name, device, x64)
    tensor = tensor.resolve_conj().resolve_neg()
    if not x64 and tensor.dtype in NARROWED:
        tensor = _narrowed(tensor, name)
    if not _is_dense(tensor):
        tensor = tensor.contiguous()
    if tensor.data_ptr() % ALIGNMENT[device.type]:
        tensor = tensor.clone()
    return tensor


def refuse_device(tensor: torch.Tensor, name: Callable[[], str]) -> None:
    """Raises for a device whose memory cannot be shared; meta tensors have none."""
    if tensor.device.type not in ALIGNMENT:
        raise TypeError(f"{name()}: expected a tensor on cpu or cuda, given one on {tensor.device}")


def _refuse(tensor: torch.Tensor, name: Callable[[], str], device: torch.device, x64: bool) -> None:
    if torch.nn.parameter.is_lazy(tensor) or _is_wrapper(tensor):
        raise TypeError(f"{name()}: expected a plain torch.Tensor, given a {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name()}: expected a dense tensor, given a sparse one ({tensor.layout})")
    if tensor.is_quantized:
        raise TypeError(f"{name()}: expected a plain dtype, given a quantized tensor ({tensor.dtype})")
    refuse_device(tensor, name)
    if tensor.device != device:
        raise ValueError(f"{name()}: expected a tensor on {device} like the others, given one on {tensor.device}")
    crossing_dtype(tensor.dtype, name, x64)


def crossing_dtype(dtype: torch.dtype, name: Callable[[], str], x64: bool) -> torch.dtype:
    """The dtype that a tensor has on the other side; raises for one that cannot cross."""
    if dtype not in WIDE:
        raise TypeError(f"{name()}: expected a dtype that DLPack and JAX carry, given {dtype}")
    if x64 or dtype in NARROW:
        return dtype
    if dtype not in NARROWED:
        raise ValueError(
            f"{name()}: expected a dtype of 32 bits or less a number, since jax_enable_x64 is off; given {dtype}"
        )
    return NARROWED[dtype]


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a subclass has no memory of its own (FakeTensor, DTensor)."""
    return getattr(type(tensor), _DISPATCH) is not getattr(torch.Tensor, _DISPATCH)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides are those of a permuted contiguous tensor, which JAX takes as a layout."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _narrowed(tensor: torch.Tensor, name: Callable[[], str]) -> torch.Tensor:
    """64-bit integers in 32 bits. Looking at the values makes the host wait for a CUDA device."""
    signed = tensor.view(torch.int64)
    low, high = (-(2**31), 2**31 - 1) if tensor.dtype == torch.int64 else (0, 2**32 - 1)
    if tensor.numel() and not bool(((signed >= low) & (signed <= high)).all()):
        raise ValueError(
            f"{name()}: expected values from {low} to {high}, since jax_enable_x64 is off; "
            f"given {tensor.dtype} values outside that range"
        )
    return signed.to(torch.int32).view(NARROWED[tensor.dtype])
