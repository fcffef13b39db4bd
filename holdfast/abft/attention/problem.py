"""Arguments and results of the Triton attention kernels: operands, sizes, tolerances, verdicts."""

import math
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple, TypedDict

import torch
import triton
import triton.language as tl

from holdfast.abft.attention.operand_checks import broadcast, check_operands
from holdfast.abft.attention.packing import Packing, Span, Starts
from holdfast.abft.triton.launch import ATTEMPTS, Matrix, counts_on, dot_dtype
from holdfast.abft.triton.tolerance import UNIT, Precision, Tolerance

SMALLEST_BLOCK = 16
FAULT_NUMBERS = 7  # numbers that describe an injected fault, see ``Place``
# Bound on the error of an exponential, in units of fp32: 2^x is approximate to 2 units, and the
# product that gives its argument may be fused.
_EXPONENTIAL_UNITS = 16
# How many numbers of a dtype it takes to represent one with the precision of fp32, or of TF32x3
# where the check relies on that.
TERMS = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


class Part(IntFlag):
    """Bit flags for the checks that a row of the output failed, in any attempt to compute it."""

    SCORES = 1  # Q Kᵀ
    PROBABILITIES = 2  # outside [0, 1], or their sum is not 1 (backward)
    STATE = 4  # running maximum, running sum, δ
    GRAD_PROBABILITIES = 8  # dO Vᵀ
    OUTPUT = 16  # P V, or the accumulator of dQ or dK
    GRAD_VALUE = 32  # the accumulator of dV
    NOT_A_NUMBER = 64  # only beside one of the others: the row that was computed last holds NaN


class Place(IntEnum):
    """Place of an injected fault: (place, matrix, tile, row, column, value, attempts), fp32.

    ``matrix`` is batch · heads + head of the rows that a program owns, ``row`` is one of these
    rows, and ``tile`` is the number of the streamed tile. ``column`` is a streamed row, a column of
    an accumulator, or 0.
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
            rows of each tile, where s is a power of two, written as ``Σ_t 2^(−11 t) pieces_t``.
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
        tile: Tolerance of a tile of scores or dP, which are products over d.
        total: Tolerance of an accumulator, which is a sum over all streamed rows.
        state: Largest relative difference between a running sum and its copy.
        exponential: Largest distance of the greatest probability from 1 for a running maximum of
            0; it grows with the magnitude of the maximum.
    """

    tile: Tolerance
    total: Tolerance
    state: float
    exponential: float


class Verdict(NamedTuple):
    """Findings of the checks of one kernel; everything stays on the device.

    Attributes:
        status: Values of ``RowStatus`` for each row of the output (or of dQ, or of dK and dV),
            int32.
        parts: Values of ``Part`` for each row, int32; 0 where nothing was suspect.
        counts: Rows found suspect and rows corrected, int32 [2]; added to its earlier values.
        slot: Slot of a ledger, int32 [1], which a row that stays suspect raises to the bits of 2.0,
            and with NaN to those of INF; or None.
    """

    status: torch.Tensor
    parts: torch.Tensor
    counts: torch.Tensor
    slot: torch.Tensor | None = None


class Operands(NamedTuple):
    """Strided operands of a kernel; mask is [batch, heads, Lq, Lk], broadcast, or None."""

    q: Matrix
    k: Matrix
    v: Matrix
    mask: Matrix | None


class Sizes(NamedTuple):
    """Heads of Q, query heads for each key head, Lq and Lk (of packed sequences the longest)."""

    heads: int
    group: int
    queries: int
    keys: int


class Checks(NamedTuple):
    """The checksums that a kernel verifies with, and the verdict that it fills.

    Attributes:
        signs: The random signs of all rows and columns, int8.
        first: Encoding of the streamed matrix from which scores are computed: K, or Q in the kernel
            of dK and dV.
        second: Encoding of the other streamed matrix: V, or dO in the kernel of dK and dV.
    """

    signs: torch.Tensor
    first: Encoding
    second: Encoding
    verdict: Verdict


