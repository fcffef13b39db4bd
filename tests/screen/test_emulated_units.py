"""Emulated faulty cores: found and named by the right finder, unseen with it off."""

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.screen.collectives import ROUNDS
from holdfast.screen.emulation import Emulated
from holdfast.screen.judge import Finding
from holdfast.screen.units import Unit
from holdfast.screen.verdict import Verdict
from holdfast.screen.workloads import op_names

pytestmark = pytest.mark.processes
Screen = Callable[..., Verdict]
BAD = "unit 1"
# By a unit, of three: its own data and one sum, or everyone's, of two collectives each.
RECEIVED = ROUNDS * (2 * 2 + 2 * (1 + 3))
# Of a fault that flips one bit of one result, and nothing more.
LOCAL = {
    "gemm.fp32": ("float32", 2),
    "gemm.bf16": ("bfloat16", 0),
    "gemm.fp16": ("float16", 1),
    "digest": ("uint8", 5),
    "memory.walking": ("int64", 63),
    "memory.random": ("int64", 40),
}


def by_op(verdict: Verdict) -> dict[str, Finding]:
    """The findings; all of them must be of the faulty unit."""
    assert {finding.unit for finding in verdict.findings} <= {BAD}
    return {finding.op: finding for finding in verdict.findings}


@pytest.mark.representative
def test_a_clean_machine_is_healthy_and_says_how_rare_false_alarms_are(
    three_units: list[Unit], screened: Screen, cache: Path
) -> None:
    verdict = screened(three_units)
    assert (verdict.state, verdict.exit_code, verdict.findings) == ("healthy", 0, [])
    executions = 3 * 3 * 2 * len(op_names("cpu"))
    repeated = {"checksum": executions, "repetition": executions * 2 // 3}
    compared = {"reference": 0, "comparison": executions // 3, "collective": 3 * RECEIVED}
    assert dict(verdict.comparisons) == repeated | compared
    assert verdict.false_alarm_bound == 3 / verdict.compared
    assert len(list(cache.glob("screen-cpu-*.json"))) == 1
    again = screened(three_units)
    assert (again.state, again.comparisons["reference"]) == ("healthy", executions)


@pytest.mark.representative
def test_a_persistent_fault_of_any_op_is_named_by_comparison(
    three_units: list[Unit], screened: Screen, cache: Path
) -> None:
    faults = [Emulated(BAD, op, bit) for op, (_, bit) in LOCAL.items()]
    faults += [
        Emulated(BAD, op, 20) for op in ("attention.fp32", "elementwise", "integer", "training")
    ]
    verdict = screened(three_units, faults=faults, finders=("repetition", "comparison"))
    found = by_op(verdict)
    assert (verdict.exit_code, verdict.suspects()) == (1, [BAD])
    assert set(found) == {fault.op for fault in faults}
    for op, finding in found.items():
        assert (finding.finders, finding.wrong, finding.executions) == (("comparison",), 6, 6), op
    for op, (dtype, bit) in LOCAL.items():
        difference = found[op].differences[0]
        assert (difference.dtype, set(difference.bits)) == (dtype, {bit}), op
    assert not cache.exists()  # results of an emulated fault are no reference


def test_with_the_comparison_off_a_reference_finds_it(
    three_units: list[Unit], screened: Screen
) -> None:
    fault = Emulated(BAD, "gemm.fp32", 2)
    blind = ("checksum", "repetition", "reference")
    assert screened(three_units, faults=[fault], finders=blind).state == "healthy"
    assert screened(three_units).state == "healthy"  # keeps its results
    finding = by_op(screened(three_units, faults=[fault], finders=blind))["gemm.fp32"]
    assert (finding.finders, finding.wrong) == (("reference",), 6)


@pytest.mark.representative
def test_an_intermittent_fault_is_found_by_repetition_and_counted(
    three_units: list[Unit], screened: Screen
) -> None:
    fault = Emulated(BAD, "elementwise", 12, every=4)
    verdict = screened(three_units, faults=[fault], finders=("repetition",), rounds=12)
    finding = by_op(verdict)["elementwise"]
    assert finding.finders == ("repetition",)
    assert verdict.first_s is not None
    blind = screened(three_units, faults=[fault], finders=("checksum",), rounds=12)
    assert blind.state == "healthy"
    output = next(each for each in finding.differences if each.part == "output")
    assert set(output.bits) == {12}


@pytest.mark.representative
def test_checksums_find_what_they_can_see_alone(three_units: list[Unit], screened: Screen) -> None:
    ops = ("gemm.fp32", "gemm.bf16", "gemm.fp16", "attention.fp32", "gemm.int8", "embedding_bag")
    faults = [Emulated(BAD, op, 14 if "16" in op else 29) for op in ops]
    found = by_op(screened(three_units, faults=faults, finders=("checksum",)))
    assert set(found) == set(ops)
    for op, finding in found.items():
        assert finding.finders == ("checksum",), op
        assert "_fault in " in finding.checks[0] or "_persistent in " in finding.checks[0], op


def test_one_unit_alone_is_not_compared_and_says_so(
    three_units: list[Unit], screened: Screen, cache: Path
) -> None:
    lone = three_units[:1]
    verdict = screened(lone)
    assert (verdict.state, verdict.comparisons["comparison"]) == ("healthy", 0)
    assert any("no other unit" in note for note in verdict.notes)
    assert not cache.exists()  # what one unit says is no reference for itself
    fault = Emulated(lone[0].name, "digest", 3)
    assert screened(lone, faults=[fault]).state == "healthy"


def test_it_ends_at_the_first_wrong_result_if_asked(
    three_units: list[Unit], screened: Screen
) -> None:
    faults = [Emulated(BAD, "gemm.fp32", 30)]
    verdict = screened(three_units, faults=faults, rounds=1000, stop_at_first=True)
    assert verdict.suspects() == [BAD]
    assert max(work.rounds for work in verdict.work) < 1000
