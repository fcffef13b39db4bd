"""Arguments and results of the Triton attention kernels: operands, sizes, tolerances, verdicts."""

import math
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.abft.triton.launch import ATTEMPTS, Matrix, check_operand, dot_dtype
from holdfast.abft.triton.tolerance import UNIT, Precision, Tolerance

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_WIDTH = 256
SMALLEST_BLOCK = 16
FAULT_NUMBERS = 7  # that describe a fault, see ``Place``
# Of the exponentials: 2^x is approximate to 2 units, and its argument may be fused with a product.
_EXPONENTIAL_UNITS = 16
# Numbers of a dtype that together have the precision of fp32, or of the TF32x3 that is counted on.
TERMS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


class Part(IntFlag):
    """Bit flags for the checks that an output row failed, at any attempt."""

    SCORES = 1  # Q Kᵀ
    PROBABILITIES = 2  # outside [0, 1], or their sum is not 1 (backward)
    STATE = 4  # running maximum, running sum, δ
    GRAD_PROBABILITIES = 8  # dO Vᵀ
    OUTPUT = 16  # P V, or the accumulator of dQ or dK
    GRAD_VALUE = 32  # the accumulator of dV


class Place(IntEnum):
    """Place of an injected fault: (place, matrix, tile, row, column, value, attempts), fp32.

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


class Mask(IntEnum):
    """Kind of mask that a kernel is compiled for."""

    NONE = 0
    ADDITIVE = 1
    BOOLEAN = 2


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
    """Bounds on the rounding errors of the quantities that the checks compare.

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
        """Compute them for a head size and ``length`` rows, streamed in tiles of ``stream``."""
        tiles = math.ceil(length / stream)
        return cls(
            Tolerance.of(dtype, None, width, stream, precision),
            Tolerance.of(dtype, None, length, width, precision),
            (4 * tiles + 2 * stream) * UNIT,
            _EXPONENTIAL_UNITS * UNIT,
        )


class Verdict(NamedTuple):
    """Findings of the checks of one kernel; everything stays on the device.

    Attributes:
        status: int32, values of ``RowStatus``, one a row of the output (or of dQ; or of dK and dV).
        parts: int32, values of ``Part``, likewise; 0 where nothing was suspect.
        counts: int32 [2]: rows found suspect, rows corrected; added to what it held.
    """

    status: torch.Tensor
    parts: torch.Tensor
    counts: torch.Tensor


class Operands(NamedTuple):
    """Strided operands of a kernel; mask is [batch, heads, Lq, Lk], broadcast, or None."""

    q: Matrix
    k: Matrix
    v: Matrix
    mask: Matrix | None


class Sizes(NamedTuple):
    """Heads of Q, query heads for each key head, Lq and Lk."""

    heads: int
    group: int
    queries: int
    keys: int


class Checks(NamedTuple):
    """The checksums that a kernel verifies with, and where it writes its findings.

    Attributes:
        signs: int8, the random signs by absolute index.
        first: encoding of the streamed matrix of the scores: K, or Q for dK and dV.
        second: encoding of the other streamed matrix: V, or dO for dK and dV.
    """

    signs: torch.Tensor
    first: Encoding
    second: Encoding
    verdict: Verdict


class Plan(NamedTuple):
    """Tiles of an attention: rows that a program owns, and rows that it streams at a time."""

    rows: int
    stream: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Settings:
    """Constants that a kernel is compiled for; the encoding kernel needs the first four only.

    Attributes:
        width: head size; padded: the power of two that holds it.
        stream, rows: as in ``Plan``; terms: pieces of a checksum, see ``Encoding``.
        attempts: how often a suspect tile is computed at most; faults: how many are injected.
        mask: a value of ``Mask``; precision, prediction: of the products, of their checksums.
        operand: dtype that tiles are multiplied in.
    """

    width: int
    padded: int
    stream: int
    terms: int
    rows: int = 0
    verify: bool = True
    attempts: int = 1
    faults: int = 0
    causal: bool = False
    mask: int = 0
    precision: str = "ieee"
    prediction: str = "ieee"
    operand: tl.dtype | None = None

    @classmethod
    def of_matrix(cls, matrix: torch.Tensor, stream: int) -> "Settings":
        """Choose settings that encode a matrix [batch, heads, L, d] in tiles of ``stream`` rows."""
        width = matrix.shape[3]
        return cls(width, padded(width), stream, TERMS[matrix.dtype])


# By bytes of a padded row of an operand: what fits the shared memory of a multiprocessor, and its
# registers, with the checks.
FORWARD_PLANS = {
    128: Plan(128, 64, 8, 3),
    256: Plan(128, 64, 8, 2),
    512: Plan(64, 32, 4, 2),
    1024: Plan(32, 16, 4, 2),
}
BACKWARD_PLANS = {
    128: Plan(128, 32, 8, 2),
    256: Plan(64, 32, 8, 2),
    512: Plan(32, 32, 4, 2),
    1024: Plan(16, 16, 4, 2),
}


def padded(width: int) -> int:
    """Smallest block that holds a head of this size."""
    return max(SMALLEST_BLOCK, int(triton.next_power_of_2(width)))


