"""Repair of a packed int8 weight by its checksums, second copies and fingerprints."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from holdfast.abft.int8_gemm.encoding import (
    column_sums,
    locate,
    positions,
    row_sums,
    signed_digits,
)
from holdfast.abft.int8_gemm.operands import padded
from holdfast.abft.int8_gemm.reference import Scales
from holdfast.digest.tensors import tensor_digest

if TYPE_CHECKING:
    from holdfast.abft.int8_gemm.weights import Int8Weights

ATTEMPTS = 6  # limit of attempts: each repairs one part, and memory may change meanwhile


@dataclass(frozen=True)
class Healed:
    """An element B[row, column] of a packed weight that had changed and was repaired."""

    row: int
    column: int
    corrupted: int
    repaired: int


@dataclass
class Mended:
    """The parts of a product's operands that were repaired, and the single weights among them."""

    weights: list[Healed] = field(default_factory=list)
    parts: set[str] = field(default_factory=set)  # of "weight", "checks", "scaling"


def mend(weights: "Int8Weights", column: int | None = None) -> Mended | None:
    """Repair a packed weight, its checksums, scales and bias; return None if not possible.

    If only one column of the weight is suspected, its own sums locate the change much faster.
    """
    mended = Mended()
    # The scales of the latest call may have been created in inference mode.
    with weights._lock, torch.inference_mode():
        for _ in range(ATTEMPTS):
            if weights.intact():
                return mended
            if not _mend_part(weights, mended, column):
                return None
    return None


def _mend_part(weights: "Int8Weights", mended: Mended, column: int | None) -> bool:
    buffer, checks, _ = (
        now == then for now, then in zip(weights._digest(), weights._digests, strict=True)
    )
    healed_before, renewed_before = weights.history
    if not buffer:
        healed = _heal(weights, column) if checks and weights.encoding == "digits" else None
        if healed is None:
            return False
        mended.weights += healed
        mended.parts.add("weight")
        weights.history = healed_before + 1, renewed_before
    elif not checks:
        _renew(weights)
        mended.parts.add("checks")
        weights.history = healed_before, renewed_before + 1
    else:
        mended.parts.add("scaling")
        return _mend_scaling(weights)
    return True


def _heal(weights: "Int8Weights", column: int | None) -> list[Healed] | None:
    """Repair changed elements of a weight whose checksums are intact."""
    if column is not None and (found := _heal_column(weights, column)) is not None:
        return [found]
    b = weights.matrix()
    located = _locate(weights, b)
    for each in located:
        if not -128 <= each.repaired <= 127:
            return None
        b[each.row, each.column] = each.repaired
    fresh = weights._make(b).buffer
    if tensor_digest(fresh) != weights._digests[0]:
        return None
    weights.gemm.buffer.copy_(fresh)
    return located


def _heal_column(weights: "Int8Weights", column: int) -> Healed | None:
    """Repair the one changed weight of a column; return None if not exactly one changed."""
    values = weights.gemm.column(column).long()
    error = int(values.sum()) - int(weights.of_columns[0, column])
    weighted = int((values * positions(weights.inner, weights.device)).sum())
    row = locate(error, weighted - int(weights.of_columns[1, column]), weights.inner)
    if row is None or not -128 <= int(values[row]) - error <= 127:
        return None
    found = Healed(row, column, int(values[row]), int(values[row]) - error)
    at = weights.gemm.address(row, column)
    weights.gemm.buffer[at] = found.repaired
    if tensor_digest(weights.gemm.buffer) == weights._digests[0]:
        return found
    weights.gemm.buffer[at] = found.corrupted
    return None


def _locate(weights: "Int8Weights", b: torch.Tensor) -> list[Healed]:
    (plain, weighted), (true, true_weighted) = row_sums(b), weights.sums()
    by, by_weighted = plain - true, weighted - true_weighted
    found = []
    for k in (by | by_weighted).nonzero().flatten().tolist():
        error = int(by[k])
        j = locate(error, int(by_weighted[k]), weights.columns)
        if j is not None:
            found.append(Healed(k, j, int(b[k, j]), int(b[k, j]) - error))
    return found


def _renew(weights: "Int8Weights") -> None:
    """Recompute the checksums of a weight that is intact."""
    b = weights.matrix()
    fresh, weighted = (signed_digits(sums) for sums in row_sums(b))
    sums = column_sums(b)
    if (fresh.shape, weighted.shape) != (weights.checks.shape, weights.weighted.shape):
        return  # the weight changed since it was compared
    weights._digits.copy_(weights._padded_digits(fresh))
    weights.weighted.copy_(weighted)
    weights.of_columns.copy_(sums)


def _mend_scaling(weights: "Int8Weights") -> bool:
    """Restore scale, zero point and bias from their second copy, or from an intact weight."""
    mended = [each.mend() for each in weights.twice()]
    if not all(mended):
        return False
    weights._ones.fill_(1)
    weights._column_sums.copy_(padded(column_sums(weights.matrix())[0].int()))
    last = weights._last
    if last is not None:
        for now, then in zip(
            parts_of(last[1]), parts_of(weights.gemm.scales(*last[0])), strict=True
        ):
            now.copy_(then)
    return True


def parts_of(scales: Scales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensors of scales, zero points and bias that a call uses."""
    return scales.shift, scales.scale, scales.addend
