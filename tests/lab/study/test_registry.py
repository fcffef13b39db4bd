"""What a study is, and that every one of them runs and sets the paper's values beside ours."""

import re
from dataclasses import replace
from itertools import product
from math import isnan, nan

import pytest
import torch
from case_loops import for_each
from study_runs import TINY, run_of

from holdfast_lab.study import REGISTRY, Published, Row, Settings, Study, Unwatched

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
    bounded = [row.published[name] for row, name in compared if row.published[name].range]
    assert [published for published in bounded if not published.otherwise] == []
    assert not [row for row in rows if any(isnan(value) for value in row.measured.values())]
    assert all(p.source and (p.text or p.range) for row in rows for p in row.published.values())
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
    study = REGISTRY["vabft.emax"]
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


def test_a_row_says_whether_the_paper_was_met_and_why_not() -> None:
    paper = Published(5.0, 4.0, 6.0, "table 1", "another machine")
    assert Row("t", {}, {"x": 4.5}, {"x": paper}).agreement == "within"
    assert Row("t", {}, {}, {"x": paper}).agreement == "paper only"
    assert Row("t", {}, {"x": 4.5}).agreement == ""
    missed = Row("t", {}, {"x": 7.0, "y": 1.0}, {"x": paper})
    assert (missed.agreement, missed.outside()) == ("outside", ["x"])
    assert missed.explanations() == ["x: another machine"]
    assert Row("t", {}, {"x": nan}, {"x": paper}).agreement == "outside"


def test_an_interval_that_reaches_the_papers_range_agrees() -> None:
    paper = Published(5.0, low=5.0, source="table 1")
    row = Row("t", {}, {"x": 4.9}, {"x": paper}, intervals={"x": (4.7, 5.1)})
    assert row.agreement == "within"
    below = Row("t", {}, {"x": 4.9}, {"x": paper}, intervals={"x": (4.85, 4.95)})
    assert below.agreement == "outside"


@for_each(
    ("published", "text"),
    [
        (Published(5.0, 4.0, 6.0), "5"),
        (Published(None, 3.6, 4.8), "3.6–4.8"),
        (Published(None, high=0.12), "≤ 0.12"),
        (Published(None, low=2.0), "≥ 2"),
        (Published(None, printed="34 √N"), "34 √N"),
        (Published(1.27e-14), "1.27e-14"),
    ],
)
def test_the_papers_value_is_shown_as_it_prints_it(published: Published, text: str) -> None:
    assert published.text == text
