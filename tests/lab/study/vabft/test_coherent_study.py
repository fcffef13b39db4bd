"""``vabft.coherent``: the hole is shown, and the verdict is on ours."""

import pytest
import torch
from study_runs import rows_of

from holdfast.abft.thresholds.protocol import Product
from holdfast_lab.distributions import COHERENT, RANDOM
from holdfast_lab.study.vabft import alarms
from holdfast_lab.study.vabft.residuals import DTYPES, Margins, residuals


def margins_of(name: str, precision: str) -> Margins:
    draw = (RANDOM | COHERENT)[name]
    a, b = draw(32, 1000, 64, DTYPES[precision], torch.Generator().manual_seed(0))
    c, margins = a @ b, Margins()
    margins.add(Product(a, b, c, c.dtype), residuals(a, b, c))
    return margins


def test_constant_matrices_are_flagged_by_vabft_and_not_by_ours() -> None:
    share = margins_of("constant", "fp32").share_over()
    assert share["vabft"] == 100
    assert share["rounding"] == share["analytic"] == 0
    assert margins_of("n01", "fp32").share_over()["vabft"] == 0


def test_a_flagged_row_is_outside_the_papers_claim_and_explained() -> None:
    margins = margins_of("constant", "fp32")
    row = alarms.alarm_row("t", {}, margins, alarms.NO_FALSE_POSITIVE_COHERENT)
    assert "vabft" in row.differing()
    low, high = row.intervals["vabft"]
    assert 80 < low < high == 100
    assert "rounding" not in row.intervals


def test_every_distribution_and_precision_is_covered() -> None:
    *rows, total = rows_of("vabft.coherent")
    assert total.case["rows"] == sum(row.case["rows"] for row in rows)
    low, high = total.intervals["rounding"]
    assert low == 0 < high == pytest.approx(300 / total.case["rows"])
    covered = {(row.case["distribution"], row.case["precision"]) for row in rows}
    assert covered == {(name, dtype) for name in COHERENT | RANDOM for dtype in DTYPES}
