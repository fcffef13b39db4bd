"""The studies of real attention: what they count is right, and a defect shows in the verdict."""

from dataclasses import replace

import pytest
import torch
from case_loops import for_each

from holdfast_lab.study.attnchecker import gemm_share, propagation
from holdfast_lab.study.attnchecker.models import TINY, subject
from holdfast_lab.study.attnchecker.paper import SAME_TYPE
from holdfast_lab.study.attnchecker.probe import Strike

pytestmark = pytest.mark.study

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")


def test_the_arithmetic_counted_is_that_of_the_formulas() -> None:
    length, width, heads = 16, 32, 4
    for name in gemm_share.BLOCKS:
        counted = gemm_share.count(name, length, width, heads)
        products = 8 * length * width**2 + 4 * length**2 * width
        assert counted.of("mm", "addmm", "bmm") == products
        assert counted.of("_softmax") == 3 * heads * length**2
        assert 1 <= counted.operations["mul"] + counted.operations["add"] <= 3 * heads * length**2


@for_each(
    ("matrix", "kind", "expected"),
    [("Q", "nan", {"AS", "AP", "CL", "O"}), ("V", "inf", {"CL", "O"}), ("CL", "near_inf", {"O"})],
)
def test_propagation_counts_what_has_the_papers_shape(
    matrix: str, kind: str, expected: set[str]
) -> None:
    case = subject("roberta", replace(TINY, layers=1))
    strike = Strike(matrix, kind, torch.Generator().manual_seed(0))
    found = propagation.spread(case, strike, trials=6)
    row = propagation.row(case.name, strike, 6, found)
    assert set(found) == expected
    assert {found[m].total() for m in expected} == {6}
    assert all(row.measured[m] == 100 for m in expected)
    assert (row.measured[SAME_TYPE] == 100) == (kind == "nan")
