"""The adapter to Hugging Face's Trainer on two ranks of DDP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers_ranks
from transformers_ranks import KILLED, RANKS, STRUCK


@pytest.mark.processes
def test_a_fault_on_one_rank_and_its_death_leave_no_trace(run_dir: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    paths = [root, root / "tests", Path(__file__).parent, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, transformers_ranks.__file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = {
        (life, rank): json.loads((tmp_path / f"{life}.{rank}").read_text())
        for life in ("bare", "second")
        for rank in range(RANKS)
    }
    assert not (tmp_path / "first.1").exists(), ended.stderr[-4000:]
    assert json.loads((tmp_path / "kinds").read_text()) == [["rerun", STRUCK[0]]]
    for rank in range(RANKS):
        assert found["second", rank]["resumed"] in (KILLED[0], KILLED[0] - 1)
        assert found["second", rank]["digest"] == found["bare", rank]["digest"]
