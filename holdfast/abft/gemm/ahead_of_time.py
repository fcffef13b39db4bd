"""Compilation of the verification kernel for the launches of ``csrc/device/kernel_backend.cpp``.

The native core packs arguments and launches itself, and asks only for variants that it has
not met yet.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import driver

from holdfast.abft.gemm.cpu import configured_core
from holdfast.abft.gemm.kernels import WIDE
from holdfast.abft.gemm.kernels_verify import Variant, verify_kernel

NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
WARPS = 8
ALIGNMENT = 16  # bytes of the largest load
REGISTERS = 128  # with which two blocks of 8 warps fit a multiprocessor


class Request(NamedTuple):
    """A variant of the kernel, as the native core asks for it.

    Attributes:
        variant: Constants of the kernel.
        c, d, a, sums: Dtypes of C, its addend, A and the sums; of a matrix that is not there any.
        aligned: True for C, the addend or A if it can be read in vectors of 16 bytes.
    """

    variant: Variant
    c: torch.dtype
    d: torch.dtype
    a: torch.dtype
    sums: torch.dtype
    aligned: tuple[bool, bool, bool]


def prepare(device: torch.device) -> None:
    """Let the native core launch the kernel on a CUDA device, also in graphs captured later.

    This copies 1 MB of signs to the device and reserves 4 MB there.

    Raises:
        ConfigError: The native core is not loaded.
    """
    core = configured_core()
    core.set_kernel_loader(load)
    core.prepare_kernels(device)


def load(
    device: int,
    variant: dict[str, Any],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    aligned: tuple[bool, bool, bool],
) -> tuple[int, int, int]:
    """Compile a variant and load it on a CUDA device.

    Returns:
        Its handle in the CUDA driver, the bytes of shared memory and the threads of a program.
    """
    with torch.cuda.device(device):
        target = driver.active.get_current_target()
        kernel = compiled(Request(Variant(**variant), *dtypes, aligned), target)
        shared = kernel.metadata.shared
        loaded = driver.active.utils.load_binary(kernel.name, kernel.kernel, shared, device)
    return loaded[1], shared, 32 * WARPS


def compiled(request: Request, target: GPUTarget) -> CompiledKernel:
    """Compile a variant for a GPU, which need not be present, or take it from Triton's cache."""
    source = ASTSource(
        verify_kernel,
        signature(request),
        {"VARIANT": request.variant},
        {path: [["tt.divisibility", by]] for path, by in _divisors(request).items()},
    )
    options = {"num_warps": WARPS, "num_stages": request.variant.stages, "maxnreg": REGISTERS}
    return triton.compile(source, target, options)


def signature(request: Request) -> dict[str, Any]:
    """Return the types of the kernel's arguments, which ``kernel_backend.cpp`` packs."""
    sums = f"*{NAMES[request.sums]}"
    matrices = [(f"*{NAMES[d]}", "i64", "i64", "i64") for d in (request.c, request.d, request.a)]
    return {
        **dict(zip(("c", "addend", "a"), matrices, strict=True)),
        "signs": "*i8",
        **dict.fromkeys(("encoding", "across", "known"), (sums, sums)),
        "partials": sums,
        **dict.fromkeys(("counters", "slot"), "*i32"),
        **dict.fromkeys(("encoded", "summed"), (sums, sums)),
        "sizes": ("i32",) * 3,
        "split": ("i32",) * 5,
        "factors": ("fp64",) * 2,
        "growth": ("fp64",) * 4,
        "tolerance": ("fp64",) * 5,
        "scale": ("*fp32", "i64"),
        "groups": ("*i32", "i32"),
        "VARIANT": "constexpr",
    }


def _divisors(request: Request) -> dict[tuple[int, ...], int]:
    """Return the known divisors of arguments, by path: addresses in bytes, others in elements."""
    names = list(signature(request))
    pointers: list[tuple[int, ...]] = [(names.index(name),) for name in ("signs", "partials")]
    pointers += [(names.index(name), i) for name in ("encoding", "across") for i in (0, 1)]
    divisors = dict.fromkeys(pointers, ALIGNMENT)
    v, sizes = request.variant, names.index("sizes")
    matrices = (v.c_layout, request.c), (v.d_layout, request.d), (v.a_layout, request.a)
    for index, ((layout, dtype), aligned) in enumerate(zip(matrices, request.aligned, strict=True)):
        if aligned:
            wide, vector = layout == WIDE.value, ALIGNMENT // dtype.itemsize
            divisors[index, 0] = ALIGNMENT
            divisors[index, 1] = divisors[index, 2 if wide else 3] = vector
            length = sizes, (1, 1, 0 if v.turned else 2)[index] if wide else 0
            divisors[length] = max(vector, divisors.get(length, 1))
    return divisors
