"""Bad input at the command line: exit code 2, one line with value and remedy, nothing begun."""

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import __version__
from holdfast.cli.main import main, make_parser
from holdfast.cli.progress import describe, sparkline
from holdfast.errors import ConfigError, HoldfastError, UncorrectableFault
from holdfast.events import Event
from holdfast.report.run_files import SETTINGS_NAME
from holdfast_lab.cli import demo, train
from holdfast_lab.trainer import launch
from holdfast_lab.trainer.agent import RunFailed
from holdfast_lab.trainer.rundir import claimed

TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 2 --steps 6 --warmup-steps 1"
FAULT = '[[fault]]\nstep = 2\nrank = 0\nkind = "inf"\nop = "head/mm/forward"\n'


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """The verbs take SIGTERM over for their process; here that is the test's."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("training processes were started on bad input")

    monkeypatch.setattr(launch, "_launch", started)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("to be or not to be " * 20)
    return folder


def _words(run_dir: Path, text: Path, more: str) -> list[str]:
    return ["train", "--run-dir", str(run_dir), "--data", str(text), *TINY.split(), *more.split()]


def _error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that a refused command prints."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith(f"holdfast {arguments[0]}: ")
    assert "Traceback" not in captured.err
    return lines[0]


def _usable(run_dir: Path, text: Path) -> bool:
    """Whether a good run can begin there now."""
    args = make_parser().parse_args(_words(run_dir, text, ""))
    with claimed(run_dir, train.settings_of(args), [], resume=False):
        return (run_dir / SETTINGS_NAME).exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--ranks 0", ["ranks = 0", "at least 1"]),
        ("--ranks 20000", ["ranks = 20000", "too many"]),
        ("--json /no/such/folder/x.json", ["/no/such/folder", "writable"]),
        ("--width 15", ["width = 15", "heads = 2", "change one"]),
        ("--context 500", ["380 bytes", "501", "shorter context"]),
        ("--lr nan", ["lr = nan", "positive"]),
        ("--warmup-steps 6", ["warmup_steps = 6", "less than steps = 6"]),
        ("--data /no/such/folder", ["no folder /no/such/folder", "give"]),
        ("--schedule /no/such.toml", ["cannot read", "/no/such.toml", "No such file"]),
        ("--resume", ["holds no run to resume", "without --resume"]),
    ],
)
def test_a_bad_setting_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path, more: str, words: list[str]
) -> None:
    run_dir = tmp_path / "run"
    message = _error(capsys, _words(run_dir, text, more))
    assert [word for word in words if word not in message] == []
    assert not (run_dir / SETTINGS_NAME).exists()
    assert _usable(run_dir, text)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (FAULT.replace("head/", "haed/"), ["fault 1", "'haed/mm/forward'", "head/mm/forward"]),
        (FAULT + "bits = 3\n", ["fault 1", "unknown key 'bits'", "valid: step"]),
        (FAULT.replace('"inf"', '"fni"'), ["fault 1", "unknown kind 'fni'", "near_inf"]),
        (FAULT.replace("step = 2", "step = 6"), ["fault 1", "step 6", "valid: 0 to 5"]),
        (FAULT.replace('"inf"', '"bitflip"\nbit = 40'), ["fault 1", "bit 40", "0 to 31"]),
        (FAULT + 'site = "outptu"\n', ["unknown site 'outptu'", "operand"]),
        ("step = 3", ["unknown key 'step'", "[[fault]]"]),
        ("[[fault]\n", ["storm.toml"]),
    ],
)
def test_a_bad_schedule_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path, table: str, words: list[str]
) -> None:
    schedule, run_dir = tmp_path / "storm.toml", tmp_path / "run"
    schedule.write_text(table)
    message = _error(capsys, _words(run_dir, text, f"--schedule {schedule}"))
    assert [word for word in words if word not in message] == []
    assert not run_dir.exists()


def test_text_that_is_empty_binary_or_a_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a").write_bytes(b"a\0b" * 100)
    run_dir = tmp_path / "run"
    for folder, words in (
        ("empty", "give a folder of text"),
        ("binary", "1 binary files"),
        ("text/a.txt", "is not a directory"),
    ):
        message = _error(capsys, _words(run_dir, tmp_path / folder, ""))
        assert words in message
        assert str(tmp_path / folder) in message
    assert not run_dir.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_text_that_may_not_be_read_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    (text / "a.txt").chmod(0)
    assert "Permission denied; make it readable" in _error(
        capsys, _words(tmp_path / "run", text, "")
    )


def test_a_directory_in_use_or_holding_a_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    run_dir = tmp_path / "run"
    args = make_parser().parse_args(_words(run_dir, text, ""))
    with claimed(run_dir, train.settings_of(args), [], resume=False):
        message = _error(capsys, _words(run_dir, text, ""))
        assert f"another run is using {run_dir}: wait for it, or give another" in message
    record = (run_dir / SETTINGS_NAME).read_bytes()
    assert f"{run_dir} already holds a run: give" in _error(capsys, _words(run_dir, text, ""))
    assert "steps = 6 and not 7" in _error(capsys, _words(run_dir, text, "--resume --steps 7"))
    assert (run_dir / SETTINGS_NAME).read_bytes() == record


def test_the_demo_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = ["demo", "--run-dir", str(tmp_path / "demo")]
    assert "--low-flips 3 needs --random-storm" in _error(capsys, [*base, "--low-flips", "3"])
    assert "audit = 1.5" in _error(capsys, [*base, "--audit", "1.5"])
    assert "seed = -1" in _error(capsys, [*base, "--seed", "-1"])
    for count, words in (("-2", "must be at least 0"), ("99999", "no place is left")):
        storm = [*base, "--random-storm", "1", "--low-flips", count]
        message = _error(capsys, storm)
        assert f"--low-flips {count}" in message
        assert words in message
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("value and remedy"), 2, "value and remedy"),
        (RunFailed("rank 1 failed; see /x"), 1, "rank 1 failed; see /x"),
        (UncorrectableFault("step 3: persists"), 1, "step 3: persists"),
        (HoldfastError("else"), 1, "else"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_error_has_its_exit_code_and_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == f"holdfast demo: {words}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-verb"], ["train", "--steps", "many"], ["train", "--mode", "x"]]
)
def test_what_the_parser_refuses_ends_with_code_two(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: holdfast" in capsys.readouterr().err


def test_version_and_help_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["demo", "--help"], ["train", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.representative
def test_the_installed_command_behaves_so_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli.main", "train", "--ranks", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "holdfast train: ranks = 0 must be at least 1\n"
    assert list(tmp_path.iterdir()) == []


def test_settings_of_a_command_line_are_those_that_were_asked(tmp_path: Path) -> None:
    words = "--lr 0.5 --dtype bf16 --mode bare --seed 9 --audit 0.5 --dropout 0.1"
    args = make_parser().parse_args(_words(tmp_path, Path("relative"), words))
    settings = train.settings_of(args)
    assert (settings.lr, settings.dtype, settings.mode, settings.seed) == (0.5, "bf16", "bare", 9)
    assert (settings.model.width, settings.model.dropout, settings.audit) == (16, 0.1, 0.5)
    assert settings.data == str(Path("relative").absolute())


def test_a_fault_and_its_answer_are_described() -> None:
    detail = {"kind": "bitflip", "bit": 30, "site": "output"}
    struck = describe(Event("injected", op="head/mm/forward", step=3, rank=1, detail=detail))
    assert struck == "  ⚡ step   3 rank 1  bitflip bit 30 in head/mm/forward (output)"
    answer = Event("gemm_fault", op="x", detector="checksum", rung="correct", step=3, rank=1)
    assert describe(answer) == "  ✓ step   3 rank 1  gemm_fault seen by checksum → correct  x"
    killed = Event("injected", step=3, rank=1, detail=detail | {"kind": "kill", "bit": None})
    assert "kill in the process" in describe(killed)


def test_the_sparkline_shows_what_is_not_finite() -> None:
    assert sparkline({1: 3.0, 2: float("nan"), 3: 1.0, 4: float("inf")}) == "█×▁×"
    assert sparkline({1: float("nan")}) == "×"
    assert sparkline({1: 2.0, 2: 2.0}) == "▁▁"
    assert len(sparkline(dict.fromkeys(range(1000), 1.0))) <= 60


def test_the_package_names_this_command() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["holdfast"] == "holdfast.cli.main:main"
