"""Patterns of wrong elements in a matrix and of their values, as in section 2.2."""

from dataclasses import dataclass

import torch

from holdfast.abft.thresholds.extreme import EXTREME

CLEAN, ELEMENT, ROW, COLUMN, BEYOND = "-", "0D", "1R", "1C", "2D"
INFINITE, BOTH_SIGNS, NOT_A_NUMBER, NEAR, MIXED, MODERATE = "∞", "∞*", "Θ", "N", "M", "~"


@dataclass(frozen=True)
class Pattern:
    """A shape (``-``, ``0D``, ``1R``, ``1C``, ``2D``) and a type of values, in the paper's signs.

    The type ``~`` is not the paper's: values that changed, but not to extremes.
    """

    shape: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.shape}-{self.kind}" if self.kind else self.shape


def pattern(clean: torch.Tensor, faulty: torch.Tensor) -> Pattern:
    """Classify the pattern of wrong elements that a fault left in a matrix.

    An element is wrong if its bits differ. The fp32 matrices are [rows, columns] or [blocks, rows,
    columns], where wrong elements in several blocks are a 2D pattern.
    """
    changed = clean.contiguous().view(torch.int32) != faulty.contiguous().view(torch.int32)
    if not changed.any():
        return Pattern(CLEAN)
    return Pattern(_shape(changed), _kind(faulty[changed]))


def _shape(changed: torch.Tensor) -> str:
    blocks = changed.reshape(-1, *changed.shape[-2:])
    struck = blocks[blocks.any(-1).any(-1)]
    if len(struck) > 1:
        return BEYOND
    rows, columns = int(struck[0].any(1).sum()), int(struck[0].any(0).sum())
    if rows == 1:
        return ELEMENT if columns == 1 else ROW
    return COLUMN if columns == 1 else BEYOND


def _kind(values: torch.Tensor) -> str:
    kinds = []
    if values.isposinf().any() or values.isneginf().any():
        both = bool(values.isposinf().any() and values.isneginf().any())
        kinds.append(BOTH_SIGNS if both else INFINITE)
    if values.isnan().any():
        kinds.append(NOT_A_NUMBER)
    if (values.isfinite() & (values.abs() > EXTREME)).any():
        kinds.append(NEAR)
    if not kinds:
        return MODERATE
    return kinds[0] if len(kinds) == 1 else MIXED
