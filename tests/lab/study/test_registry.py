"""What a study is, and that every one of them runs and sets the paper's values beside ours."""

import re
from dataclasses import replace
from itertools import product
from math import inf, isnan, nan

import pytest
import torch
from case_loops import for_each
from study_runs import TINY, run_of

from holdfast.inject.statistics import Rate
from holdfast_lab.study import (
    REGISTRY,
    Published,
    Row,
    Settings,
    Study,
    Unwatched,
    Verdict,
)
from holdfast_lab.study.dlrm.gemm_detection import DETECTED
from holdfast_lab.study.published import Range, at_least, at_most, counted, none_of, rounded

NEEDS_TRANSFORMERS = {
    f"attnchecker.{subject}"
    for subject in (
        *("propagation", "gemm-share", "vulnerability", "coverage", "detection"),
        *("loss", "recovery", "overhead"),
    )
}


NEEDS_WEIGHTS = {"vabft.real-weights"}  # has a test of its own, with small random weights
# The quickest of each paper, for every run of the tests.
REPRESENTATIVES = {
    *("vabft.tightness-fp32", "attnchecker.frequencies", "dlrm.gemm-detection"),
    *("reft.survival", "sdc.drift"),
}
# They show what is measured, and claim nothing about it.
WITHOUT_CLAIM = {name for name, study in REGISTRY.items() if study.verdict.__name__ == "<lambda>"}
RUNNABLE = [
    name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.study)
    for name in REGISTRY
    if name not in NEEDS_WEIGHTS
]


def can_be_no(study: Study, rows: list[Row]) -> bool:
    """Whether the verdict objects, or does so to some wrong value in some row."""
    for place, row in enumerate(rows):
        for key, wrong in product(row.measured, (0.0, 50.0, -1.0, 1e9)):
            intervals = {n: (wrong, wrong) if n == key else r for n, r in row.intervals.items()}
            changed = replace(row, measured={**row.measured, key: wrong}, intervals=intervals)
            if study.verdict([*rows[:place], changed, *rows[place + 1 :]]):
                return True
    return False


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_study_runs_has_the_papers_values_beside_ours_and_draws_its_rows(name: str) -> None:
    if name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
    study, (rows, progress) = REGISTRY[name], run_of(name)
    assert progress.done == pytest.approx(progress.total)
    compared = [(row, name) for row in rows for name in row.published if name in row.measured]
    assert compared
    assert [
        p for row in rows for p in row.published.values() if p.range.text and not p.range.source
    ] == []
    assert not [row for row in rows if any(isnan(value) for value in row.measured.values())]
    assert all(p.source and p.text for row in rows for p in row.published.values())
    assert isinstance(study.verdict(rows), str)
    assert name in WITHOUT_CLAIM or can_be_no(study, rows)
    if study.plot is not None:
        figure = pytest.importorskip("matplotlib.figure").Figure()
        study.plot(rows, figure)
        drawn = [axes for axes in figure.axes if axes.lines or axes.collections]
        assert drawn == figure.axes
        assert any(axes.get_xlabel() for axes in drawn)


@for_each("study", REGISTRY.values())
def test_every_study_says_what_it_is(study: Study) -> None:
    assert REGISTRY[study.name] is study
    assert re.fullmatch(r"[a-z]+\.[a-z0-9-]+", study.name)
    assert study.paper.startswith(("V-ABFT", "ATTNChecker", "DLRM", "REFT", "SDC study"))
    assert len(study.reproduces) > 20


def test_the_same_seed_gives_the_same_rows() -> None:
    study = REGISTRY["vabft.false-positives"]
    first, again, other = (
        list(study.run(Settings("tiny", seed), Unwatched())) for seed in (3, 3, 4)
    )
    assert [row.as_dict() for row in first] == [row.as_dict() for row in again]
    assert [row.measured for row in first] != [row.measured for row in other]


def test_a_cases_random_numbers_depend_on_its_name_and_on_the_seed() -> None:
    def drawn(settings: Settings, *case: object) -> float:
        return float(torch.rand((), generator=settings.generator(*case)))

    assert drawn(TINY, "a", 1) == drawn(TINY, "a", 1)
    assert len({drawn(TINY, "a", 1), drawn(TINY, "a", 2), drawn(Settings(seed=1), "a", 1)}) == 3


PAPERS = Range(4.0, 6.0, "5 ± 1 as printed")


