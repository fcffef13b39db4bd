"""The zoo's command: what it runs, counts and prints, and the document made from its list."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.zoo import __main__ as command
from holdfast_lab.zoo import campaign
from holdfast_lab.zoo.cases import DIFFERENT, EQUAL, REFUSED, Outcome
from holdfast_lab.zoo.catalogue import LOOPS, chosen, table
from holdfast_lab.zoo.loop import FaultKind, Form

DOCUMENT = Path(__file__).parents[3] / "docs" / "loops.md"


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The seeds at which every struck loop is to end with other bits; nothing is trained."""
    seeds: set[int] = set()

    def run(cases: Sequence[campaign.Case]) -> Iterator[Outcome]:
        for case in cases:
            calm, bad = case.fault is FaultKind.CALM, case.seed in seeds
            result = REFUSED if case.loop.form is Form.REFUSED else EQUAL
            result = DIFFERENT if bad and not calm else result
            yield Outcome(case.loop.name, case.fault, case.seed, result, None if calm else True)

    monkeypatch.setattr(campaign, "run", run)
    return seeds


def test_the_document_has_the_table_of_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--table"]) == 0
    assert capsys.readouterr().out == table()
    assert table() in DOCUMENT.read_text()


def test_there_are_twenty_loops_of_every_form() -> None:
    assert len(LOOPS) == 20
    assert {loop.form for loop in LOOPS.values()} == set(Form)
    assert [loop.name for loop in chosen(())] == list(LOOPS)


def test_counts_by_loop_and_fault_and_the_exit_code(
    wrong: set[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "zoo.json"
    words = ["--loops", "ema", "lbfgs", "--seeds", "1-4", "--json", str(file)]
    assert command.main(words) == 0
    wrong.add(2)
    assert command.main(words) == 1
    said = json.loads(file.read_text())
    runs = 4 * len(FaultKind) + 1
    assert said["runs"] == runs == len(said["outcomes"])
    assert said["results"] == {EQUAL: runs - 6, DIFFERENT: 5, REFUSED: 1}
    assert (said["wrong"], said["harmful_bare"], said["tried_bare"]) == (5, 20, 20)
    kill = next(row for row in said["rows"] if (row["loop"], row["fault"]) == ("ema", "kill"))
    assert (kill["runs"], kill["equal"], kill["wrong"]) == ("4", "3", "1")
    printed = capsys.readouterr()
    assert "ema, kill, seed 2: different" in printed.err
    assert "harmful bare" in printed.out


def test_input_that_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no loop is named zebra; there are nanogpt"):
        chosen(["zebra"])
    assert command.main(["--loops", "zebra"]) == 2
    for seeds in ("5-1", "one", ""):
        with pytest.raises(SystemExit):
            command.main(["--seeds", seeds])
    assert "write 1-5, or 3" in capsys.readouterr().err
