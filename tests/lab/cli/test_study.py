"""``holdfast study``: what is printed, written and drawn, and what is refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.cli.main import main
from holdfast.inject.journal import Journal
from holdfast_lab import study
from holdfast_lab.study import Progress, Published, Row, Settings, Study
from holdfast_lab.study.published import Range

PAPER = Published(5.0, "table 9", Range(4.0, 6.0, "5 ± 1 as printed"), "another machine")


def run_toy(settings: Settings, progress: Progress) -> Iterator[Row]:
    progress.begin(2.0)
    case = {"size": 8}
    yield Row("first", case, {"ratio": 4.56789}, {"ratio": PAPER})
    progress.advance(1.0)
    yield Row("first", {"size": 9}, {"ratio": 7.0, "rate": 50.0}, intervals={"rate": (40.0, 60.0)})
    yield Row("first", {"size": 10}, {"ratio": 9.0}, {"ratio": PAPER})
    yield Row("second", {"platform": "GPU"}, {}, {"ratio": replace(PAPER, kind="elsewhere")}, "GPU")
    yield Row("third", {"effort": settings.effort, "seed": settings.seed}, {"nothing": 0.0})
    progress.advance(1.0)


def draw_toy(rows: list[Row], figure: object) -> None:
    figure.subplots().plot([row.measured.get("ratio", 0) for row in rows])  # type: ignore[attr-defined]


def toy(**changes: object) -> Study:
    values = {"plot": draw_toy, **changes}
    return Study("toy.one", "Toy, table 9", "that toys are drawn", run_toy, **values)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(study.REGISTRY, "toy.one", toy())


def test_list_names_every_study(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["study", "list", "--json", str(tmp_path / "list.json")]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "list.json").read_text())
    assert [entry["name"] for entry in written] == list(study.REGISTRY)
    for one in study.REGISTRY.values():
        assert one.name in printed
        assert one.reproduces in printed


def test_ours_the_papers_and_the_reason_stand_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["study", "toy.one"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    assert lines[0] == "toy.one · Toy, table 9"
    assert ["8", "4.57", "5", "reproduced"] in cells
    assert ["9", "7", "50", "(40–60)"] in cells
    assert ["10", "9", "5", "differs,", "explained", "[1]"] in cells
    assert ["GPU", "5", "not", "possible", "on", "CPU", "GPU"] in cells
    assert "[1] another machine" in lines
    assert any(line.startswith("first (paper: table 9)") for line in lines)
    assert "5 rows in " in lines[-1]


@pytest.mark.parametrize(
    ("words", "effort", "seed"), [([], "reduced", 0), (["--full", "--seed", "7"], "full", 7)]
)
def test_effort_and_seed_reach_the_study_and_the_file(
    tmp_path: Path, words: list[str], effort: str, seed: int
) -> None:
    path = tmp_path / "toy.json"
    assert main(["study", "toy.one", "--json", str(path), *words]) == 0
    written = json.loads(path.read_text())
    assert (written["effort"], written["seed"], written["broken"]) == (effort, seed, "")
    assert written["rows"][-1]["case"] == {"effort": effort, "seed": seed}
    first = written["rows"][0]
    assert first["measured"] == {"ratio": 4.56789}
    assert first["published"]["ratio"]["value"] == 5.0
    compared = [row["published"].get("ratio", {}) for row in written["rows"][:4]]
    assert [one.get("verdict") for one in compared] == [
        *("reproduced", None, "differs, explained", "not possible on CPU")
    ]
    assert [one.get("explanation") for one in compared] == ["", None, "another machine", ""]


def test_threads_are_those_asked_for_and_put_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def run(settings: Settings, progress: Progress) -> Iterator[Row]:
        seen.append(torch.get_num_threads())
        yield from run_toy(settings, progress)

    before, path = torch.get_num_threads(), tmp_path / "toy.json"
    monkeypatch.setitem(study.REGISTRY, "toy.one", Study("toy.one", "Toy", "toys", run))
    assert main(["study", "toy.one"]) == 0
    assert main(["study", "toy.one", "--threads", "3", "--json", str(path)]) == 0
    assert seen == [1, 3]
    assert json.loads(path.read_text())["threads"] == 3
    assert torch.get_num_threads() == before


def run_slowly(
    settings: Settings, progress: Progress, journal: Journal | None = None
) -> Iterator[Row]:
    assert journal is not None
    if "cell" not in journal.done:
        journal.append({"cell": {"ratio": 4.5}})
        raise KeyboardInterrupt
    yield Row("first", {}, journal.done["cell"], {"ratio": PAPER})


def test_a_study_with_a_journal_is_resumed_with_the_same_options_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resume = ("--resume", str(tmp_path / "cells.jsonl"))
    assert main(["study", "toy.one", *resume]) == 2
    assert "toy.one cannot be resumed, only" in capsys.readouterr().err
    monkeypatch.setitem(study.REGISTRY, "toy.one", Study("toy.one", "Toy", "toys", run_slowly))
    assert main(["study", "toy.one", *resume]) == 130
    assert main(["study", "toy.one", *resume, "--full"]) == 2
    assert "effort was reduced, now it is full" in capsys.readouterr().err
    assert main(["study", "toy.one", *resume]) == 0
    assert "4.5" in capsys.readouterr().out


def test_a_broken_claim_of_ours_is_exit_code_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = toy(verdict=lambda rows: f"{len(rows)} rows are wrong")
    monkeypatch.setitem(study.REGISTRY, "toy.one", broken)
    assert main(["study", "toy.one"]) == 1
    assert "BROKEN: 5 rows are wrong" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"toy{suffix}"
    assert main(["study", "toy.one", "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


def test_a_plot_or_an_export_that_a_study_lacks_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "for_others.json"
    monkeypatch.setitem(study.REGISTRY, "toy.one", toy(plot=None))
    assert main(["study", "toy.one", "--plot", str(tmp_path / "x.png")]) == 2
    assert "has no plot" in capsys.readouterr().err
    monkeypatch.setitem(study.REGISTRY, "toy.one", toy(export=lambda rows: {"rows": len(rows)}))
    assert main(["study", "toy.one", "--export", str(path)]) == 0
    assert json.loads(path.read_text()) == {"rows": 5}
