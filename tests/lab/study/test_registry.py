"""What a study is, and that every one of them runs and sets the paper's values beside ours."""

import re
from math import isnan, nan

import pytest
import torch

from holdfast_lab.study import REGISTRY, Published, Row, Settings, Study, Unwatched

TINY = Settings("tiny")
NEEDS_WEIGHTS = {"vabft.real-weights"}  # has a test of its own, with small random weights
NEEDS_TRANSFORMERS = {
    f"attnchecker.{subject}"
    for subject in (
        *("propagation", "gemm-share", "vulnerability", "coverage", "detection"),
        *("loss", "recovery", "overhead"),
    )
}
RUNNABLE = [study for name, study in REGISTRY.items() if name not in NEEDS_WEIGHTS]


def skip_without_its_models(study: Study) -> None:
    """Some studies are of models of a package that is optional."""
    if study.name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")


class Recorded:
    """Remembers how far a study says it is."""

    def __init__(self) -> None:
        self.total = self.done = 0.0

    def begin(self, total: float) -> None:
        assert self.total == 0
        assert total > 0
        self.total = total

    def advance(self, amount: float) -> None:
        self.done += amount


@pytest.mark.parametrize("study", RUNNABLE, ids=lambda study: study.name)
def test_every_study_runs_and_has_the_papers_values_beside_ours(study: Study) -> None:
    skip_without_its_models(study)
    progress = Recorded()
    rows = list(study.run(TINY, progress))
    assert progress.done == pytest.approx(progress.total)
    compared = [(row, name) for row in rows for name in row.published if name in row.measured]
    assert compared
    bounded = [row.published[name] for row, name in compared if row.published[name].range]
    assert [published for published in bounded if not published.otherwise] == []
    assert not [row for row in rows if any(isnan(value) for value in row.measured.values())]
    assert all(p.source and (p.text or p.range) for row in rows for p in row.published.values())
    assert isinstance(study.verdict(rows), str)


@pytest.mark.parametrize("study", [s for s in RUNNABLE if s.plot], ids=lambda study: study.name)
def test_every_plot_is_drawn_from_the_rows(study: Study) -> None:
    skip_without_its_models(study)
    figure_module = pytest.importorskip("matplotlib.figure")
    figure = figure_module.Figure()
    assert study.plot is not None
    study.plot(list(study.run(TINY, Unwatched())), figure)
    drawn = [axes for axes in figure.axes if axes.lines or axes.collections]
    assert drawn == figure.axes
    assert any(axes.get_xlabel() for axes in drawn)


@pytest.mark.parametrize("study", REGISTRY.values(), ids=lambda study: study.name)
def test_every_study_says_what_it_is(study: Study) -> None:
    assert REGISTRY[study.name] is study
    assert re.fullmatch(r"[a-z]+\.[a-z0-9-]+", study.name)
    assert study.paper.startswith(("V-ABFT", "ATTNChecker", "DLRM", "REFT", "SDC study"))
    assert len(study.reproduces) > 20


def test_the_studies_of_the_issue_are_all_there() -> None:
    subjects = "emax tightness-fp64 tightness-fp32 tightness-bf16 false-positives detection"
    subjects += " scaling real-weights coherent"
    assert set(REGISTRY) >= {f"vabft.{subject}" for subject in subjects.split()}


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


@pytest.mark.parametrize(("effort", "expected"), [("tiny", 1), ("reduced", 2), ("full", 3)])
def test_effort_chooses(effort: str, expected: int) -> None:
    assert Settings(effort).choose(1, 2, 3) == expected  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
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
