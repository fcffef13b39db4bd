"""How tensors meet the Triton kernels: tiles, tables on the device, what the copy engine reads."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from holdfast.abft.checksums.positions import CODES
from holdfast.abft.checksums.positions import encoding as position_encoding
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm.triton_types import Precision

INTERPRETED: bool = triton.knobs.runtime.interpret

# A tile that streams through: 16 elements a thread of 8 warps, wide where rows are contiguous.
STREAM_TILE, ROW_WIDTH, COLUMN_WIDTH = 4096, 1024, 128
# Tiles of a product by bytes of an operand, largest first; the first that gives a large device
# enough work is taken. Accumulators of larger fp32 tiles do not fit the registers.
TILES = {
    4: ((64, 128), (64, 64)),
    2: ((128, 256), (128, 128), (64, 128), (64, 64)),
    1: ((128, 128), (64, 128), (64, 64)),
}
ENOUGH_TILES = 96
SWIZZLE = 128  # bytes in a row of a block that the copy engine can spread over all banks
ALIGNMENT = 16  # bytes, of what the copy engine reads


class Plan(NamedTuple):
    """How a product is cut into tiles."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def product_plan(
    rows: int, columns: int, dtype: torch.dtype, precision: Precision, block: int | None = None
) -> Plan:
    """The tiles of C [rows, columns]; a given block fixes how many columns they have."""
    tiles = TILES[dtype.itemsize]
    if block is not None:
        heights = sorted({height for height, _ in tiles}, reverse=True)
        tiles = tuple((height, block) for height in heights)
    counts = [triton.cdiv(rows, m) * triton.cdiv(columns, n) for m, n in tiles]
    enough = [tile for tile, count in zip(tiles, counts, strict=True) if count >= ENOUGH_TILES]
    block_m, block_n = enough[0] if enough else tiles[-1]
    scalar = dtype == torch.float32 and precision == "ieee"
    block_k = SWIZZLE // dtype.itemsize // (2 if scalar else 1)
    if block_m * block_n >= (64 if scalar else 128) * 128:
        return Plan(block_m, block_n, block_k, warps=8, stages=3)
    return Plan(block_m, block_n, block_k, warps=4, stages=4)


def stream_tile(columns: int, *matrices: torch.Tensor) -> tuple[int, int]:
    """Rows and columns to read at a time from matrices [.., columns], by what is contiguous."""
    wide = all(matrix.stride(-1) == 1 or matrix.shape[-2] == 1 for matrix in matrices)
    limit = ROW_WIDTH if wide else COLUMN_WIDTH
    width = max(16, min(limit, triton.next_power_of_2(columns)))
    return STREAM_TILE // width, width


def readable(matrix: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The matrix or its transpose (then True) as rows the copy engine can read; else a copy."""
    for candidate, transposed in ((matrix, False), (matrix.mT, True)):
        step, unit = candidate.stride()
        pitch = step * matrix.element_size()
        whole = unit == 1 and step >= candidate.shape[1] and pitch % ALIGNMENT == 0
        if whole and candidate.data_ptr() % ALIGNMENT == 0:
            return candidate, transposed
    rows, columns = matrix.shape
    width = triton.cdiv(columns * matrix.element_size(), ALIGNMENT) * ALIGNMENT
    copy = matrix.new_empty((rows, width // matrix.element_size()))[:, :columns]
    return copy.copy_(matrix), False


def descriptor(matrix: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A tensor map of a matrix that is read in blocks; what lies outside reads as zero."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block))


def signs_on(columns: int, device: torch.device) -> torch.Tensor:
    """The first signs as int8, kept on the device."""
    return _padded_signs(1 << max(12, (columns - 1).bit_length()), device)[:columns]


@cache
def _padded_signs(columns: int, device: torch.device) -> torch.Tensor:
    return signs(columns, torch.int8).to(device)


@lru_cache(maxsize=64)
def table_on(columns: int, device: torch.device) -> torch.Tensor:
    """Signs and weighted signs of the ``bits`` code, int8 [1 + D, N], kept on the device."""
    table = position_encoding(columns, code=CODES["bits"], accumulate=torch.float32).table
    return table.to(torch.int8).to(device)


def on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Launches inside go to the tensor's device.

    Raises:
        ValueError: it is not one that Triton runs on.
    """
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    if INTERPRETED:
        return nullcontext()
    raise ValueError(
        f"a tensor is on {tensor.device}: Triton needs a CUDA device, or TRITON_INTERPRET=1 in the "
        "environment before it is imported"
    )


def dot_dtype(dtype: torch.dtype) -> Any:
    """What a tile is multiplied in; every fp8 value is an fp16 value."""
    if dtype == torch.float32 or (INTERPRETED and dtype == torch.bfloat16):
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
