"""How a packed int8 weight is set right: by its own checks, by second copies, by fingerprints."""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.abft.int8_gemm.encoding import (
    column_sums,
    from_digits,
    locate,
    positions,
    row_sums,
    signed_digits,
)
from holdfast.abft.int8_gemm.operands import Twice, padded
from holdfast.digest.tensors import tensor_digest

ATTEMPTS = 6  # bounded: each sets one part right, and memory may rot meanwhile
Call = tuple[float, int, float, int]  # a_scale, a_zero_point, out_scale, out_zero_point


@dataclass(frozen=True)
class Healed:
    """A weight that was found changed and set right: B[row, column]."""

    row: int
    column: int
    corrupted: int
    repaired: int


@dataclass
class Mended:
    """What was set right: weights by name, and which parts of what a product reads."""

    weights: list[Healed] = field(default_factory=list)
    parts: set[str] = field(default_factory=set)  # of "weight", "checks", "scaling"


class Healing:
    """What ``Int8Weights`` is made of, and how each part of it is set right."""

    inner: int
    columns: int
    encoding: str
    device: torch.device
    gemm: Any
    checks: torch.Tensor  # int8 [digits, K], a view of the padded digits that the kernels read
    weighted: torch.Tensor  # int8 [digits, K]
    of_columns: torch.Tensor  # int64 [2, N]
    history: tuple[int, int]  # how often weights and checks were mended
    _digits: torch.Tensor
    _ones: torch.Tensor
    _column_sums: torch.Tensor
    _scale: Twice
    _zero: Twice | None
    _bias: Twice
    _digests: tuple[str, str, str]
    _last: tuple[Call, Any] | None
    _lock: threading.Lock

    def _digest(self) -> tuple[str, str, str]:
        raise NotImplementedError

    def _make(self, b: torch.Tensor) -> Any:
        raise NotImplementedError

    def _padded_digits(self, digits: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def matrix(self) -> torch.Tensor:
        """B = Wᵀ as it is in memory now, int8 [K, N]."""
        b: torch.Tensor = self.gemm.unpack()
        return b[:, : self.columns]

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """S and W, int64 [K] each, as the digits have them."""
        return from_digits(self.checks), from_digits(self.weighted)

    def intact(self) -> bool:
        """Whether all that a product reads is as it was made: packed weight, checks and scaling.

        Scaling is scale, zero point and bias, Σ_k B[k, j], and the scales of the latest call.
        """
        return self._digest() == self._digests and self._scaling_intact()

    def _twice(self) -> list[Twice]:
        return [each for each in (self._scale, self._zero, self._bias) if each is not None]

    def _scaling_intact(self) -> bool:
        if not all(each.intact() for each in self._twice()):
            return False
        last = self._last
        if last is None:
            return True
        fresh = self.gemm.scales(*last[0])
        return all(
            torch.equal(now.view(torch.int32), then.view(torch.int32))
            for now, then in zip(_parts(last[1]), _parts(fresh), strict=True)
        )

    def heal(self, column: int | None = None) -> list[Healed] | None:
        """Set right what changed; the weights that were, none if only other parts were.

        One changed weight for each input is located by the residuals of its row's sum and weighted
        sum, the only one of a ``column`` that is suspected by the column's own, which takes
        microseconds; damaged checks are made anew of an intact weight, scale, zero point and bias
        of their second copy. The result must have the fingerprint that was taken at packing, else
        nothing is changed.

        Returns:
            None if it cannot be healed.
        """
        mended = self.mend(column)
        return None if mended is None else mended.weights

    def mend(self, column: int | None = None) -> Mended | None:
        """``heal``, saying which parts were set right: none if all was intact."""
        mended = Mended()
        # Inference mode: kept scales may have been made in it.
        with self._lock, torch.inference_mode():
            for _ in range(ATTEMPTS):
                if self.intact():
                    return mended
                if not self._mend_part(mended, column):
                    return None
        return None

    def _mend_part(self, mended: Mended, column: int | None) -> bool:
        buffer, checks, _ = (
            now == then for now, then in zip(self._digest(), self._digests, strict=True)
        )
        weights, renewed = self.history
        if not buffer:
            healed = self._heal(column) if checks and self.encoding == "digits" else None
            if healed is None:
                return False
            mended.weights += healed
            mended.parts.add("weight")
            self.history = weights + 1, renewed
        elif not checks:
            self._renew()
            mended.parts.add("checks")
            self.history = weights, renewed + 1
        else:
            mended.parts.add("scaling")
            return self._mend_scaling()
        return True

    def _heal(self, column: int | None) -> list[Healed] | None:
        """Set right a changed weight by checks that are intact."""
        if column is not None and (found := self._heal_column(column)) is not None:
            return [found]
        b = self.matrix()
        located = self._locate(b)
        for each in located:
            if not -128 <= each.repaired <= 127:
                return None
            b[each.row, each.column] = each.repaired
        fresh = self._make(b).buffer
        if tensor_digest(fresh) != self._digests[0]:
            return None
        self.gemm.buffer.copy_(fresh)
        return located

    def _heal_column(self, column: int) -> Healed | None:
        """Heal the one changed weight of a column; None, and nothing changed, if it is not so."""
        values = self.gemm.column(column).long()
        error = int(values.sum()) - int(self.of_columns[0, column])
        weighted = int((values * positions(self.inner, self.device)).sum())
        row = locate(error, weighted - int(self.of_columns[1, column]), self.inner)
        if row is None or not -128 <= int(values[row]) - error <= 127:
            return None
        found = Healed(row, column, int(values[row]), int(values[row]) - error)
        at = self.gemm.address(row, column)
        self.gemm.buffer[at] = found.repaired
        if tensor_digest(self.gemm.buffer) == self._digests[0]:
            return found
        self.gemm.buffer[at] = found.corrupted
        return None

    def _locate(self, b: torch.Tensor) -> list[Healed]:
        (plain, weighted), (true, true_weighted) = row_sums(b), self.sums()
        by, by_weighted = plain - true, weighted - true_weighted
        found = []
        for k in (by | by_weighted).nonzero().flatten().tolist():
            error = int(by[k])
            j = locate(error, int(by_weighted[k]), self.columns)
            if j is not None:
                found.append(Healed(k, j, int(b[k, j]), int(b[k, j]) - error))
        return found

    def _renew(self) -> None:
        """Make the checks anew of a weight that is intact."""
        b = self.matrix()
        fresh, weighted = (signed_digits(sums) for sums in row_sums(b))
        sums = column_sums(b)
        if (fresh.shape, weighted.shape) != (self.checks.shape, self.weighted.shape):
            return  # the weight has rotted since it was compared
        self._digits.copy_(self._padded_digits(fresh))
        self.weighted.copy_(weighted)
        self.of_columns.copy_(sums)

    def _mend_scaling(self) -> bool:
        """Make anew what dequantises of its second copy, or of a weight that is intact."""
        mended = [each.mend() for each in self._twice()]
        if not all(mended):
            return False
        self._ones.fill_(1)
        self._column_sums.copy_(padded(column_sums(self.matrix())[0].int()))
        last = self._last
        if last is not None:
            for now, then in zip(_parts(last[1]), _parts(self.gemm.scales(*last[0])), strict=True):
                now.copy_(then)
        return True


def _parts(scales: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return scales.shift, scales.scale, scales.addend
