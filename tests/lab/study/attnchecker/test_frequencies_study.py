"""``attnchecker.frequencies``: the target as printed, the one that gives Figure 10, the verdict."""

import pytest
import torch
from study_runs import rows_of

from holdfast.planner.attention import GEMMS, AttentionSize, gemm_flops
from holdfast_lab.study import Row, Verdict
from holdfast_lab.study.attnchecker import frequencies as study
from holdfast_lab.study.attnchecker.paper import FREQUENCY_RATES
from holdfast_lab.study.attnchecker.section_costs import operands

SMALL = AttentionSize(2, 5, 12, 3)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return rows_of(study.STUDY.name)


def of(rows: list[Row], table: str) -> list[Row]:
    return [row for row in rows if row.table == table]


def test_as_printed_nothing_need_be_checked_and_the_onset_is_outside_the_papers_range(
    rows: list[Row],
) -> None:
    chosen = of(rows, study.PRINTED)
    assert [row.case[study.RATE] for row in chosen] == list(FREQUENCY_RATES)
    assert {row.measured[study.OVERHEAD] for row in chosen} == {0.0}
    printed, anchored = of(rows, study.ONSET)
    assert printed.verdicts == {study.RATE: Verdict.EXPLAINED}
    assert printed.measured[study.RATE] > 1000
    assert "do not give figure 10" in printed.published[study.RATE].otherwise
    assert anchored.measured[study.RATE] == pytest.approx(13)
    assert anchored.published == {}


def test_checks_set_in_at_13_and_rise_below_the_papers_most(rows: list[Row]) -> None:
    chosen = of(rows, study.ANCHORED)
    overheads = [row.measured[study.OVERHEAD] for row in chosen]
    assert overheads[0] == 0
    assert overheads == sorted(overheads)
    assert 0.1 < overheads[-1] <= 3.6
    assert all(row.verdicts[study.OVERHEAD] == Verdict.CALIBRATION for row in chosen)
    assert all(row.measured[study.ALL] == pytest.approx(7) for row in chosen)
    # what is left of 20 / 13 times the failures is what the target allows
    assert [row.measured[study.FAILURES] for row in chosen] == pytest.approx([1.0] * len(chosen))


def test_the_timed_products_are_those_that_are_planned() -> None:
    drawn = operands(SMALL, torch.Generator().manual_seed(0))
    assert set(drawn) == set(GEMMS)
    for gemm, (a, b) in drawn.items():
        batches = a.shape[0] if a.dim() == 3 else 1
        flops = 2 * batches * a.shape[-2] * a.shape[-1] * b.shape[-1]
        assert flops == gemm_flops(SMALL)[gemm], gemm
