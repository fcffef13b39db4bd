"""Generated command lines, and that the judge of their ends finds what is wrong with one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from bench.command_line_draw import Line, draw, leaves
from bench.command_line_process import execute
from bench.command_lines import complaints_about
from holdfast.cli.main import make_parser

COUNT, SEED = 20, 11
PATIENCE_S = 120.0
Run = Callable[[list[str]], int]

pytestmark = [pytest.mark.processes, pytest.mark.representative]


@pytest.mark.timeout(PATIENCE_S + 20)
def test_generated_command_lines_end_as_documented(forked_python: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.command_lines", "--light", "--json", "bad.json"]
    command += ["--count", str(COUNT), "--seed", str(SEED)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert json.loads((tmp_path / "bad.json").read_text()) == []
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{COUNT} command lines, exit codes ")


def test_every_verb_and_every_kind_of_end_is_drawn() -> None:
    lines = [draw(Random(seed)) for seed in range(600)]
    (verbs,) = [action.choices for action in make_parser()._actions if action.dest == "verb"]
    assert {line.verb for line in lines} == {"", *verbs}
    assert {line.words[: len(path)] for line in lines for path in leaves()} >= set(leaves())
    assert 100 < sum(bool(line.refused) for line in lines) < 550
    assert sum(bool(line.environment) for line in lines) > 30


def _ended(folder: Path, line: Line, run: Run, limit_s: float = 30.0) -> list[str]:
    here = folder / "here"
    here.mkdir()
    return complaints_about(line, execute(line, here, limit_s, run), here)


def _print(text: str, file: int = 1) -> None:
    os.write(file, text.encode())


def test_the_judge_is_silent_about_command_lines_that_end_as_documented(tmp_path: Path) -> None:
    def done(words: list[str]) -> int:
        Path("out.json").write_text("{}")
        _print("done\n")
        return 0

    def refused(words: list[str]) -> int:
        _print("holdfast plan: --target nan must be a number\n", 2)
        return 2

    line = Line(("plan", "ladder"), promised={"json": "out.json"})
    for number, (one, run) in enumerate(((line, done), (Line(("plan",), refused="x"), refused))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert _ended(folder, one, run) == []


def _raises(words: list[str]) -> int:
    raise ValueError("what the user gave")


def _hangs(words: list[str]) -> int:
    time.sleep(60)
    return 0


def _dies(words: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)


def _strays(words: list[str]) -> int:
    Path("../../stray").write_text("x")
    return 0


def _leaves(words: list[str]) -> int:
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    return 0


def _refuses_late(words: list[str]) -> int:
    Path("begun").touch()
    _print("holdfast plan: no\n", 2)
    return 2


def _writes_nan(words: list[str]) -> int:
    Path("out.json").write_text("[NaN]")
    return 0


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (_raises, "a traceback on stderr: ValueError: what the user gave"),
        (_hangs, "did not end within"),
        (_dies, "exit code -9 is not documented"),
        (_strays, "wrote outside of its folder"),
        (_leaves, "left running"),
        (_refuses_late, "refused, and yet made begun"),
        (_writes_nan, "--json out.json is not whole"),
        (lambda words: 0, "--json out.json is not there"),
        (lambda words: 3, "exit code 3 is not documented for plan"),
        (lambda words: 2, "no single line"),
        (lambda words: 1, "without a word"),
        (lambda words: _print("\x1b[31m") or 1, "terminal controls on stdout"),
        (lambda words: _print("fine") or 1, "nodes 'nan' was not refused"),
    ],
)
def test_the_judge_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, expected: str
) -> None:
    monkeypatch.setattr("bench.command_line_process.GRACE_S", 0.5)
    line = Line(("plan", "ladder"), refused="nodes 'nan'", promised={"json": "out.json"})
    found = _ended(tmp_path, line, run, limit_s=1.0 if run is _hangs else 30.0)
    assert [text for text in found if expected in text] != []
