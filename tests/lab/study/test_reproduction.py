"""docs/reproduction.md: it is what the recorded rows give, and every table and figure is in it."""

import json
import re
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast_lab import study
from holdfast_lab.cli.study import KEPT, PAGE
from holdfast_lab.study.missing import DRAWINGS
from holdfast_lab.study.reproduction import lines_of, page, read_records

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
