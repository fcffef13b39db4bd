"""What happens to rows of an int8 product whose check failed: exact, or an UncorrectableFault.

In this order: weights, checks and scaling are compared with the fingerprints taken when they were
packed, what changed is healed and the product computed again; then each row is corrected in the one
element that its two residuals name, once arithmetic of that element alone agrees; else the row is
computed again in plain torch, and either it differs, or the check itself was struck. All of it a
few times over, as memory may rot meanwhile.
"""

import time
from dataclasses import dataclass, field

import torch

from holdfast.abft.gemm.recovery import correction, give_up, report
from holdfast.abft.int8_gemm.encoding import MODULUS, locate, positions
from holdfast.abft.int8_gemm.torch_backend import Scales, dequantise, multiply_exactly
from holdfast.abft.int8_gemm.weights import Int8Weights, Mended
from holdfast.sites import SiteTuple

RERUNS = 3  # bounded: a product that is struck again each time is given up
ATTEMPTS = 4  # bounded: weights may rot while they are healed, but not for ever
_BEYOND = "the packed weight, its checks or its scaling changed beyond healing"
_Rows = tuple[torch.Tensor, torch.Tensor]  # int64; int32 [rows, columns and check columns]


@dataclass(frozen=True)
class Case:
    """A product with rows whose check failed."""

    site: SiteTuple
    weights: Int8Weights
    a: torch.Tensor
    output: torch.Tensor
    scales: Scales
    rows: torch.Tensor  # int64
    accumulators: torch.Tensor  # int32 [rows, columns and check columns]
    since: tuple[int, int] | None = None  # the weights' history before the product, if known
    started_s: float = field(default_factory=time.perf_counter)


def resolve(case: Case) -> None:
    """Repair every row of ``case.output``, bit for bit, and record what was wrong.

    Raises:
        UncorrectableFault: it cannot be, or nothing is to be changed, and nobody defers faults.
    """
    row = int(case.rows[0])
    if correction() == "detect":
        give_up(case, "gemm_fault", f"row {row} contradicts its check")
        return
    suspects: _Rows = case.rows, case.accumulators
    since = case.since or case.weights.history
    for _ in range(ATTEMPTS):
        mended = case.weights.mend(_suspected_column(case, suspects))
        if mended is None:
            give_up(case, "operand_fault", _BEYOND)
            return
        _report_mended(case, mended)
        if not mended.parts and case.weights.history == since:
            left = _repair_rows(case, suspects)
            if left is None:
                return
            suspects = left
            continue
        if not mended.parts:
            _report_others(case, since, len(suspects[0]))
        since = case.weights.history
        again = case.weights.gemm.multiply(case.a, case.output, case.scales, True)
        if again is None:
            return
        suspects = again
    row = int(suspects[0][0])
    give_up(case, "gemm_persistent", f"row {row} contradicts its check when computed again")


def scrub(weights: Int8Weights, site: SiteTuple) -> bool:
    """Compare all that a product reads with its fingerprints, heal and record what changed.

    Returns:
        Whether anything had changed.

    Raises:
        UncorrectableFault: it cannot be healed, or nothing is to be changed, and nobody defers
            faults.
    """
    case = _Scrub(site, weights, weights.gemm.buffer)
    if correction() == "detect":
        if weights.intact():
            return False
        give_up(case, "operand_fault", "the packed weight, its checks or its scaling changed")
        return True
    mended = weights.mend()
    if mended is None:
        give_up(case, "operand_fault", _BEYOND)
        return True
    _report_mended(case, mended)
    return bool(mended.parts)


@dataclass(frozen=True)
class _Scrub:
    site: SiteTuple
    weights: Int8Weights
    output: torch.Tensor
    started_s: float = field(default_factory=time.perf_counter)


def _report_mended(case: Case | _Scrub, mended: Mended) -> None:
    for each in mended.weights:
        report(
            case,
            "operand_fault",
            rung="correct",
            method="checksum",
            index=[each.row, each.column],
            corrupted=each.corrupted,
            repaired=each.repaired,
        )
    if "weight" in mended.parts and not mended.weights:
        report(case, "operand_fault", rung="correct", method="checksum", part="padding")
    if "checks" in mended.parts:
        report(case, "checksum_fault", rung="correct", entries=len(case.weights.checks))
    if "scaling" in mended.parts:
        report(case, "operand_fault", rung="correct", method="copy", part="scaling")


