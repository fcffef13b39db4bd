"""Repair of a packed int8 weight by its checksums, second copies, fingerprints and source."""

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
from holdfast.abft.source import row_from
from holdfast.digest.tensors import tensor_digest

if TYPE_CHECKING:
    from holdfast.abft.int8_gemm.weights import Int8Weights

ATTEMPTS = 6  # limit of attempts: each repairs one part, and memory may change meanwhile
PASSES = 8  # limit of passes over the rows and columns of B in which changed elements are located


@dataclass(frozen=True)
class Healed:
    """An element B[row, column] of a packed weight that had changed and was repaired."""

    row: int
    column: int
    corrupted: int
    repaired: int


@dataclass
class Mended:
    """The parts of a product's operands that were repaired.

    ``weights`` are the elements of B that its checksums located, and ``outputs`` the numbers of the
    outputs whose weights came from the source.
    """

    weights: list[Healed] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
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
        if not _heal(weights, mended, column, trusted=checks):
            return False
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


def _heal(weights: "Int8Weights", mended: Mended, column: int | None, *, trusted: bool) -> bool:
    """Repair changed elements of a weight by its checksums, if they are ``trusted``, or source."""
    trusted = trusted and weights.encoding == "digits"
    if trusted and column is not None and (found := _heal_column(weights, column)) is not None:
        mended.weights.append(found)
        return True
    b = weights.matrix()
    located = _peel(weights, b) if trusted else []
    if trusted and _adopt(weights, b):
        mended.weights += located
        return True
    if weights.source is None:
        return False
    outputs = _ask_source(weights, trusted=trusted)
    mended.outputs += outputs
    return bool(outputs)


def _adopt(weights: "Int8Weights", b: torch.Tensor) -> bool:
    """Take over a repaired B if it has the fingerprint of the one that was packed."""
    fresh = weights._make(b).buffer
    if tensor_digest(fresh) != weights._digests[0]:
        return False
    weights.gemm.buffer.copy_(fresh)
    return True


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


def _peel(weights: "Int8Weights", b: torch.Tensor) -> list[Healed]:
    """Correct changed elements of B, in place, as long as one is alone in its row or column.

    The residuals of a row locate its only changed element, and so do those of a column; each
    correction may leave another element alone.
    """
    rows = torch.stack(row_sums(b)) - torch.stack(weights.sums())
    columns = column_sums(b) - weights.of_columns
    before: dict[tuple[int, int], int] = {}
    for _ in range(PASSES):
        count = len(before)
        for of_lines, others, by_row in ((rows, columns, True), (columns, rows, False)):
            for line in of_lines.any(0).nonzero().flatten().tolist():
                error, weighted = of_lines[:, line].tolist()
                other = locate(error, weighted, others.shape[1])
                if other is None or not others[:, other].any():
                    continue
                k, j = (line, other) if by_row else (other, line)
                now = int(b[k, j])
                if not -128 <= now - error <= 127:
                    continue
                before.setdefault((k, j), now)
                b[k, j] = now - error
                rows[:, k] -= torch.tensor([error, (j + 1) * error], device=b.device)
                columns[:, j] -= torch.tensor([error, (k + 1) * error], device=b.device)
        if len(before) == count:
            break
    healed = [Healed(k, j, old, int(b[k, j])) for (k, j), old in before.items()]
    return [each for each in healed if each.repaired != each.corrupted]


def _ask_source(weights: "Int8Weights", *, trusted: bool) -> list[int]:
    """Replace outputs of the weight by those of its source; return the numbers of the changed ones.

    Only outputs whose sums changed are asked for, if the checksums are ``trusted``.
    """
    assert weights.source is not None
    b = weights.matrix()
    wrong = list(range(weights.columns))
    if trusted:
        wrong = (column_sums(b) != weights.of_columns).any(0).nonzero().flatten().tolist()
    changed = []
    for output in wrong:
        given = row_from(
            weights.source,
            output,
            of="the weight",
            stored=(torch.int8, weights.inner),
            count=weights.inner,
            pack=lambda floats, output=output: weights.quantised(floats, output),  # type: ignore[misc]
        ).to(b.device)
        if not torch.equal(b[:, output], given):
            b[:, output] = given
            changed.append(output)
    return changed if _adopt(weights, b) else []


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
