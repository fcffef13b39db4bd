"""Campaigns of fused attention: tiles by request, every trial all the way, the same twice."""

from dataclasses import replace

import pytest
from case_loops import for_each

from holdfast import events, native
from holdfast.errors import ConfigError
from holdfast_lab.campaign import TILE_SITES, CellResult, Filters, broken_claims, make_plan
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.plan import ATTENTION, QUICK, Plan
from holdfast_lab.campaign.trials import run_cell

NATIVE = pytest.mark.skipif(native.core is None, reason="only the native core fuses attention")
SHAPE = (9, 8, 12)


def plan_of(site: str, fault: str, trials: int = 6, dtype: str = "fp32") -> Plan:
    """One cell of attention."""
    filters = Filters([ATTENTION], [dtype], [site], [fault], [SHAPE])
    return make_plan(QUICK, filters, trials=trials)


def test_attention_is_in_a_plan_by_request_only_and_has_its_tiles_only() -> None:
    assert ATTENTION not in {cell.operator for cell in make_plan(QUICK).cells}
    asked = make_plan(QUICK, Filters(operators=[ATTENTION], dtypes=["bf16"]))
    assert {cell.site for cell in asked.cells} == set(TILE_SITES)
    assert {cell.fault for cell in asked.cells if cell.fault.startswith("flip-31")}  # of fp32 tiles
    assert not {"row", "column", "burst_elements"} & {cell.fault for cell in asked.cells}
    both = make_plan(QUICK, Filters(operators=[ATTENTION, "mm"], sites=["scores", "output"]))
    pairs = {(cell.operator, cell.site) for cell in both.cells}
    assert pairs == {(ATTENTION, "scores"), ("mm", "output")}


@for_each(
    ("operators", "site", "says"),
    [
        ([], "scores", "site 'scores': add --operator attention"),
        (["mm", "bmm"], "grad_softmax", "site 'grad_softmax': add --operator attention"),
        ([ATTENTION], "output", "site 'output': add --operator one of mm, addmm"),
        ([ATTENTION, "mm"], "module", "site 'module': add --operator"),
    ],
)
def test_a_site_that_no_operator_has_is_refused(operators: list[str], site: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_plan(QUICK, Filters(operators=operators, sites=[site]))


@NATIVE
@for_each("site", TILE_SITES)
def test_extreme_values_are_found_and_repaired_at_every_tile(site: str) -> None:
    for fault in ("inf", "nan", "near_inf"):
        plan = plan_of(site, fault)
        counts = run_cell(plan, plan.cells[0])
        assert counts.trials == counts.detected == counts.replayed_corrected == 6, fault
        assert (counts.false_alarms, counts.clean_suspects) == (0, 0)
        assert counts.clean_rows > 0
        assert counts.would_harm > 0
        assert broken_claims([CellResult(plan.cells[0], counts)]) == []
    assert events.recent() == []


@NATIVE
def test_what_is_missed_is_counted_by_its_effect_and_the_same_twice() -> None:
    plan = plan_of("exponentials", "flip-22-any", trials=30)
    counts, again = (run_cell(plan, plan.cells[0]) for _ in range(2))
    assert replace(counts, seconds=0.0) == replace(again, seconds=0.0)
    missed = counts.masked + counts.below_rounding + counts.harmless + counts.harmful
    assert counts.trials == counts.detected + missed == 30
    assert counts.harmful > 0  # the blind spot of abft/attention/README.md
    assert counts.would_harm >= counts.harmful


def test_a_missed_extreme_or_an_unrepaired_fault_of_a_tile_contradicts_the_claims() -> None:
    cell = plan_of("scores", "inf").cells[0]
    missed, unrepaired = Counts(trials=1, harmful=1), Counts(trials=1, replayed_detected=1)
    for counts in (missed, unrepaired):
        assert broken_claims([CellResult(cell, counts)])
    late = plan_of("exponentials", "inf").cells[0]
    assert broken_claims([CellResult(late, missed)])
    assert not broken_claims([CellResult(late, unrepaired)])


def test_without_the_fused_kernel_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sites.arm", lambda hook: None)
    plan = plan_of("scores", "inf")
    with pytest.raises(ConfigError, match="torch's own kernel computes it here"):
        run_cell(plan, plan.cells[0])
