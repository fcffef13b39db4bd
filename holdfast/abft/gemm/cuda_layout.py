"""Tile sizes and memory layouts (for the copy engine, TMA) of the Triton kernels."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from holdfast.abft.triton.tolerance import Precision

# Elements of a tile in kernels that read matrices once, and its width for contiguous rows or not.
STREAM_TILE, ROW_WIDTH, COLUMN_WIDTH = 4096, 1024, 128
# Tiles of a product by bytes of an operand, largest first; the first one is used that gives a large
# device enough work. Accumulators of larger fp32 tiles do not fit the registers.
TILES = {
    4: ((64, 128), (64, 64)),
    2: ((128, 256), (128, 128), (64, 128), (64, 64)),
    1: ((128, 128), (64, 128), (64, 64)),
}
ENOUGH_TILES = 96
SWIZZLE = 128  # bytes in a row of a block that the copy engine can spread over all banks
ALIGNMENT = 16  # bytes, of what the copy engine reads


class Plan(NamedTuple):
    """Tiles of a product, and how its kernel is launched."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    """Dimensions M, N and K of a matrix product, passed to kernels as one argument."""

    rows: int
    columns: int
    inner: int


@dataclass(frozen=True)
class Settings:
    """Constants that the kernel of a product is compiled for.

    Attributes:
        rows, columns, inner: Sizes of a tile along M, N and K.
        group: Number of row blocks that run together to reuse columns of B in the L2 cache.
        transposed_a, transposed_b: True if the operand is read through its transpose.
        precision: Precision of products of fp32 operands.
        upcast: True if operands are converted to fp32 before they are multiplied.
        chunk: Number of products that matrix units may sum in less than fp32.
        parts: Number of parts of the prediction; 0 if nothing is verified.
        attempts: Largest number of times that a suspect tile is computed.
        faults: Number of injected faults.
    """

    rows: int
    columns: int
    inner: int
    group: int
    transposed_a: bool
    transposed_b: bool
    precision: str
    upcast: bool
    chunk: int
    parts: int = 0
    attempts: int = 1
    faults: int = 0


def product_plan(
    rows: int, columns: int, dtype: torch.dtype, precision: Precision, block: int | None = None
) -> Plan:
    """Choose the tiles of C [rows, columns], with ``block`` columns if it is given."""
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
    """Choose the rows and columns of the tiles in which matrices are read, by their strides."""
    wide = all(matrix.stride(-1) == 1 or matrix.shape[-2] == 1 for matrix in matrices)
    limit = ROW_WIDTH if wide else COLUMN_WIDTH
    width = max(16, min(limit, triton.next_power_of_2(columns)))
    return STREAM_TILE // width, width


def readable(matrix: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return a matrix, its transpose (and True) or a copy that the copy engine (TMA) can read."""
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
    """Describe a matrix to be read in blocks, with zeros outside of it."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block))
