"""``holdfast events`` and the table and JSON writers behind it."""

import argparse
import json
import math
import re
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.cli import events as verb
from holdfast.cli import tables
from holdfast.cli.tables import print_table, write_json
from holdfast.errors import ConfigError
from holdfast.events import LEDGER_NAME, Event, Ledger

START_S = 1_700_000_000.0


def _call(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers(required=True))
    args = parser.parse_args(["events", *map(str, arguments)])
    return args.run(args)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / LEDGER_NAME)
    for number in range(6):
        ledger.append(
            Event(
                kind="gemm_fault" if number % 2 else "injected",
                op=f"blocks.{number}.attn/bmm#2/grad_a",
                detector="abft" if number % 2 else "",
                rung="correct" if number % 2 else "",
                step=number // 2,
                rank=number % 3,
                duration_s=0.00125,
                detail={"bit": number, "new": math.inf},
                time_s=START_S + number / 2,
            )
        )
    ledger.close()
    return tmp_path


def _ops(output: str) -> list[int]:
    """The numbers of the events shown, one a line."""
    return [int(line.split("blocks.")[1][0]) for line in output.splitlines() if "blocks." in line]


def test_shows_every_event_on_a_line(run_dir, capsys):
    assert _call(run_dir) == 0
    output = capsys.readouterr().out
    assert _ops(output) == [0, 1, 2, 3, 4, 5]
    line = next(line for line in output.splitlines() if "blocks.3" in line)
    assert line.split() == [
        *("1.500", "1", "0", "gemm_fault", "blocks.3.attn/bmm#2/grad_a", "abft", "correct"),
        *("1.250", "bit=3", "new=inf"),
    ]
    assert "6 events" in output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--step", 1], [2, 3]),
        (["--rank", 2], [2, 5]),
        (["--kind", "injected"], [0, 2, 4]),
        (["--op", "blocks.4"], [4]),
        (["--kind", "gemm_fault", "--rank", 0], [3]),
        (["--limit", 2], [4, 5]),
        (["--limit", 99], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_filters(run_dir, capsys, options, expected):
    assert _call(run_dir, *options) == 0
    assert _ops(capsys.readouterr().out) == expected


def test_a_limit_says_what_it_hides_and_times_stay_relative_to_the_runs_first_event(
    run_dir, capsys
):
    _call(run_dir, "--limit", 2)
    output = capsys.readouterr().out
    assert "2 events, 4 older ones not shown" in output
    assert "2.000" in output


def test_where_there_is_no_event_it_says_so_and_succeeds(run_dir, tmp_path, capsys):
    target = tmp_path / "events.json"
    assert _call(run_dir, "--kind", "restored", "--json", target) == 0
    assert "no matching events" in capsys.readouterr().out
    assert json.loads(target.read_text()) == []
    (tmp_path / "empty").mkdir()
    Ledger(tmp_path / "empty" / LEDGER_NAME).close()
    assert _call(tmp_path / "empty") == 0
    assert "no matching events" in capsys.readouterr().out


def test_json_holds_the_whole_events(run_dir, tmp_path):
    target = tmp_path / "events.json"
    _call(run_dir, "--step", 1, "--json", target)
    rows = json.loads(target.read_text())
    assert [row["id"] for row in rows] == [3, 4]
    assert rows[1]["detail"] == {"bit": 3, "new": "inf"}
    assert rows[1]["time_s"] == START_S + 1.5
    assert rows[1]["rung"] == "correct"


def test_events_outside_a_step_and_long_details(tmp_path, capsys):
    ledger = Ledger(tmp_path / LEDGER_NAME)
    ledger.append(Event(kind="[bold]odd[/bold]", detail={"note": "x" * 500}))
    ledger.close()
    _call(tmp_path)
    output = capsys.readouterr().out
    assert "-1" not in output
    assert "[bold]odd[/bold]" in output
    assert "note=" + "x" * 54 + "… " in output


def test_a_table_in_a_pipe_keeps_every_row_on_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    print_table(("name", "count"), [("n" * 300, 7)], title="Rates", right=("count",))
    output = capsys.readouterr().out
    assert "n" * 300 + "  " in output
    assert "Rates" in output
    assert next(line for line in output.splitlines() if "nnn" in line).split()[-1] == "7"


def test_a_long_list_is_printed_alike_without_rich_which_takes_a_second(capsys, monkeypatch):
    rows = [(f"op-{n}\x1b", n, "é") for n in range(2000)]
    print_table(("op", "count", ""), rows[:1], title="Ops", right=("count",))
    short = next(line for line in capsys.readouterr().out.splitlines() if "op-0" in line)
    monkeypatch.setattr(tables, "Console", None)
    print_table(("op", "count", ""), rows, title="Ops", right=("count",))
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert (title, head.split(), len(lines)) == ("Ops", ["op", "count"], 2000)
    assert short.split() == lines[0].split() == ["op-0\\x1b", "0", "é"]
    assert {line.index("é") for line in lines} == {len(lines[-1]) - 1}


def test_an_event_just_before_the_first_one_is_at_zero_without_a_sign(tmp_path, capsys):
    with closing(Ledger(tmp_path / LEDGER_NAME)) as ledger:
        ledger.append(*(Event(kind="injected", time_s=START_S + at) for at in (0.0, -1e-4, -2.0)))
    _call(tmp_path)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "inj" in line]
    assert lines == ["0.000", "0.000", "-2.000"]


def test_json_replaces_the_older_file_and_leaves_no_draft(tmp_path):
    target = tmp_path / "result.json"
    target.write_text("old")
    write_json(target, {"ratio": math.nan, "rows": ((1, -math.inf), [True, None, "é"])})
    assert json.loads(target.read_text()) == {
        "ratio": "nan",
        "rows": [[1, "-inf"], [True, None, "é"]],
    }
    assert list(tmp_path.iterdir()) == [target]


def test_what_cannot_be_written_is_refused_and_leaves_the_older_file_and_no_draft(
    tmp_path, monkeypatch
):
    def full(draft: Path, target: Path) -> None:
        assert draft.exists()
        raise OSError(28, "No space left on device")

    target = tmp_path / "result.json"
    target.write_text("old")
    with pytest.raises(TypeError):
        write_json(target, {"tensor": object()})
    for path in (tmp_path, Path(""), tmp_path / "none" / "a.json", target / "a.json"):
        with pytest.raises(ConfigError, match=f"cannot write.*{re.escape(str(path))}"):
            write_json(path, {})
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_json(target, {})
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
