"""The example of a guarded Trainer: killed, and continued by the same command."""

import os
import sys
from pathlib import Path

import pytest

example = pytest.importorskip(
    "examples.trainer.__main__",
    reason="transformers is not installed (extra 'integrations')",
    exc_type=ImportError,
)
pytestmark = pytest.mark.processes


class Killed(Exception):
    """Stands for the death of the process."""


def test_the_example_continues_after_its_own_kill(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_thread: None,
) -> None:
    def kill(*_: int) -> None:
        raise Killed

    command = ["trainer", "--steps", "4", "--run-dir", str(run_dir)]
    monkeypatch.setattr(sys, "argv", [*command, "--kill-at", "2"])
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", kill)
        with pytest.raises(Killed):
            example.main()
    monkeypatch.setattr(sys, "argv", command)
    example.main()
    said = capsys.readouterr().out
    assert f"continued from memory ({run_dir})" in said
    assert "matmul sites covered" in said
