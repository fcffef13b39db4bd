"""What the Triton passes accept: every refusal says what was given and what to do."""

import torch

from holdfast.abft.gemm.triton_types import OPERANDS, Checksums

OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_BLOCK = 16


def encoding(b: torch.Tensor, block: int | None, weighted: bool) -> None:
    """B can be encoded so."""
    _operand("encode", "b", b)
    if b.dim() not in (2, 3):
        raise ValueError(f"encode: b has shape {tuple(b.shape)}: give [K, N] or [batch, K, N]")
    if block is not None and (block < SMALLEST_BLOCK or block & (block - 1)):
        raise ValueError(
            f"encode: block is {block}: use a power of two from {SMALLEST_BLOCK} up, or None"
        )
    if block is not None and weighted:
        raise ValueError("encode: weighted checksums are of whole rows: leave block at None")


def verification(
    c: torch.Tensor, a: torch.Tensor, checksums: Checksums, b: torch.Tensor | None, mode: str
) -> None:
    """C and A fit the checksums, and the mode has what it needs."""
    _operand("verify", "a", a)
    output("verify", c.dtype)
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
    _mode(mode, checksums, b, (*a.shape[:-2], inner, checksums.columns), a.dtype)


def product(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """A and B are matrices that can be multiplied."""
    _operand(name, "a", a)
    _operand(name, "b", b)
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


def online(a: torch.Tensor, b: torch.Tensor, checksums: Checksums, mode: str) -> None:
    """The checksums are those of B, in blocks that a tile can have."""
    if mode not in ("recompute", "detect"):
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


def counts(tensor: torch.Tensor, device: torch.device) -> None:
    """A counter of suspect and corrected rows."""
    if tensor.dtype != torch.int32 or tensor.shape != (2,) or tensor.device != device:
        raise ValueError(
            f"counts is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give int32 [2] "
            f"on {device}"
        )


def faults(tensor: torch.Tensor, device: torch.device) -> None:
    """Faults to inject: (row, column, value, attempts) each."""
    fits = tensor.dtype == torch.float32 and tensor.dim() == 2 and tensor.shape[1] == 4
    if not fits or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"faults is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give contiguous "
            f"fp32 [F, 4] on {device}"
        )


def output(name: str, dtype: torch.dtype) -> None:
    """A dtype that C can have."""
    if dtype not in OUTPUTS:
        raise TypeError(f"{name}: C cannot be {dtype}: use one of {_names(OUTPUTS)}")


def _operand(name: str, argument: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in OPERANDS:
        raise TypeError(
            f"{name}: {argument} is {tensor.dtype}; verified are {_names(OPERANDS)}: convert it"
        )


def _mode(
    mode: str,
    checksums: Checksums,
    b: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    if mode not in ("recompute", "checksum", "detect"):
        raise ValueError(f"verify: mode is {mode!r}: use 'recompute', 'checksum' or 'detect'")
    if mode == "checksum" and checksums.weighted is None:
        raise ValueError("verify: mode 'checksum' needs encode(b, weighted=True)")
    if mode == "recompute" and (b is None or tuple(b.shape) != shape or b.dtype != dtype):
        given = "none" if b is None else f"{b.dtype} {tuple(b.shape)}"
        raise ValueError(f"verify: mode 'recompute' needs b, {dtype} {shape}; given is {given}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