@dataclass(frozen=True)
class Problem:
    """One attention: its operands, checked, and how they are used.

    Attributes:
        q: [batch, heads, Lq, d]; k, v: [batch, kv heads, Lk, d].
        mask: [batch, heads, Lq, Lk], broadcast and not copied, or None.
        verify: whether anything is checked.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float
    precision: Precision
    verify: bool

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
        precision: Precision,
        unverified: bool,
    ) -> "Problem":
        """Make a problem from the caller's arguments; check them and broadcast the mask.

        Raises:
            TypeError: a dtype is not verified.
            ValueError: shapes or devices do not fit, or the mask requires grad.
        """
        _check_operands(q, k, v)
        added = None if mask is None else _broadcast(mask, q, k)
        factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        return cls(q, k, v, added, causal, factor, precision, not unverified)

    def check_output(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        """Refuse a tensor that is not shaped like Q, or with a dtype given, like the rows of Q.

        Raises:
            ValueError: its dtype, shape or device is another.
        """
        shape = self.q.shape if dtype is None else self.q.shape[:3]
        dtype = dtype or self.q.dtype
        if (tensor.dtype, tensor.shape, tensor.device) != (dtype, shape, self.q.device):
            raise ValueError(
                f"attention: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
                f"give {dtype} {tuple(shape)} on {self.q.device}"
            )

    @property
    def operands(self) -> Operands:
        """Return the operands with their strides, as arguments of the kernels."""
        mask = None if self.mask is None else Matrix.of(self.mask)
        return Operands(Matrix.of(self.q), Matrix.of(self.k), Matrix.of(self.v), mask)

    @property
    def sizes(self) -> Sizes:
        """Return the numbers of heads and rows, as one argument of the kernels."""
        heads = self.q.shape[1]
        return Sizes(heads, heads // self.k.shape[1], self.q.shape[2], self.k.shape[2])

    def plan(self, plans: dict[int, Plan], owned: torch.Tensor) -> Plan:
        """Choose the tiles of a kernel whose programs own rows of a tensor [batch, heads, L, d]."""
        size = max(128, padded(owned.shape[3]) * owned.dtype.itemsize)
        short = max(SMALLEST_BLOCK, triton.next_power_of_2(owned.shape[2]))
        return plans[size]._replace(rows=min(plans[size].rows, short))

    def tolerances(self, length: int, stream: int) -> Tolerances | None:
        """Compute the tolerances of sums over ``length`` streamed rows; None if unverified."""
        if not self.verify:
            return None
        return Tolerances.of(self.q.dtype, self.q.shape[3], length, stream, self.precision)

    def settings(self, plan: Plan, faults: torch.Tensor | None) -> Settings:
        """Choose what a kernel is compiled for, with these tiles and faults."""
        dtype, width = self.q.dtype, self.q.shape[3]
        mask = Mask.NONE
        if self.mask is not None:
            mask = Mask.BOOLEAN if self.mask.dtype == torch.bool else Mask.ADDITIVE
        exact = dtype == torch.float32 and self.precision == "ieee"
        return Settings(
            width,
            padded(width),
            plan.stream,
            TERMS[dtype],
            rows=plan.rows,
            verify=self.verify,
            attempts=ATTEMPTS if self.verify else 1,
            faults=0 if faults is None else len(faults),
            causal=self.causal,
            mask=int(mask),
            # Of 16-bit operands neither precision says anything.
            precision=self.precision if dtype == torch.float32 else "ieee",
            prediction="ieee" if exact else "tf32x3",
            operand=dot_dtype(dtype),
        )


def _check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_operand("attention", name, tensor, DTYPES)
        if tensor.dim() != 4:
            raise ValueError(
                f"attention: {name} has shape {tuple(tensor.shape)}: give [batch, heads, L, d]"
            )
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ValueError(
                f"attention: q is {q.dtype} on {q.device}, {name} is {tensor.dtype} on "
                f"{tensor.device}: convert one"
            )
    batch, heads, _, width = q.shape
    grouped = k.shape[1] > 0 and heads % k.shape[1] == 0
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, width) or not grouped:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: "
            "give [batch, heads, Lq, d] and twice [batch, kv heads, Lk, d], kv heads dividing heads"
        )
    if not 0 < width <= LARGEST_WIDTH:
        raise ValueError(f"attention: heads have size {width}: use 1 to {LARGEST_WIDTH}")


def _broadcast(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Broadcast the mask to [batch, heads, Lq, Lk] without copying it."""
    shape = (*q.shape[:3], k.shape[2])
    if mask.requires_grad:
        raise ValueError("attention: the mask requires grad and gets none: detach it")
    if mask.dtype not in (torch.bool, *DTYPES):
        raise TypeError(
            f"attention: the mask is {mask.dtype}: use bool, float32, float16 or bfloat16"
        )
    if mask.device != q.device:
        raise ValueError(f"attention: the mask is on {mask.device}, q on {q.device}: bring it")
    try:
        return mask.expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"attention: a mask {tuple(mask.shape)} does not broadcast to {shape}"
        ) from error
