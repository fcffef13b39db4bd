"""Checksums and verdicts of the verified Triton products, and checks of their arguments."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from holdfast.abft.triton.launch import check_operand, names
from holdfast.abft.triton.tolerance import FLOAT8

Mode = Literal["recompute", "detect"]

OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
OPERANDS = (*OUTPUTS, *FLOAT8)
SMALLEST_BLOCK = 16


@dataclass(frozen=True, eq=False)
class Checksums:
    """Checksums of the right operand B of a product, on the GPU.

    Attributes:
        sums: ``Σ r_j b_kj`` and the spread ``z_k`` (see ``Tolerance``) of each block of columns,
            [batch, blocks, 2, K], fp32 (fp64 for whole rows of fp32).
        columns: N.
        block: Number of columns of a block.
    """

    sums: torch.Tensor
    columns: int
    block: int


class Verdict(NamedTuple):
    """Findings of a verification; everything stays on the device.

    Attributes:
        status: Values of ``RowStatus``, int32: [batch, M], or [blocks, M] for the rows of tiles.
        counts: Rows found suspect and rows corrected, int32 [2]; added to its earlier values.
        rows: Residual, threshold and energy of each row before any repair, [3, batch, M]; None
            for a product that was verified in its accumulator.
    """

    status: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor | None


def check_encoding(b: torch.Tensor, block: int | None) -> None:
    """Raise if no checksums can be computed for B with these blocks of columns."""
    check_operand("encode", "b", b, OPERANDS)
    if b.dim() not in (2, 3):
        raise ValueError(f"encode: b has shape {tuple(b.shape)}: give [K, N] or [batch, K, N]")
    if block is not None and (block < SMALLEST_BLOCK or block & (block - 1)):
        raise ValueError(
            f"encode: block is {block}: use a power of two from {SMALLEST_BLOCK} up, or None"
        )


def check_verification(
    c: torch.Tensor, a: torch.Tensor, checksums: Checksums, b: torch.Tensor | None, mode: str
) -> None:
    """Raise if C or A does not fit the checksums, or an argument that the mode needs is missing."""
    check_operand("verify", "a", a, OPERANDS)
    check_output("verify", c.dtype)
    blocks, inner = checksums.sums.shape[1], checksums.sums.shape[3]
    expected = (*a.shape[:-1], checksums.columns)
    batches = a.shape[0] if a.dim() == 3 else 1
    if a.dim() not in (2, 3) or a.shape[-1] != inner or tuple(c.shape) != expected:
        raise ValueError(
            f"verify: c {tuple(c.shape)} and a {tuple(a.shape)} do not fit checksums of a B "
            f"[.., {inner}, {checksums.columns}]: encode the B of this product"
        )
    if blocks > 1 or checksums.sums.shape[0] != batches:
        raise ValueError(
            f"verify: checksums of {checksums.sums.shape[0]} batches in {blocks} blocks do not "
            f"fit {batches} batches of whole rows: encode(b) without a block"
        )
    if c.device != a.device or c.device != checksums.sums.device:
        raise ValueError(
            f"verify: c is on {c.device}, a on {a.device}, checksums on {checksums.sums.device}: "
            "bring them to one device"
        )
    _check_mode("verify", mode)
    needed = a.dtype, (*a.shape[:-2], inner, checksums.columns)
    if mode == "recompute" and (b is None or (b.dtype, tuple(b.shape)) != needed):
        given = "none" if b is None else f"{b.dtype} {tuple(b.shape)}"
        raise ValueError(
            f"verify: mode 'recompute' needs b, {needed[0]} {needed[1]}; given is {given}"
        )


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
    _check_mode("matmul_online", mode)
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


def _check_mode(name: str, mode: str) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"{name}: mode is {mode!r}: use 'recompute' or 'detect'")


def check_output(name: str, dtype: torch.dtype) -> None:
    """Raise if a dtype is not supported for the output C."""
    if dtype not in OUTPUTS:
        raise TypeError(f"{name}: C cannot be {dtype}: use one of {names(OUTPUTS)}")
