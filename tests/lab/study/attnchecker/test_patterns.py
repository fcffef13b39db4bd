"""Patterns: each shape and each type, made by hand."""

from math import inf, nan

import torch
from case_loops import for_each

from holdfast_lab.study.attnchecker.patterns import pattern

CLEAN = torch.arange(24.0).reshape(2, 3, 4)


@for_each(
    ("place", "values", "text"),
    [
        ((0, 1, 2), inf, "0D-∞"),
        ((0, 1, 2), -inf, "0D-∞"),
        ((1, 2, 0), nan, "0D-Θ"),
        ((1, 2, 0), -1e11, "0D-N"),
        ((1, 2, 0), 1e9, "0D-~"),
        ((0, 1), nan, "1R-Θ"),
        ((0, 1), torch.tensor([inf, -inf, inf, inf]), "1R-∞*"),
        ((0, 1, slice(2)), inf, "1R-∞"),
        ((0, slice(None), 3), torch.tensor([inf, 1e20, nan]), "1C-M"),
        ((0, slice(None), 3), torch.tensor([inf, nan, 7.0]), "1C-M"),
        ((0, slice(1, 3), slice(1, 3)), nan, "2D-Θ"),
        ((slice(None), 1, 1), nan, "2D-Θ"),
    ],
)
def test_a_pattern_is_recognised(place: object, values: object, text: str) -> None:
    faulty = CLEAN.clone()
    faulty[place] = values  # type: ignore[index,assignment]
    assert str(pattern(CLEAN, faulty)) == text


def test_matrices_need_not_be_contiguous_and_what_did_not_change_is_clean() -> None:
    spoilt = CLEAN.clone()
    spoilt[0, 0, 0] = nan
    assert str(pattern(spoilt, spoilt.clone())) == "-"
    faulty = CLEAN.clone()
    faulty[0, 1, 2] = inf
    assert str(pattern(CLEAN[0].T, faulty[0].T)) == "0D-∞"
    assert str(pattern(CLEAN[0, :, 1:3], faulty[0, :, 1:3])) == "0D-∞"
