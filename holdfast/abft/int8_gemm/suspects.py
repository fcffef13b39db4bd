"""Diagnosis of int8 product rows whose check failed; ``abft.policy`` handles the findings.

First, weights, checksums and scaling are compared with the fingerprints taken when they were
packed; what changed is repaired and the product computed again. Then each suspect row is corrected
in the one element that its two residuals locate, if computing that element again gives the same
value; otherwise the row is computed again in plain torch, and either it differs, or the check
itself was wrong. All of this is repeated a few times, as memory may change meanwhile.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.abft.int8_gemm.encoding import MODULUS, locate, positions
from holdfast.abft.int8_gemm.reference import Scales, dequantise, multiply_exactly
from holdfast.abft.int8_gemm.weight_repair import Mended
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.abft.policy import (
    Damage,
    FaultContext,
    Finding,
    Findings,
    Repair,
    Restored,
    Unrepaired,
    decide,
    decide_each,
    settle_by_recomputing,
)
from holdfast.events import EventKind
from holdfast.sites import SiteTuple

ATTEMPTS = 4  # limit of attempts, as weights may change again while they are repaired
_BEYOND = (
    "the packed weight, its checks or its scaling changed beyond healing: register_source() would "
    "restore weights, or load the layer again"
)
_Rows = tuple[torch.Tensor, torch.Tensor]  # int64; int32 [rows, columns and check columns]


@dataclass(frozen=True)
class SuspectRows:
    """A product with rows whose check failed.

    Attributes:
        rows: Numbers of the suspect rows, int64.
        accumulators: Accumulators of these rows, int32 [rows, columns and check columns].
        since: History of the weights before the product, if known.
    """

    site: SiteTuple
    weights: Int8Weights
    a: torch.Tensor
    output: torch.Tensor
    scales: Scales
    rows: torch.Tensor
    accumulators: torch.Tensor
    since: tuple[int, int] | None = None


def resolve(case: SuspectRows) -> None:
    """Diagnose every suspect row, and repair ``case.output`` bit for bit.

    Raises:
        UncorrectableFault: A fault was not repaired, and no caller is collecting faults.
    """
    context = FaultContext(case.site, device=str(case.output.device))
    decide(context, lambda correction: _of_rows(case))


def scrub(weights: Int8Weights, site: SiteTuple) -> bool:
    """Compare weight, scales and bias with their fingerprints; return whether any had changed.

    Raises:
        UncorrectableFault: A change was not repaired, and no caller is collecting faults.
    """
    if weights.intact():
        return False
    reason = "the packed weight, its checks or its scaling changed"
    damage = Damage(EventKind.OPERAND_FAULT, reason, lambda: _found(weights, weights.mend()))
    decide_each(FaultContext(site, device=str(weights.device)), [damage])
    return True


def _of_rows(case: SuspectRows) -> Findings:
    suspects: _Rows = case.rows, case.accumulators
    since = case.since or case.weights.history
    for _ in range(ATTEMPTS):
        mended: list[Mended | None] = []
        look = partial(_mend, case, suspects, mended)
        reason = f"row {int(suspects[0][0])} contradicts its check"
        if not (yield Damage(EventKind.GEMM_FAULT, reason, look)):
            return
        changed = bool(mended[0] and mended[0].parts)
        if not changed and case.weights.history == since:
            left = yield from _repair_rows(case, suspects)
            if left is None:
                return
            suspects = left
            continue
        if not changed:
            yield _changed_by_others(case, since, len(suspects[0]))
        since = case.weights.history
        again = case.weights.gemm.multiply(case.a, case.output, case.scales, True)
        if again is None:
            return
        suspects = again
    reason = f"row {int(suspects[0][0])} contradicts its check when computed again"
    yield Unrepaired(EventKind.GEMM_PERSISTENT, reason)


def _mend(case: SuspectRows, suspects: _Rows, mended: list[Mended | None]) -> list[Finding]:
    """Repair changed operands; append to ``mended`` what was repaired."""
    mended.append(case.weights.mend(_suspected_column(case, suspects)))
    return _found(case.weights, mended[0])


def _found(weights: Int8Weights, mended: Mended | None) -> list[Finding]:
    """Return findings about what was repaired in the operands of a product."""
    if mended is None:
        return [Unrepaired(EventKind.OPERAND_FAULT, _BEYOND)]
    found: list[Finding] = []
    for each in mended.weights:
        index: dict[str, object] = {"method": "checksum", "index": [each.row, each.column]}
        values = {"corrupted": each.corrupted, "repaired": each.repaired}
        found.append(Restored(EventKind.OPERAND_FAULT, index | values))
    for output in mended.outputs:
        found.append(Restored(EventKind.OPERAND_FAULT, {"method": "source", "row": output}))
    if "weight" in mended.parts and not (mended.weights or mended.outputs):
        found.append(Restored(EventKind.OPERAND_FAULT, {"method": "checksum", "part": "padding"}))
    if "checks" in mended.parts:
        found.append(Restored(EventKind.CHECKSUM_FAULT, {"entries": len(weights.checks)}))
    if "scaling" in mended.parts:
        found.append(Restored(EventKind.OPERAND_FAULT, {"method": "copy", "part": "scaling"}))
    return found


def _changed_by_others(case: SuspectRows, since: tuple[int, int], rows: int) -> Restored:
    """Return the finding that another thread repaired what the product had read before."""
    kind = (
        EventKind.OPERAND_FAULT if case.weights.history[0] != since[0] else EventKind.CHECKSUM_FAULT
    )
    return Restored(kind, {"method": "recompute", "rows": rows, "healed": "by another thread"})


def _repair_rows(case: SuspectRows, suspects: _Rows) -> Generator[Finding, bool, _Rows | None]:
    """Repair rows of a product whose operands are intact; return the rows that stay suspect."""
    left = []
    for i, (row, c) in enumerate(zip(suspects[0].tolist(), suspects[1], strict=True)):
        repair = _repair(case, row, c)
        if repair is None:
            left.append(i)
        else:
            yield repair
    return (suspects[0][left], suspects[1][left]) if left else None


def _repair(case: SuspectRows, row: int, c: torch.Tensor) -> Finding | None:
    """Return the repair of one row, or None if no computation of it satisfies its check."""
    weights, a = case.weights, case.a[row : row + 1]
    product = c[: weights.columns].clone()
    method, corrected = "checksum", _by_checksum(weights, a, product)
    if corrected is None:
        method, corrected = "recompute", _recomputed(weights, a)
    if corrected is None:
        return None
    right = corrected
    wrong = (right != product).nonzero().flatten()
    if not len(wrong):
        _write(case, row, right)
        return Restored(EventKind.CHECKSUM_FAULT, {"entries": 1, "row": row})
    column = int(wrong[0])
    detail: dict[str, object] = {
        "method": method,
        "rows": 1,
        "index": [row, column],
        "elements": len(wrong),
        "corrupted": int(product[column]),
        "repaired": int(right[column]),
    }
    refusal = f"row {row} contradicts its check"
    return Repair(EventKind.GEMM_FAULT, detail, lambda: _write(case, row, right), refusal)


def _by_checksum(
    weights: Int8Weights, a: torch.Tensor, product: torch.Tensor
) -> torch.Tensor | None:
    """Correct a row's one wrong element; return None if computing it again does not agree."""
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
    """Return the error of a row's sum, and the column of the wrong element if there is only one."""
    if weights.encoding != "digits":
        return 0, None
    wide, of_a = product.long(), a[0].long()
    plain, weighted = (int((of_a * sums).sum()) for sums in weights.sums())
    error = int(wide.sum()) - plain
    by_weight = int((wide * positions(len(wide), wide.device)).sum()) - weighted
    return error, locate(error, by_weight, weights.columns)


def _suspected_column(case: SuspectRows, suspects: _Rows) -> int | None:
    row = int(suspects[0][0])
    product = suspects[1][0, : case.weights.columns]
    return _error_of(case.weights, case.a[row : row + 1], product)[1]


def _recomputed(weights: Int8Weights, a: torch.Tensor) -> torch.Tensor | None:
    """Compute a row in plain torch until it satisfies its check, int32 [columns]."""

    def holds(row: torch.Tensor) -> bool:
        total = int(row[: weights.columns].sum(dtype=torch.int64))
        if weights.encoding == "digits":
            return total == int((a[0].long() * weights.sums()[0]).sum())
        return (total - int(row[weights.columns])) % MODULUS == 0

    row = settle_by_recomputing(
        lambda: multiply_exactly(a, weights.gemm.unpack())[0], holds, lambda left, right: False
    )
    return None if row is None else row[: weights.columns]


def _write(case: SuspectRows, row: int, product: torch.Tensor) -> None:
    weights = case.weights
    zero = None if weights.zero_point is None else weights.zero_point.expand(weights.columns)
    a, out = case.a[row : row + 1], case.output
    out[row] = dequantise(product[None], a, case.scales, zero, weights.relu, out.dtype)[0]
