"""The paper's thresholds, recomputed at its own sizes, and the e_max of its own protocol."""

import pytest
import torch
from case_loops import for_each

from holdfast.abft.thresholds.protocol import Product
from holdfast_lab.distributions import RANDOM
from holdfast_lab.study import Verdict
from holdfast_lab.study.vabft import emax, paper, tightness
from holdfast_lab.study.vabft.residuals import DTYPES, Margins, residuals


@for_each("precision", ["fp64", "fp32", "bf16"])
@for_each("size", [128, 512])
def test_both_published_thresholds_are_the_tables_as_printed(precision: str, size: int) -> None:
    draw = RANDOM[tightness.PAPER_DISTRIBUTION[precision]]
    generator, margins = torch.Generator().manual_seed(0), Margins()
    for _ in range(3):
        a, b = draw(64, size, size, DTYPES[precision], generator)
        c = a @ b
        members = tightness.PAPER_MEMBERS[precision]
        margins.add(Product(a, b, c, c.dtype), residuals(a, b, c), members)
    published = paper.tightness(precision, size)
    for column, name in (("T of A-ABFT", "aabft"), ("T of V-ABFT", "vabft")):
        threshold, off = margins[name].threshold, margins[name].threshold_error
        bounds = threshold * (1 - off), threshold * (1 + off)
        assert published[column].verdict(bounds) == Verdict.REPRODUCED, (name, bounds)


def test_growth_is_that_of_the_tables() -> None:
    assert paper.growth("fp64", 1, 128, 2048).value == pytest.approx(1.5, abs=0.01)  # √(n³)
    assert paper.growth("bf16", 1, 128, 2048).value == pytest.approx(
        2.5, abs=0.05
    )  # with y = Σ_j B_kj


@for_each("dtype", list(DTYPES.values()))
def test_the_protocols_operands_are_positive_and_their_checksums_finite(dtype: torch.dtype) -> None:
    a, b = emax.positive_operands(512, dtype, torch.Generator().manual_seed(0))
    assert a.dtype == b.dtype == dtype
    assert min(float(a.min()), float(b.min())) >= 0
    assert (a @ b).sum(-1).isfinite().all()
