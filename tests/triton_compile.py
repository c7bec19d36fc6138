"""Compiling a launch plan's kernels for CUDA without a GPU, and what the binary uses."""

import re
import subprocess
from pathlib import Path

import jax
import pytest

from jax_ssd import settings

_TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int32": "*i32", "uint32": "*u32", "bool": "*i1"}


def compile_launch(launch, kernels, dtypes, capability=90):
    """The compiled kernel of a launch; `dtypes` by array name, int32 where a name is missing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(kernels, launch.kernel)
    names = kernel.arg_names
    arrays = (*launch.inputs, *(None for _ in launch.numbers), *launch.outputs)
    signature = dict.fromkeys(names, "constexpr")
    for name, array in zip(names, arrays, strict=False):
        signature[name] = _TYPES[dtypes.get(array, "int32")] if array else "i32"
    aligned = {(place,): [["tt.divisibility", 16]] for place, array in enumerate(arrays) if array}
    source = ASTSource(kernel, signature=signature, constexprs=launch.constants, attrs=aligned)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(compiled, folder):
    """(registers, bytes of stack, bytes of shared memory) of a thread or block."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    binary = Path(folder) / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    report = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
    return tuple(int(number) for number in found.groups())


def _why_no_jax_triton():
    try:
        settings.jax_triton()
    except ImportError as fault:
        return f"jax-triton cannot be imported: {fault}"
    return None


_REASON = _why_no_jax_triton()
needs_jax_triton = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")


def lowered(function, *arguments):
    """The program of a jitted function for CUDA, made without a GPU."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def num_launches(text):
    return text.count("stablehlo.custom_call @triton_kernel_call")
