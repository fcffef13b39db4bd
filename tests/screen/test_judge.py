"""The judge: who is wrong, by which finder, and who is not; no processes."""

import pytest
from case_loops import for_each

from holdfast.screen.judge import FINDERS, Finding, Judge, References, entry
from holdfast.screen.messages import Observation
from holdfast.screen.units import Unit

RIGHT, WRONG, OTHER = "aa", "bb", "cc"
OP = "gemm.fp32"
REFERENCE: References = {"cpu": {entry(OP, 0): RIGHT}}


def judged(
    results: dict[str, str | list[str]],
    *,
    references: References | None = None,
    finders: tuple[str, ...] = FINDERS,
    checks: dict[str, tuple[str, ...]] | None = None,
) -> Judge:
    """A judge that has seen each unit's digests, one after another, round by round."""
    listed = {name: list(digests) if isinstance(digests, list) else [digests] * 3
              for name, digests in results.items()}  # fmt: skip
    judge = Judge([Unit(name) for name in listed], references, finders)
    for place in range(max(map(len, listed.values()))):
        for name, digests in listed.items():
            if place < len(digests):
                told = (checks or {}).get(name, ())
                judge.observe(Observation(name, OP, 0, digests[place], checks=told), float(place))
    return judge


def only(judge: Judge) -> Finding:
    (finding,) = judge.findings()
    return finding


def test_equal_results_are_no_finding_and_every_comparison_is_counted() -> None:
    judge = judged({"a": RIGHT, "b": RIGHT, "c": RIGHT}, references=REFERENCE)
    assert judge.findings() == []
    assert judge.comparisons == {
        "checksum": 9,
        "repetition": 6,
        "reference": 9,
        "comparison": 3,
    } | {"collective": 0}
    assert judge.agreed("cpu") == {entry(OP, 0): RIGHT}
    assert all(judge.repeated(name) for name in "abc")


@for_each(
    ("finder", "results", "references", "unit", "wrong"),
    [
        ("comparison", {"a": RIGHT, "b": WRONG, "c": RIGHT}, None, "b", 3),
        ("reference", {"a": WRONG}, REFERENCE, "a", 3),
        ("repetition", {"a": [RIGHT, RIGHT, WRONG, RIGHT]}, None, "a", 1),
    ],
)
def test_each_finder_names_the_wrong_one_which_without_it_gets_through(
    finder: str,
    results: dict[str, str | list[str]],
    references: References | None,
    unit: str,
    wrong: int,
) -> None:
    finding = only(judged(results, references=references))
    assert (finding.unit, finding.op, finding.finders) == (unit, OP, (finder,))
    assert (finding.wrong, finding.executions) == (wrong, max(3, len(results[unit])))
    blind = tuple(other for other in FINDERS if other != finder)
    assert judged(results, references=references, finders=blind).findings() == []


def test_a_wrong_first_result_is_told_from_the_right_ones_that_follow() -> None:
    finding = only(judged({"a": [WRONG, RIGHT, RIGHT, RIGHT], "b": RIGHT}))
    assert (finding.unit, finding.wrong) == ("a", 1)
    assert finding.finders == ("repetition", "comparison")


def test_what_a_check_says_is_a_finding_though_the_result_is_right() -> None:
    judge = judged({"a": RIGHT, "b": RIGHT}, checks={"b": ("gemm_fault in x", "gemm_fault in x")})
    finding = only(judge)
    assert (finding.unit, finding.finders, finding.wrong) == ("b", ("checksum",), 3)
    assert finding.checks == ("gemm_fault in x",)


def test_of_two_that_disagree_neither_is_named_alone_without_a_reference() -> None:
    finding = only(judged({"a": RIGHT, "b": WRONG}))
    assert (finding.unit, finding.finders, finding.wrong) == ("a or b", ("comparison",), 0)
    finding = only(judged({"a": RIGHT, "b": WRONG}, references=REFERENCE))
    assert (finding.unit, finding.finders) == ("b", ("reference", "comparison"))


def test_of_two_that_disagree_the_one_with_another_finding_is_named() -> None:
    judge = judged({"a": RIGHT, "b": WRONG})
    for digest in (RIGHT, OTHER):
        judge.observe(Observation("b", "integer", 0, digest))
    assert {(finding.unit, finding.op) for finding in judge.findings()} == {
        ("b", OP),
        ("b", "integer"),
    }


def test_when_all_agree_against_the_reference_the_machine_is_named() -> None:
    judge = judged({"a": WRONG, "b": WRONG}, references=REFERENCE)
    finding = only(judge)
    assert (finding.unit, finding.finders, finding.wrong) == ("all 2 units", ("reference",), 6)
    assert judge.agreed("cpu") == {entry(OP, 0): WRONG}


def test_units_of_different_kinds_are_never_compared() -> None:
    judge = Judge([Unit("core 0"), Unit("cuda:0", None, "cuda:0", "cuda X")])
    judge.observe(Observation("core 0", OP, 0, RIGHT, count=2))
    judge.observe(Observation("cuda:0", OP, 0, WRONG, count=2))
    assert judge.findings() == []
    assert judge.comparisons["comparison"] == 0


def test_inputs_of_a_workload_are_one_finding() -> None:
    judge = Judge([Unit(name) for name in "abc"])
    for variant in range(2):
        for name in "abc":
            digest = WRONG if name == "c" else RIGHT
            judge.observe(Observation(name, OP, variant, f"{digest}{variant}", count=5))
    finding = only(judge)
    assert (finding.unit, finding.wrong, finding.executions) == ("c", 10, 10)


def test_two_results_are_asked_for_where_the_bits_are_not_known() -> None:
    assert judged({"a": RIGHT, "b": WRONG, "c": RIGHT}).missing_differences() == [("b", OP, 0, "a")]
    assert judged({"a": RIGHT, "b": WRONG}).missing_differences() == [("b", OP, 0, "a")]
    assert judged({"a": RIGHT, "b": RIGHT}).missing_differences() == []


@pytest.mark.parametrize("late", [0.0, 2.5])
def test_the_first_sign_of_a_fault_is_when_it_was_seen(late: float) -> None:
    judge = Judge([Unit(name) for name in "abc"])
    judge.observe(Observation("a", OP, 0, WRONG), 1.0)
    for name in "bc":
        judge.observe(Observation(name, OP, 0, RIGHT), 1.0 + late)
    finding = only(judge)
    assert (finding.unit, finding.first_s) == ("a", 1.0 + late)


def test_a_unit_that_has_not_repeated_everything_is_known() -> None:
    judge = Judge([Unit("a"), Unit("b")])
    judge.observe(Observation("a", OP, 0, RIGHT, count=2))
    assert judge.repeated("a")
    assert not judge.repeated("b")
    judge.observe(Observation("b", OP, 0, RIGHT))
    assert not judge.repeated("b")
