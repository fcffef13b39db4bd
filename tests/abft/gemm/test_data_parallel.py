"""Data-parallel ranks, each a process of its own that checks what it computes (``ddp_worker``)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddp_worker import RANKS

SCRIPT = Path(__file__).with_name("ddp_worker.py")
ROOT = SCRIPT.parents[3]
PATHS = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.usefixtures("forked_python")
def test_a_fault_is_repaired_on_the_rank_it_strikes_and_unverified_reaches_the_other(
    tmp_path: Path,
) -> None:
    place = {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--rank", str(rank), "--directory", str(tmp_path)],
            env=os.environ | place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [worker.communicate(timeout=100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(100)
    assert [worker.returncode for worker in workers] == [0] * RANKS, said
    assert [out for out, _ in said] == ["checked\n"] * RANKS
