"""The programs of ``docs/guard.md`` run as printed."""

import re
from pathlib import Path

import pytest
import torch
from guard_cases import kinds

from holdfast.snapshot.node.launch import stop_smp

DOCUMENT = Path(__file__).parents[2] / "docs" / "guard.md"
FORMS = 9  # programs after the start that they share


@pytest.mark.processes
def test_the_programs_of_the_document_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    start, *programs = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    assert len(programs) == FORMS
    try:
        for program in programs:
            names: dict[str, object] = {}
            exec(start, names)
            before = [p.tolist() for p in names["model"].parameters()]  # type: ignore[attr-defined]
            exec(program, names)
            assert names["guard"].steps_done in (6, 12)  # type: ignore[attr-defined]
            trained = [p.tolist() for p in names["model"].parameters()]  # type: ignore[attr-defined]
            assert trained != before
    finally:
        for run_dir in tmp_path.iterdir():
            stop_smp(run_dir)
    assert set(kinds()) <= {"guard_attached", "rerun"}  # a scaler's first step may overflow
