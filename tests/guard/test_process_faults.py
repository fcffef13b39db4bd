"""Whatever ends or stops the trainer's process, the run ends with an undisturbed one's bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import process_fault_run
import pytest
from guard_cases import Run
from process_fault_run import FAULTS, STEPS, STRUCK

FOLDERS = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
# How the process of a kind ends that does not go on by itself.
ENDS = {
    "abort": -signal.SIGABRT,
    "segmentation fault": -signal.SIGSEGV,
    "SIGINT": -signal.SIGINT,
    "SIGTERM": -signal.SIGTERM,
    "SIGKILL": -signal.SIGKILL,
    "stopped for a while": 0,
    "GIL held for a while": 0,
    "none": 0,
}
QUICK = ("exception", "segmentation fault", "stopped for a while", "none")


def live(run_dir: Path, kind: str, out: Path) -> int:
    """One life of the trainer; return its exit status."""
    command = [sys.executable, process_fault_run.__file__, str(run_dir), kind, str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return ended.returncode


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.representative] * (kind in QUICK)) for kind in FAULTS],
)
def test_a_process_fault_leaves_no_trace_in_the_result(
    run_dir: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "result"
    status = live(run_dir, kind, out)
    # Where an exit handler of torch imports a named tuple, Python forgets that it was interrupted.
    assert status in {ENDS.get(kind, 1), *([1] if kind == "SIGINT" else [])}
    began = 0
    if status:
        assert not out.exists()
        assert live(run_dir, kind, out) == 0
        began = STRUCK
    assert out.read_text() == f"{began} {Run().bare(STEPS).digest()}"