def _report_others(case: Case, since: tuple[int, int], rows: int) -> None:
    """The product read what another thread has healed, and named, meanwhile."""
    kind = "operand_fault" if case.weights.history[0] != since[0] else "checksum_fault"
    report(case, kind, rung="correct", method="recompute", rows=rows, healed="by another thread")


def _repair_rows(case: Case, suspects: _Rows) -> _Rows | None:
    """Correct rows of a product whose operands are intact; those that could not be."""
    left = [
        i
        for i, (row, c) in enumerate(zip(suspects[0].tolist(), suspects[1], strict=True))
        if not _repair(case, row, c)
    ]
    return (suspects[0][left], suspects[1][left]) if left else None


def _repair(case: Case, row: int, c: torch.Tensor) -> bool:
    """Correct one row; whether it could be."""
    weights, a = case.weights, case.a[row : row + 1]
    columns = weights.columns
    product = c[:columns].clone()
    corrected = _by_checksum(weights, a, product)
    method = "checksum"
    if corrected is None:
        method, corrected = "recompute", _recomputed(weights, a)
        if corrected is None:
            return False
    wrong = (corrected != product).nonzero().flatten()
    if not len(wrong):
        report(case, "checksum_fault", rung="correct", entries=1, row=row)
        _write(case, row, corrected)
        return True
    _write(case, row, corrected)
    column = int(wrong[0])
    report(
        case,
        "gemm_fault",
        rung="correct",
        method=method,
        rows=1,
        index=[row, column],
        elements=len(wrong),
        corrupted=int(product[column]),
        repaired=int(corrected[column]),
    )
    return True


def _by_checksum(
    weights: Int8Weights, a: torch.Tensor, product: torch.Tensor
) -> torch.Tensor | None:
    """The row without its one wrong element; None unless that element's own product agrees."""
    error, column = _error_of(weights, a, product)
    if column is None:
        return None
    true = int((a[0].long() * weights.gemm.column(column).long()).sum())
    if int(product[column]) - error != true:
        return None
    corrected = product.clone()
    corrected[column] = true
    return corrected


def _error_of(
    weights: Int8Weights, a: torch.Tensor, product: torch.Tensor
) -> tuple[int, int | None]:
    """The error of a row, and the column it is in if it is in one alone."""
    if weights.encoding != "digits":
        return 0, None
    wide, of_a = product.long(), a[0].long()
    plain, weighted = (int((of_a * sums).sum()) for sums in weights.sums())
    error = int(wide.sum()) - plain
    by_weight = int((wide * positions(len(wide), wide.device)).sum()) - weighted
    return error, locate(error, by_weight, weights.columns)


def _suspected_column(case: Case, suspects: _Rows) -> int | None:
    row = int(suspects[0][0])
    product = suspects[1][0, : case.weights.columns]
    return _error_of(case.weights, case.a[row : row + 1], product)[1]


def _recomputed(weights: Int8Weights, a: torch.Tensor) -> torch.Tensor | None:
    """The row in plain torch, if that satisfies its check; int32 [columns]."""
    for _ in range(RERUNS):
        row = multiply_exactly(a, weights.gemm.unpack())[0]
        product = row[: weights.columns]
        total = int(product.sum(dtype=torch.int64))
        if weights.encoding == "digits":
            holds = total == int((a[0].long() * weights.sums()[0]).sum())
        else:
            holds = (total - int(row[weights.columns])) % MODULUS == 0
        if holds:
            return product
    return None


def _write(case: Case, row: int, product: torch.Tensor) -> None:
    weights = case.weights
    zero = None if weights.zero_point is None else weights.zero_point.expand(weights.columns)
    a, out = case.a[row : row + 1], case.output
    out[row] = dequantise(product[None], a, case.scales, zero, weights.relu, out.dtype)[0]
