"""What the Triton attention takes and gives: strided tensors, encodings, tolerances, verdicts."""

import math
from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch

from holdfast.abft.gemm.triton_types import Precision, Tolerance

_UNIT = torch.finfo(torch.float32).eps / 2
# Of the exponentials: 2^x is approximate to 2 units, and its argument may be fused with a product.
_EXPONENTIAL_UNITS = 16
# Numbers of a dtype that together have the precision of fp32, or of the TF32x3 that is counted on.
TERMS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


class Part(IntFlag):
    """Which check a row failed, at any attempt."""

    SCORES = 1  # Q Kᵀ
    PROBABILITIES = 2  # outside [0, 1], or their sum is not 1 (backward)
    STATE = 4  # running maximum, running sum, δ
    GRAD_PROBABILITIES = 8  # dO Vᵀ
    OUTPUT = 16  # P V, or the accumulator of dQ or dK
    GRAD_VALUE = 32  # the accumulator of dV


class Place(IntEnum):
    """Where a test may inject a fault: (place, matrix, tile, row, column, value, attempts), fp32.

    Matrix counts batch · heads + head of the rows that a program owns, tile those it streams
    through; the row is one of the former. The column is a streamed row, or a column of an
    accumulator, or 0.
    """

    SCORES = 0
    PROBABILITIES = 1
    MAXIMUM = 2
    SUM = 3
    ACCUMULATOR = 4  # of O, dQ or dK
    GRAD_PROBABILITIES = 5
    DELTA = 6
    GRAD_VALUE = 7


class Matrix(NamedTuple):
    """A tensor [batch, heads, rows, columns] and its strides, as a kernel takes it."""

    data: torch.Tensor
    batch: int
    head: int
    row: int
    column: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Matrix":
        """Any strides; a broadcast dimension has stride 0."""
        return cls(tensor, *tensor.stride())


class Encoding(NamedTuple):
    """A matrix [batch, heads, L, d], encoded along both of its dimensions.

    Attributes:
        pieces: [batch, heads, tiles, terms, d], in the matrix's dtype: ``s Σ_j r_j x_jk`` over the
            rows of each tile, as a sum of ``terms`` numbers, of which each is stored ``2¹¹`` times
            as large as the one before counts. s is a power of two.
        rows: fp32 [batch, heads, L]: ``Σ_k r_k x_jk``.
        tile: fp32 [batch, heads, tiles, 4]: ``1 / s``; the largest spread ``z_k`` of
            ``Tolerance``; the largest ``Σ_k x_jk²``; and ``‖Σ_j x_j / n‖²``.
    """

    pieces: torch.Tensor
    rows: torch.Tensor
    tile: torch.Tensor


class Tolerances(NamedTuple):
    """What rounding explains.

    Attributes:
        tile: of a tile of scores or dP, a product over d; total: of an accumulator, over L.
        state: of a running sum against its copy, relative.
        exponential: of the largest probability, from 1, for a maximum of 0; it grows with it.
    """

    tile: Tolerance
    total: Tolerance
    state: float
    exponential: float

    @classmethod
    def of(
        cls, dtype: torch.dtype, width: int, length: int, stream: int, precision: Precision
    ) -> "Tolerances":
        """For a head size and ``length`` rows that are streamed in tiles of ``stream``."""
        tiles = math.ceil(length / stream)
        return cls(
            Tolerance.of(dtype, None, width, stream, precision),
            Tolerance.of(dtype, None, length, width, precision),
            (4 * tiles + 2 * stream) * _UNIT,
            _EXPONENTIAL_UNITS * _UNIT,
        )


class Verdict(NamedTuple):
    """What the checks of one kernel found; everything stays on the device.

    Attributes:
        status: int32, values of ``RowStatus``, one a row of the output (or of dQ; or of dK and dV).
        parts: int32, values of ``Part``, likewise; 0 where nothing was suspect.
        counts: int32 [2]: rows found suspect, rows corrected; added to what it held.
    """

    status: torch.Tensor
    parts: torch.Tensor
    counts: torch.Tensor
