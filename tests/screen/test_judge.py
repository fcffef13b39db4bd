"""The judge: who is wrong, by which finder, and who is not; no processes."""

import pytest

from holdfast.screen.judge import FINDERS, Finding, Judge, References, entry
from holdfast.screen.messages import Observation
from holdfast.screen.units import Unit

RIGHT, WRONG, OTHER = "aa", "bb", "cc"
OP = "gemm.fp32"


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
    judge = judged({"a": RIGHT, "b": RIGHT, "c": RIGHT}, references={"cpu": {entry(OP, 0): RIGHT}})
    assert judge.findings() == []
    assert judge.comparisons == {"checksum": 9, "repetition": 6, "reference": 9, "comparison": 3}
    assert judge.agreed("cpu") == {entry(OP, 0): RIGHT}
    assert all(judge.repeated(name) for name in "abc")


def test_the_majority_names_the_odd_one() -> None:
    finding = only(judged({"a": RIGHT, "b": WRONG, "c": RIGHT}))
    assert (finding.unit, finding.op, finding.finders) == ("b", OP, ("comparison",))
    assert (finding.wrong, finding.executions) == (3, 3)


def test_without_comparison_a_persistent_fault_gets_through() -> None:
    blind = tuple(finder for finder in FINDERS if finder != "comparison")
    assert judged({"a": RIGHT, "b": WRONG, "c": RIGHT}, finders=blind).findings() == []


def test_a_reference_names_it_alone_and_on_its_own() -> None:
    references = {"cpu": {entry(OP, 0): RIGHT}}
    assert only(judged({"a": WRONG}, references=references)).finders == ("reference",)
    assert judged({"a": WRONG}).findings() == []
    blind = tuple(finder for finder in FINDERS if finder != "reference")
    assert judged({"a": WRONG}, references=references, finders=blind).findings() == []


def test_one_wrong_repetition_is_found_and_counted() -> None:
    finding = only(judged({"a": [RIGHT, RIGHT, WRONG, RIGHT]}))
    assert (finding.finders, finding.wrong, finding.executions) == (("repetition",), 1, 4)
    blind = tuple(finder for finder in FINDERS if finder != "repetition")
    assert judged({"a": [RIGHT, RIGHT, WRONG, RIGHT]}, finders=blind).findings() == []


def test_a_wrong_first_result_is_told_from_the_right_ones_that_follow() -> None:
    finding = only(judged({"a": [WRONG, RIGHT, RIGHT, RIGHT], "b": RIGHT}))
    assert (finding.unit, finding.wrong) == ("a", 1)
    assert finding.finders == ("repetition", "comparison")


def test_what_a_check_says_is_a_finding_though_the_result_is_right() -> None:
    judge = judged({"a": RIGHT, "b": RIGHT}, checks={"b": ("gemm_fault in x", "gemm_fault in x")})
    finding = only(judge)
    assert (finding.unit, finding.finders, finding.wrong) == ("b", ("checksum",), 3)
    assert finding.checks == ("gemm_fault in x",)


def test_of_two_that_disagree_neither_is_named_alone() -> None:
    finding = only(judged({"a": RIGHT, "b": WRONG}))
    assert (finding.unit, finding.finders, finding.wrong) == ("a or b", ("comparison",), 0)


def test_of_two_that_disagree_a_reference_names_one() -> None:
    finding = only(judged({"a": RIGHT, "b": WRONG}, references={"cpu": {entry(OP, 0): RIGHT}}))
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
    judge = judged({"a": WRONG, "b": WRONG}, references={"cpu": {entry(OP, 0): RIGHT}})
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
