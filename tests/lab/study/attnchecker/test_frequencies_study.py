"""``attnchecker.frequencies``: the target as printed, the one that gives Figure 10, the verdict."""

from dataclasses import replace

import pytest
import torch

from holdfast.planner.attention import GEMMS, SECTIONS, AttentionSize, gemm_flops
from holdfast_lab.study import Row, Settings, Unwatched
from holdfast_lab.study.attnchecker import frequencies as study
from holdfast_lab.study.attnchecker.paper import FREQUENCY_RATES
from holdfast_lab.study.attnchecker.section_costs import measured_costs, operands

SMALL = AttentionSize(2, 5, 12, 3)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(study.STUDY.run(Settings("tiny"), Unwatched()))


def of(rows: list[Row], table: str) -> list[Row]:
    return [row for row in rows if row.table == table]


def test_as_printed_nothing_need_be_checked_and_the_onset_is_outside_the_papers_range(
    rows: list[Row],
) -> None:
    chosen = of(rows, study.PRINTED)
    assert [row.case[study.RATE] for row in chosen] == list(FREQUENCY_RATES)
    assert {row.measured[study.OVERHEAD] for row in chosen} == {0.0}
    printed, anchored = of(rows, study.ONSET)
    assert printed.agreement == "outside"
    assert printed.measured[study.RATE] > 1000
    assert "do not give figure 10" in printed.explanations()[0]
    assert anchored.measured[study.RATE] == pytest.approx(13)
    assert anchored.agreement == ""


def test_checks_set_in_at_13_and_rise_below_the_papers_most(rows: list[Row]) -> None:
    chosen = of(rows, study.ANCHORED)
    overheads = [row.measured[study.OVERHEAD] for row in chosen]
    assert overheads[0] == 0
    assert overheads == sorted(overheads)
    assert 0.1 < overheads[-1] <= 3.6
    assert {row.agreement for row in chosen} == {"within"}
    assert all(row.measured[study.ALL] == pytest.approx(7) for row in chosen)
    # what is left of 20 / 13 times the failures is what the target allows
    assert [row.measured[study.FAILURES] for row in chosen] == pytest.approx([1.0] * len(chosen))


def test_the_verdict_holds_and_sees_a_missed_target_a_dear_plan_and_a_falling_curve(
    rows: list[Row],
) -> None:
    assert study.STUDY.verdict(rows) == ""
    place = rows.index(of(rows, study.ANCHORED)[-1])

    def changed(**measured: float) -> list[Row]:
        wrong = replace(rows[place], measured={**rows[place].measured, **measured})
        return [*rows[:place], wrong, *rows[place + 1 :]]

    assert "misses its target" in study.STUDY.verdict(changed(**{study.FAILURES: 1.01}))
    assert "misses its target" in study.STUDY.verdict(changed(**{study.OVERHEAD: 7.1}))
    assert "more errors cost less" in study.STUDY.verdict(changed(**{study.OVERHEAD: 0.01}))


def test_the_timed_products_are_those_that_are_planned() -> None:
    drawn = operands(SMALL, torch.Generator().manual_seed(0))
    assert set(drawn) == set(GEMMS)
    for gemm, (a, b) in drawn.items():
        batches = a.shape[0] if a.dim() == 3 else 1
        flops = 2 * batches * a.shape[-2] * a.shape[-1] * b.shape[-1]
        assert flops == gemm_flops(SMALL)[gemm], gemm


def test_timed_costs_are_times() -> None:
    costs = measured_costs(SMALL, 3, torch.Generator().manual_seed(0), Unwatched())
    assert set(costs.sections) == set(SECTIONS)
    assert costs.attention > 0
    assert costs.step > 0
