"""Host code for launching Triton kernels: choice of the device and checks of arguments.

With ``TRITON_INTERPRET=1`` set before Triton is first imported the kernels run on CPU tensors.
"""

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.abft.checksums.weights import signs

INTERPRETED: bool = triton.knobs.runtime.interpret
FAILED = 0x40000000  # the bits of 2.0 in fp32: what a slot holds of a row that fails its check
ATTEMPTS = 2  # number of times that a tile is computed before its rows are reported as suspect


class RowStatus(IntEnum):
    """State of a row after its verification."""

    CLEAN = 0
    SUSPECT = 1  # over its threshold and not changed
    CORRECTED = 2  # was over its threshold and was replaced


class Matrix(NamedTuple):
    """A tensor and its strides, as an argument of a kernel."""

    data: torch.Tensor
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Matrix":
        """Wrap a tensor of any number of dimensions and any strides."""
        return cls(tensor, tuple(tensor.stride()))


def on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Launch kernels on a tensor's device; raise ValueError if Triton does not run there."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    if INTERPRETED:
        return nullcontext()
    raise ValueError(
        f"a tensor is on {tensor.device}: Triton needs a CUDA device, or TRITON_INTERPRET=1 in the "
        "environment before it is imported"
    )


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype in which a tile is multiplied; fp8 values are exact in fp16."""
    if dtype == torch.float32 or (INTERPRETED and dtype == torch.bfloat16):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def signs_on(columns: int, device: torch.device) -> torch.Tensor:
    """Return the first ``columns`` random signs, int8, cached on the device."""
    return _padded_signs(1 << max(12, (columns - 1).bit_length()), device)[:columns]


@cache
def _padded_signs(columns: int, device: torch.device) -> torch.Tensor:
    return signs(columns, torch.int8).to(device)


def counts_on(device: torch.device, given: torch.Tensor | None) -> torch.Tensor:
    """Return the given counters of suspect and corrected rows, int32 [2], or new ones of 0.

    Raises:
        ValueError: They have another dtype or shape, or are on another device.
    """
    return _integers_on("counts", 2, device, given)


def slot_on(device: torch.device, given: torch.Tensor | None) -> torch.Tensor:
    """Return the given slot for failures, int32 [1], or a new one of 0.

    Raises:
        ValueError: It has another dtype or shape, or is on another device.
    """
    return _integers_on("slot", 1, device, given)


def _integers_on(
    name: str, count: int, device: torch.device, given: torch.Tensor | None
) -> torch.Tensor:
    if given is None:
        return torch.zeros(count, dtype=torch.int32, device=device)
    if given.dtype != torch.int32 or given.shape != (count,) or given.device != device:
        raise ValueError(
            f"{name} is {given.dtype} {tuple(given.shape)} on {given.device}: give int32 "
            f"[{count}] on {device}"
        )
    return given


def check_faults(faults: torch.Tensor | None, numbers: int, device: torch.device) -> None:
    """Raise ValueError if faults to inject are not contiguous fp32 [F, numbers] on the device."""
    if faults is None:
        return
    fits = faults.dtype == torch.float32 and faults.dim() == 2 and faults.shape[1] == numbers
    if not fits or faults.device != device or not faults.is_contiguous():
        raise ValueError(
            f"faults is {faults.dtype} {tuple(faults.shape)} on {faults.device}: give contiguous "
            f"fp32 [F, {numbers}] on {device}"
        )


def check_operand(
    operator: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise TypeError if the dtype of an operand is not one that the operator verifies."""
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{operator}: {name} is {tensor.dtype}; verified are {names(dtypes)}: convert it"
        )


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Join the names of dtypes, as users write them, by commas."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
