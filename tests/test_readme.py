"""The program in the README: it runs as printed, and continues after a SIGKILL."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_server import Server

from holdfast.errors import SmpUnavailable
from holdfast.snapshot.node.launch import smp_status, stop_smp

ROOT = Path(__file__).parents[1]
LINES = 21


def program() -> str:
    """The first Python program of the README."""
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert found is not None
    return found[1]


@pytest.mark.processes
def test_the_program_of_the_readme_continues_after_a_kill(
    tmp_path: Path, python_server: Server
) -> None:
    assert program().count("\n") <= LINES
    script, run_dir = tmp_path / "train.py", tmp_path / "holdfast-run"
    # The same program, slow enough to be killed in the middle.
    slow = "        import time; time.sleep(0.02)\n"
    script.write_text(re.sub(r"(        loss = guard\.step.*\n)", rf"\1{slow}", program()))
    command = [sys.executable, str(script)]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while (held := _newest(run_dir)) < 5:
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        assert first.wait(10) == -signal.SIGKILL
        script.write_text(program())
        with python_server.client.forking():  # that it starts from nothing is shown already
            second = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
            )
    finally:
        first.kill()
        stop_smp(run_dir)
    assert second.returncode == 0, second.stderr
    assert "5 of 5 matmul sites covered" in second.stdout
    calls = int(re.findall(r"0/addmm/forward +(\d+)", second.stdout)[0])
    assert calls <= 300 - held


def _newest(run_dir: Path) -> int:
    try:
        return int((smp_status(run_dir) or {}).get("newest") or 0)
    except SmpUnavailable:
        return 0
