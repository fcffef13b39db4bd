"""A driver for ``csrc/device/kernel_launch.cpp``: launches run in Triton's interpreter, on CPU.

It unpacks the parameters that the native core packed, so that a wrong order or type is found.
"""

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from holdfast import native
from holdfast.abft.gemm.ahead_of_time import NAMES, WARPS, Request, signature
from holdfast.abft.gemm.cpu import configured_core
from holdfast.abft.gemm.kernels_verify import Variant, verify_kernel

core = configured_core() if native.core is not None else None
SHARED = 1000  # bytes that the stand-in says that it needs, plus the number of the variant
DTYPES = {f"*{name}": dtype for dtype, name in NAMES.items()} | {
    "*i8": torch.int8,
    "*i32": torch.int32,
}


class Launch(NamedTuple):
    """A launch as the driver got it."""

    request: Request
    grid: tuple[int, int, int]
    arguments: list[Any]


class Interpreter:
    """Loads variants by number and launches them in the interpreter; keeps what was launched."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.launches: list[Launch] = []

    def load(
        self, device: int, variant: dict[str, Any], dtypes: tuple[torch.dtype, ...], aligned: Any
    ) -> tuple[int, int, int]:
        self.requests.append(Request(Variant(**variant), *dtypes, aligned))
        return len(self.requests), SHARED + len(self.requests), 32 * WARPS

    def launch(
        self, function: int, grid: tuple[int, ...], threads: int, shared: int, values: list[int]
    ) -> None:
        assert (threads, shared) == (32 * WARPS, SHARED + function)
        request = self.requests[function - 1]
        bits = iter(values)
        arguments = [unpacked(kind, bits) for kind in signature(request).values()]
        assert list(bits) == [0, 0]  # the workspaces at the end
        arguments[-1] = request.variant
        self.launches.append(Launch(request, grid, arguments))
        verify_kernel[grid](*arguments)


def unpacked(kind: Any, bits: Iterator[int]) -> Any:
    """An argument of the kernel from the 8 bytes that each of its parameters was packed in."""
    if isinstance(kind, tuple):
        return tuple(unpacked(each, bits) for each in kind)
    if kind == "constexpr":
        return None
    raw = struct.pack("<Q", next(bits))
    if kind in ("i32", "i64"):
        return int.from_bytes(raw[: int(kind[1:]) // 8], "little", signed=True)
    if kind == "fp64":
        # The interpreter leaves a float as it is, where a kernel has a scalar tensor.
        value = np.array(struct.unpack("<d", raw))
        return tl.tensor(TensorHandle(value, tl.float64), tl.float64)
    return at_address(int.from_bytes(raw, "little"), DTYPES[kind])


def at_address(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element at an address; the kernel reads on from there."""
    if address == 0:
        return torch.full((1,), torch.nan).to(dtype)
    memory = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@contextmanager
def interpreting() -> Iterator[Interpreter]:
    """Launches of the native core run in the interpreter."""
    driver = Interpreter()
    core.set_kernel_loader(driver.load)
    core.record_launches(driver.launch)
    try:
        yield driver
    finally:
        core.record_launches(None)
