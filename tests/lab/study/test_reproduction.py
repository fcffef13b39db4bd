"""docs/reproduction.md: it is what the recorded rows give, and every table and figure is in it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast_lab import study
from holdfast_lab.cli.study import KEPT, PAGE
from holdfast_lab.study.missing import DRAWINGS
from holdfast_lab.study.published import Verdict
from holdfast_lab.study.reproduction import counted_verdicts, joined, lines_of, page, read_records

TABLES_FIGURES = {
    "V-ABFT": (9, 0),
    "ATTNChecker": (3, 12),
    "SDC study": (9, 11),
    "DLRM": (3, 6),
    "REFT": (1, 11),
}


def test_the_page_is_what_the_recorded_rows_give() -> None:
    assert PAGE.read_text() == page(read_records(study.REGISTRY.values(), KEPT), KEPT)


@pytest.mark.parametrize("paper", TABLES_FIGURES)
def test_every_table_and_figure_has_a_line_or_is_a_drawing(paper: str) -> None:
    lines = lines_of(read_records(study.REGISTRY.values(), KEPT))
    items = [line.texts[0] for line in lines if line.paper.startswith(paper)]
    for kind, last in zip(("table", "figure"), TABLES_FIGURES[paper], strict=True):
        for n in range(1, last + 1):
            named = re.compile(rf"{kind} ({n}|{'I' * n})\b")
            assert any(map(named.match, [*items, *DRAWINGS[paper]])), (kind, n)


def test_a_stale_row_and_another_page_are_said_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, written = "reft.intervals", tmp_path / "page.md"
    result = tmp_path / f"{name}.json"
    words = ["study", "all", "--kept", str(tmp_path), "--page", str(written)]
    assert main(["study", name, "--json", str(result)]) == 0
    assert main([*words, "--check"]) == 1
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    assert "| appendix A, (5) |" in written.read_text()
    written.write_text(written.read_text().replace("reproduced", "differs"))
    assert main([*words, "--check"]) == 1
    result.write_text(json.dumps(json.loads(result.read_text()) | {"code": "0"}))
    capsys.readouterr()
    assert main([*words, "--check"]) == 1
    assert f"stale, run: holdfast study {name} --json {result}" in capsys.readouterr().out


def result(verdicts: list[Verdict | None], **of: object) -> dict[str, Any]:
    """A recorded result with one quantity of figure 8 in as many cells as there are verdicts."""
    one = {"source": "figure 8", "text": "5", "value": 5.0, "range": "4–6", "range_source": "5 ± 1"}
    rows = [
        {"case": {}, "measured": {"x": 5.0} if verdict else {}, "trials": {}}
        | {"published": {"x": {**one, "best": False, "explanation": "", "verdict": verdict}}}
        for verdict in verdicts
    ]
    return {"rows": rows, **of}


def kept(folder: Path, results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """The lines of these results, by the names of their files."""
    for name, one in results.items():
        (folder / f"{name}.json").write_text(json.dumps(one))
    lines = lines_of(read_records(study.REGISTRY.values(), folder))
    return [line.texts for line in lines if line.texts[0] == "figure 8"]


@pytest.mark.parametrize(
    ("code", "of_full"),
    [("a", True), ("b", False)],
    ids=["of the same code the full one", "of other code the newer one"],
)
def test_a_reduced_run_hides_a_full_one_only_if_the_code_has_changed(
    tmp_path: Path, code: str, of_full: bool
) -> None:
    full = result([Verdict.UNEXPLAINED], date="2026-11-01", code="a")
    reduced = result([Verdict.REPRODUCED], date="2026-11-02", code=code)
    lines = kept(tmp_path, {"reft.survival.full": full, "reft.survival": reduced})
    expected = Verdict.UNEXPLAINED if of_full else Verdict.REPRODUCED
    assert [line[6] for line in lines] == [expected]


def test_cells_without_trials_are_shown_as_not_done(tmp_path: Path) -> None:
    some, none = result([Verdict.REPRODUCED, None, Verdict.REPRODUCED]), result([None])
    lines = kept(tmp_path, {"reft.survival": some, "reft.micro": none})
    assert sorted(line[6] for line in lines) == [
        "not done yet",
        "reproduced: 2 of 3; not done yet: 1",
    ]


def test_a_line_names_its_study_if_another_one_has_the_same_labels(tmp_path: Path) -> None:
    lines = kept(
        tmp_path,
        {name: result([Verdict.REPRODUCED]) for name in ("reft.survival", "reft.micro")},
    )
    assert sorted(line[1] for line in lines) == ["x (reft.micro)", "x (reft.survival)"]
    (tmp_path / "reft.micro.json").unlink()
    assert [line[1] for line in kept(tmp_path, {})] == ["x"]


def test_every_verdict_of_a_line_is_counted_and_the_worst_comes_first() -> None:
    several = (Verdict.REPRODUCED, Verdict.UNDECIDED, Verdict.REPRODUCED, Verdict.CALIBRATION)
    cells = [{"verdict": one, "best": False} for one in several]
    assert counted_verdicts(joined(cells), cells) == (
        "undecided: 1 of 4; reproduced: 2; calibration: 1"
    )


def test_no_two_lines_of_a_paper_have_the_same_labels() -> None:
    lines = lines_of(read_records(study.REGISTRY.values(), KEPT))
    labels = [(line.paper.partition(",")[0], *line.texts[:2]) for line in lines]
    assert len(set(labels)) == len(labels)
