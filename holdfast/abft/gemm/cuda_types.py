"""Checksums and verdicts of the verified Triton products, and checks of their arguments."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from holdfast.abft.thresholds.rounding import FLOAT8
from holdfast.abft.triton.launch import check_operand, names

Mode = Literal["recompute", "detect"]

OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
OPERANDS = (*OUTPUTS, *FLOAT8)
SMALLEST_BLOCK = 16


@dataclass(frozen=True, eq=False)
class Checksums:
    """Checksums of the right operand B of a product, on the GPU.

    Attributes:
        sums: ``Σ r_j b_kj`` and the spread ``z_k`` (see ``Tolerance``) of each block of columns,
            fp32 [batch, blocks, 2, K].
        columns: N.
        block: Number of columns of a block.
    """

    sums: torch.Tensor
    columns: int
    block: int


class Verdict(NamedTuple):
    """Findings of a verification; everything stays on the device.

    Attributes:
        status: Values of ``RowStatus`` of the rows of tiles, int32 [blocks, M].
        counts: Rows found suspect and rows corrected, int32 [2]; added to its earlier values.
    """

    status: torch.Tensor
    counts: torch.Tensor


def check_encoding(b: torch.Tensor, block: int) -> None:
    """Raise if no checksums can be computed for B with these blocks of columns."""
    check_operand("encode", "b", b, OPERANDS)
    if b.dim() not in (2, 3):
        raise ValueError(f"encode: b has shape {tuple(b.shape)}: give [K, N] or [batch, K, N]")
    if block < SMALLEST_BLOCK or block & (block - 1):
        raise ValueError(f"encode: block is {block}: use a power of two from {SMALLEST_BLOCK} up")


def check_product(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise if operands are not matrices, have unequal inner sizes, or require grad."""
    check_operand(name, "a", a, OPERANDS)
    check_operand(name, "b", b, OPERANDS)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        raise ValueError(
            f"{name}: an operand requires grad and this is not differentiated: call it under "
            "torch.no_grad(), or inside an autograd.Function"
        )
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{name}: a {tuple(a.shape)} and b {tuple(b.shape)} do not multiply: give [M, K] and "
            "[K, N], one matrix of a batch at a time"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(
            f"{name}: a is {a.dtype} on {a.device}, b is {b.dtype} on {b.device}: convert one"
        )


def check_online(a: torch.Tensor, b: torch.Tensor, checksums: Checksums, mode: str) -> None:
    """Raise if the checksums do not fit B, or their blocks do not fit the kernel's tiles."""
    if mode not in get_args(Mode):
        raise ValueError(f"matmul_online: mode is {mode!r}: use 'recompute' or 'detect'")
    encoded = (checksums.sums.shape[3], checksums.columns)
    tiles = SMALLEST_BLOCK <= checksums.block <= 256
    if encoded != tuple(b.shape) or not tiles or checksums.block & (checksums.block - 1):
        raise ValueError(
            f"matmul_online: checksums of a B {encoded} in blocks of {checksums.block} do not fit "
            f"b {tuple(b.shape)}: use encode(b, block=online_block(a.shape[0], b.shape[1], "
            "b.dtype))"
        )
    if checksums.sums.device != a.device:
        raise ValueError(
            f"matmul_online: checksums are on {checksums.sums.device}, a on {a.device}: encode "
            "there"
        )


def check_output(name: str, dtype: torch.dtype) -> None:
    """Raise if a dtype is not supported for the output C."""
    if dtype not in OUTPUTS:
        raise TypeError(f"{name}: C cannot be {dtype}: use one of {names(OUTPUTS)}")
