"""What needs no tensors does not wait for torch: help, versions, ledgers, completions."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.abft.thresholds.measurement import DTYPES
from holdfast.abft.thresholds.settings import PRECISIONS
from holdfast.cli import calibrate, screen, snapshots
from holdfast.cli.main import VERBS
from holdfast.events import LEDGER_NAME, Event, Ledger
from holdfast.screen.job import SCALES
from holdfast.screen.judge import FINDERS
from holdfast.snapshot.disk.export import FORMATS

# Each command line runs in one process, in which importing torch or NumPy would fail.
PROGRAM = """
import sys
sys.modules.update(torch=None, numpy=None)
from holdfast.cli.main import main
for line in sys.argv[1:]:
    sys.argv[0] = "holdfast"
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = ended.code
    assert code == 0, (line, code)
"""
# The plots of `plan` import NumPy with it; `run` has torchrun's options.
WITHOUT_NUMPY = [verb for verb in VERBS if verb not in ("run", "plan")]


@pytest.mark.processes
@pytest.mark.representative
def test_no_verb_needs_torch_to_show_its_options_and_no_ledger_to_be_read(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / LEDGER_NAME)) as ledger:
        ledger.append(Event("gemm_fault", op="blocks.0.attn/mm/forward", step=3, rank=1))
    lines = ["--version", "--help", f"events {tmp_path}"]
    lines += [f"{verb} --help" for verb in WITHOUT_NUMPY]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert "blocks.0.attn/mm/forward" in done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("holdfast ev", ["events"]),
        ("holdfast events --st", ["--step"]),
        ("holdfast snapshots st", ["status", "stop"]),
    ],
)
def test_a_shell_gets_the_completions_of_verbs_and_options(
    tmp_path: Path, line: str, expected: list[str]
) -> None:
    answer = tmp_path / "answer"
    request = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line}
    request |= {"COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    command = [sys.executable, "-m", "holdfast"]
    subprocess.run(command, env=os.environ | request, check=True, timeout=60)
    assert [word.strip() for word in answer.read_text().splitlines()] == expected


def test_choices_that_parsers_name_without_torch_are_those_of_the_work() -> None:
    assert tuple(DTYPES) == calibrate.DTYPES
    assert tuple(PRECISIONS.values()) == calibrate.PRECISIONS
    assert (FINDERS, tuple(SCALES)) == (screen.FINDERS, screen.SCALES)
    assert tuple(sorted(FORMATS)) == snapshots.FORMATS
