"""Calls of verbs: what they wrote and printed, and the signals that they took over."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main


@pytest.fixture
def document(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a verb that must end with this code; what it wrote to its ``--json``."""

    def run(*words: object, code: int = 0) -> dict[str, Any]:
        path = tmp_path / "document.json"
        assert main([*map(str, words), "--json", str(path)]) == code
        written: dict[str, Any] = json.loads(path.read_text())
        return written

    return run


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call ``holdfast snapshots``; its exit code, and what it printed on both streams."""

    def run(action: str, *words: object) -> tuple[int, str, str]:
        code = main(["snapshots", action, *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Verbs take over signals for their process; here that is the test's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
