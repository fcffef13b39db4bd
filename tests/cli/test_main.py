"""The command line as a whole: exit codes, settings, and what is shown of a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import main, make_parser
from holdfast.cli.progress import describe, sparkline
from holdfast.errors import ConfigError, HoldfastError, UncorrectableFault
from holdfast.events import Event, EventKind
from holdfast_lab.cli import demo, train
from holdfast_lab.trainer.agent import RunFailed


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


@pytest.mark.parametrize("defect", [TypeError("nobody's input"), OSError(12, "no memory")])
def test_a_defect_is_shown_whole_and_is_no_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, defect: Exception
) -> None:
    def run(args: object) -> int:
        raise defect

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == 70
    *traceback, last = capsys.readouterr().err.splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert str(defect) in traceback[-1]
    assert last.startswith("holdfast demo: this is a defect of holdfast ")


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("/dev/full", 1, "holdfast plan: cannot write the output: No space left on device\n"),
        ("closed", 141, ""),
        ("ascii", 0, ""),
    ],
)
def test_an_output_that_cannot_be_written_or_lacks_characters(
    forked_python: None, tmp_path: Path, output: str, code: int, said: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer) if output != "closed" else None
    path = Path(output if output == "/dev/full" else tmp_path / "output")
    program = "import io, sys\nfrom holdfast.cli.main import main\n"
    if output == "ascii":
        program += "sys.stdout = io.TextIOWrapper(io.FileIO(1, 'w', closefd=False), 'ascii')\n"
    program += "code = main(['plan', 'attention', '--plot', sys.argv[1]])\nsys.exit(code)"
    command = [sys.executable, "-c", program, str(tmp_path / "é\u202e.svg")]
    with path.open("w") as file:
        stdout = writer if output == "closed" else file
        done = subprocess.run(command, stdout=stdout, stderr=-1, text=True, timeout=60)
    os.close(writer) if output == "closed" else None
    assert (done.returncode, done.stderr) == (code, said)
    if output == "ascii":
        assert r"plot: " in path.read_text()
        assert r"\xe9\u202e.svg" in path.read_text()


@pytest.mark.processes
@pytest.mark.representative
def test_the_installed_command_behaves_so_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli.main", "train", "--ranks", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "holdfast train: ranks = 0 must be at least 1\n"
    assert list(tmp_path.iterdir()) == []


def test_settings_of_a_command_line_are_those_that_were_asked(tmp_path: Path) -> None:
    words = "--layers 1 --heads 2 --width 16 --lr 0.5 --dtype bf16 --mode bare --seed 9"
    words += f" --audit 0.5 --dropout 0.1 --data relative --run-dir {tmp_path}"
    args = make_parser().parse_args(["train", *words.split()])
    settings = train.settings_of(args)
    assert (settings.lr, settings.dtype, settings.mode, settings.seed) == (0.5, "bf16", "bare", 9)
    assert (settings.model.width, settings.model.dropout, settings.audit) == (16, 0.1, 0.5)
    assert settings.data == str(Path("relative").absolute())


def test_a_fault_and_its_answer_are_described() -> None:
    detail = {"kind": "bitflip", "bit": 30, "site": "output"}
    struck = describe(Event("injected", op="head/mm/forward", step=3, rank=1, detail=detail))
    assert struck == "  ⚡ step 3, rank 1: bitflip bit 30 (output) in head/mm/forward"
    answer = Event("gemm_fault", op="x", detector="checksum", rung="correct", step=3, rank=1)
    summary = EventKind.summary_of("gemm_fault")
    expected = f"  ✓ step 3, rank 1: {summary} in x, seen by checksum → correct"
    assert describe(answer) == expected
    killed = Event("injected", step=3, rank=1, detail={"kind": "kill_trainer", "bit": None})
    assert describe(killed) == "  ⚡ step 3, rank 1: kill trainer"
    detail = {"kind": "lose_node", "bit": None, "site": "node"}
    lost = Event("injected", op="node-1", step=3, rank=-1, detail=detail)
    assert describe(lost).startswith("  ⚡ step 3: lose node")
    assert describe(Event("persisted", step=3, rank=-1)).startswith("  ! step 3, persister: ")


def test_the_sparkline_shows_what_is_not_finite() -> None:
    assert sparkline({1: 3.0, 2: float("nan"), 3: 1.0, 4: float("inf")}) == "█×▁×"
    assert sparkline({1: float("nan")}) == "×"
    assert sparkline({1: 2.0, 2: 2.0}) == "▁▁"
    assert len(sparkline(dict.fromkeys(range(1000), 1.0))) <= 60