class Options(TypedDict, total=False):
    """Options of an attention, which ``fused_attention`` describes."""

    causal: bool
    mask: torch.Tensor | None
    scale: float | None
    counts: torch.Tensor | None
    slot: torch.Tensor | None
    packing: Packing | None
    precision: Precision
    unverified: bool


class Plan(NamedTuple):
    """Rows that a program owns, rows that it streams at a time, and how its kernel is launched."""

    rows: int
    stream: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Settings:
    """Constants that a kernel is compiled for; the encoding kernel needs the first four only.

    Attributes:
        width, padded: Head size, and the power of two that holds it.
        stream, rows: Rows of a streamed tile and of an owned one, as in ``Plan``.
        terms: Number of pieces of a checksum, see ``Encoding``.
        attempts: Largest number of times that a suspect tile is computed.
        faults: Number of injected faults.
        mask: A value of ``Mask``.
        packed: Sequences are packed, and those of queries and keys end together if causal.
        precision, prediction: Input precision of the products, and of those with checksums.
        operand: Dtype in which tiles are multiplied.
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
    packed: bool = False
    precision: str = "ieee"
    prediction: str = "ieee"
    operand: tl.dtype | None = None


# Tiles, by the bytes of a padded row of an operand, that together with the checks fit the shared
# memory of a multiprocessor, and its registers as far as README.md says.
FORWARD_PLANS = {
    128: Plan(64, 64, 8, 3),
    256: Plan(64, 32, 8, 3),
    512: Plan(64, 32, 4, 2),
    1024: Plan(32, 16, 4, 2),
}
BACKWARD_PLANS = {
    128: Plan(64, 32, 8, 2),
    256: Plan(64, 32, 8, 2),
    512: Plan(32, 32, 4, 2),
    1024: Plan(16, 16, 4, 2),
}


def padded(width: int) -> int:
    """Return the smallest block that holds a head of this size."""
    return max(SMALLEST_BLOCK, int(triton.next_power_of_2(width)))


@dataclass(frozen=True)
class Problem:
    """One attention: its operands, which were checked, and its options.

    Attributes:
        q: [batch, heads, Lq, d]; Lq is the total of packed sequences, which all share the memory.
        k, v: [batch, kv heads, Lk, d].
        mask: [batch, heads, Lq, Lk], broadcast and not copied, or None.
        counts: Counters of suspect and corrected rows; None if nothing is verified.
        slot: Slot of the ledger for rows that stay suspect, or None.
        packing: Sequences of packed operands, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float
    precision: Precision
    counts: torch.Tensor | None
    slot: torch.Tensor | None
    packing: Packing | None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
        counts: torch.Tensor | None = None,
        slot: torch.Tensor | None = None,
        packing: Packing | None = None,
        precision: Precision = "ieee",
        unverified: bool = False,
    ) -> "Problem":
        """Check the caller's arguments, and broadcast the mask.

        Raises:
            TypeError: A dtype is not verified.
            ValueError: Shapes or devices do not fit, the mask requires grad, or counters are given
                for an attention that is not verified.
        """
        if packing is not None:
            packing.check(q, k)
            q, k, v = map(packing.unpacked, (q, k, v))
        check_operands(q, k, v)
        if mask is not None and packing is not None:
            raise ValueError("attention: packed sequences and a mask are given: leave one out")
        if mask is not None:
            mask = broadcast(mask, q, k)
        if not unverified:
            counts = counts_on(q.device, counts)
        elif counts is not None or slot is not None:
            raise ValueError(
                "attention: counts or slot is given and nothing is counted: leave one out"
            )
        if slot is not None and (slot.dtype, slot.shape) != (torch.int32, (1,)):
            raise ValueError(f"attention: slot is {slot.dtype} {tuple(slot.shape)}: give int32 [1]")
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        return cls(q, k, v, mask, causal, scale, precision, counts, slot, packing)

    def vector(self, owned: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a value for each row of q, or of k: [batch, heads, L].

        Packed sequences have [heads, total].
        """
        return tuple(owned.shape[1:3] if self.packing is not None else owned.shape[:3])

    def empty_like(self, owned: torch.Tensor) -> torch.Tensor:
        """Allocate a tensor for results of q's or k's shape, packed if they are."""
        if self.packing is None:
            return torch.empty_like(owned)
        _, heads, total, width = owned.shape
        return owned.new_empty((total, heads, width))

    def unpacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the caller's shape as [batch, heads, L, d]."""
        return tensor if self.packing is None else self.packing.unpacked(tensor)

    def matrix(self, tensor: torch.Tensor) -> Matrix:
        """Return a tensor of the caller's shape with the strides that kernels take."""
        return Matrix.of(self.unpacked(tensor))

    def verdict(self, owned: torch.Tensor) -> Verdict | None:
        """Allocate a verdict over the rows of q or k; None if unverified."""
        if self.counts is None:
            return None
        shape = self.vector(owned)
        status, parts = (owned.new_zeros(shape, dtype=torch.int32) for _ in range(2))
        return Verdict(status, parts, self.counts, self.slot)

    def check_output(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        """Raise ValueError if a tensor is not like Q, or with a dtype, like one column of Q."""
        shape = self.vector(self.q)
        if dtype is None:
            _, heads, length, width = self.q.shape
            shape = (length, heads, width) if self.packing is not None else (*shape, width)
        dtype = dtype or self.q.dtype
        if (tensor.dtype, tensor.shape, tensor.device) != (dtype, shape, self.q.device):
            raise ValueError(
                f"attention: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
                f"give {dtype} {shape} on {self.q.device}"
            )

    @property
    def operands(self) -> Operands:
        """Return the operands with their strides, as arguments of the kernels."""
        mask = None if self.mask is None else Matrix.of(self.mask)
        return Operands(Matrix.of(self.q), Matrix.of(self.k), Matrix.of(self.v), mask)

    @property
    def sizes(self) -> Sizes:
        """Return the numbers of heads and rows, as one argument of the kernels."""
        heads, lengths = self.q.shape[1], (self.q.shape[2], self.k.shape[2])
        if self.packing is not None:
            lengths = self.packing.longest_query, self.packing.longest_key
        return Sizes(heads, heads // self.k.shape[1], *lengths)

    @property
    def starts(self) -> Starts:
        """Return where sequences begin in q and in k."""
        totals = self.q.shape[2], self.k.shape[2]
        if self.packing is not None:
            return self.packing.starts(*totals)
        return Starts(*(Span(None, total) for total in totals))

    def plan(self, plans: dict[int, Plan], length: int) -> Plan:
        """Choose the tiles of a kernel whose programs own rows of operands of some length."""
        size = max(128, padded(self.q.shape[3]) * self.q.dtype.itemsize)
        short = max(SMALLEST_BLOCK, triton.next_power_of_2(length))
        return plans[size]._replace(rows=min(plans[size].rows, short))

    def tolerances(self, length: int, stream: int) -> Tolerances | None:
        """Compute the tolerances of sums over ``length`` streamed rows; None if unverified."""
        if self.counts is None:
            return None
        dtype, width, tiles = self.q.dtype, self.q.shape[3], math.ceil(length / stream)
        return Tolerances(
            Tolerance.of(dtype, None, width, stream, self.precision),
            Tolerance.of(dtype, None, length, width, self.precision),
            (4 * tiles + 2 * stream) * UNIT,
            _EXPONENTIAL_UNITS * UNIT,
        )

    def settings(self, plan: Plan, faults: torch.Tensor | None) -> Settings:
        """Choose the constants for which a kernel is compiled."""
        dtype, width, verify = self.q.dtype, self.q.shape[3], self.counts is not None
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
            verify=verify,
            attempts=ATTEMPTS if verify else 1,
            faults=0 if faults is None else len(faults),
            causal=self.causal,
            mask=int(mask),
            packed=self.packing is not None,
            # For 16-bit operands the precision has no meaning.
            precision=self.precision if dtype == torch.float32 else "ieee",
            prediction="ieee" if exact else "tf32x3",
            operand=dot_dtype(dtype),
        )
