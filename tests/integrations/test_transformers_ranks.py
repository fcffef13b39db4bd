"""The adapter to Hugging Face's Trainer on two ranks of DDP."""

import json
from pathlib import Path

import pytest
from transformers_ranks import KILLED, RANKS, STRUCK, launch


@pytest.mark.processes
def test_a_fault_on_one_rank_and_its_death_leave_no_trace(run_dir: Path, tmp_path: Path) -> None:
    for life in ("bare", "first", "second"):
        launch(tmp_path, life)
    found = {
        (life, rank): json.loads((tmp_path / f"{life}.{rank}").read_text())
        for life in ("bare", "second")
        for rank in range(RANKS)
    }
    assert not (tmp_path / "first.1").exists()
    assert json.loads((tmp_path / "kinds").read_text()) == [["rerun", STRUCK[0]]]
    for rank in range(RANKS):
        assert found["second", rank]["resumed"] in (KILLED[0], KILLED[0] - 1)
        assert found["second", rank]["digest"] == found["bare", rank]["digest"]