@for_each(
    ("published", "measured", "verdict"),
    [
        (Published(5.0, "table 1", PAPERS), 4.5, Verdict.REPRODUCED),
        (Published(5.0, "table 1", PAPERS), 7.0, Verdict.UNEXPLAINED),
        (Published(5.0, "table 1", PAPERS, "another machine"), 7.0, Verdict.EXPLAINED),
        (Published(5.0, "table 1", PAPERS, kind="input"), 4.5, Verdict.CALIBRATION),
        (Published(5.0, "table 1", PAPERS, kind="input"), nan, Verdict.UNEXPLAINED),
        (Published(5.0, "table 1", PAPERS, kind="certain"), 4.5, Verdict.CERTAIN),
        (Published(5.0, "table 1"), 7.0, Verdict.COMPARED),
        (Published(5.0, "table 1", PAPERS, kind="elsewhere"), None, Verdict.NOT_HERE),
        (Published(5.0, "table 1", PAPERS), None, Verdict.NOT_DONE),
    ],
)
def test_one_place_decides_the_verdict(
    published: Published, measured: float | None, verdict: Verdict
) -> None:
    row = Row("t", {}, {} if measured is None else {"x": measured}, {"x": published})
    assert row.verdicts == {"x": verdict}
    assert row.differing() == ["x"] * (verdict in (Verdict.EXPLAINED, Verdict.UNEXPLAINED))


@for_each(
    ("paper", "interval", "verdict"),
    [
        (at_least("5.0"), (4.96, 5.4), Verdict.REPRODUCED),
        (at_least("5.0"), (4.7, 4.96), Verdict.UNDECIDED),
        (at_least("5.0"), (4.75, 4.85), Verdict.UNEXPLAINED),
        (at_most("5.0"), (0.0, 5.04), Verdict.REPRODUCED),
        (at_most("5.0"), (5.0, 5.2), Verdict.UNDECIDED),
        (at_most("5.0"), (5.06, 5.2), Verdict.UNEXPLAINED),
        # Both ends come from the paper's own count: intervals that overlap agree.
        (counted(Rate(2663, 2800)), (93.9, 94.3), Verdict.REPRODUCED),
        (none_of(2800), (0.0, 0.2), Verdict.REPRODUCED),
        (counted(Rate(2663, 2800)), (93.9, 94.2), Verdict.UNEXPLAINED),
    ],
)
def test_the_whole_interval_meets_a_stated_bound_and_overlaps_the_papers_own(
    paper: Range, interval: tuple[float, float], verdict: Verdict
) -> None:
    row = Row("t", {}, {"x": 5.0}, {"x": Published(5.0, "t", paper)}, intervals={"x": interval})
    assert row.verdicts == {"x": verdict}


def test_the_cell_of_any_value_in_c_is_undecided() -> None:
    rates = {DETECTED: Rate(2776, 2800)}  # 99.14 % (98.73–99.42), of which the paper says 99.21
    row = Row.of_rates("C", {}, rates, {DETECTED: Published(99.21, "C2", at_least("99.21"))})
    assert row.verdicts == {DETECTED: Verdict.UNDECIDED}
    assert row.differing() == []


def test_a_rate_without_trials_is_not_done() -> None:
    row = Row.of_rates("t", {}, {"x": Rate(0, 0)}, {"x": Published(5.0, "table 1", PAPERS)})
    assert row.measured == {}
    assert row.as_dict()["published"]["x"]["verdict"] == "not done yet"  # type: ignore[index]


def test_ranges_follow_from_what_is_printed() -> None:
    found = (rounded("1.27e-14"), at_most("26"), none_of(100_000), counted(Rate(2663, 2800)))
    ends = (1.265e-14, 1.275e-14), (-inf, 26.5), (0, 3e-3), (94.25, 95.85)
    for one, expected in zip(found, ends, strict=True):
        assert (one.low, one.high) == pytest.approx(expected, rel=1e-4), one.source


@for_each(
    ("published", "text"),
    [
        (Published(5.0, "table 1", PAPERS), "5"),
        (Published(None, "table 1", Range(high=0.12)), "≤ 0.12"),
        (Published(None, "table 1", Range(16.215, 16.225)), "16.215–16.225"),
        (Published(None, "table 1", printed="34 √N"), "34 √N"),
        (Published(1.27e-14, "table 1"), "1.27e-14"),
    ],
)
def test_the_papers_value_is_shown_as_it_prints_it(published: Published, text: str) -> None:
    assert published.text == text
