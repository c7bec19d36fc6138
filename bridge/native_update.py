"""The Triton decode kernels launched by torch on torch tensors, in place, on torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from jax_ssd.implementations.triton_plan import Launch

_ALIGNMENT = 15


class Prepared:
    """One launch with its kernel compiled: called with the tensors of `launch.inputs` and `launch.outputs`, in order.

    Triton's own call looks up its cache by every argument each time; here pointers go straight to the driver. The
    kernel is compiled for pointers that are multiples of 16: others are refused, but where it asks for no alignment.
    """

    def __init__(self, launch: Launch, kernels: ModuleType, tensors: Sequence[torch.Tensor]) -> None:
        kernel = getattr(kernels, launch.kernel)
        self._check_alignment(kernel, tensors)
        options = dict(num_warps=launch.num_warps, num_stages=launch.num_stages)
        options["launch_pdl"] = launch.constants["OVERLAP"]
        compiled = kernel.warmup(*tensors, **launch.constants, **options, grid=(launch.programs,))
        self._run, self._programs = compiled.run, launch.programs
        self._function, self._metadata = compiled.function, compiled.packed_metadata
        self._constants = (None,) * (len(kernel.arg_names) - len(tensors))
        self._device = tensors[0].device.index

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch; a caller that checks its tensors' alignment once need not do it again."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        pointers = [tensor.data_ptr() for tensor in tensors]
        head = (self._programs, 1, 1, stream, self._function, self._metadata, None, None, None)
        self._run(*head, *pointers, *self._constants)

    @staticmethod
    def _check_alignment(kernel: Any, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(kernel.params, tensors, strict=False):
            if tensor.data_ptr() & _ALIGNMENT and not parameter.do_not_specialize_on_alignment:
                raise ValueError(
                    f"{parameter.name}: expected an address that is a multiple of 16, got a view inside a block."
                )
