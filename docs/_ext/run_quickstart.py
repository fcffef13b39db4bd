"""Do what the quickstart says: run its program, kill a second run of it, start that again.

`make docs` calls it; it fails if the run that was killed ends with other bits.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).parents[1] / "quickstart.md"
LIMIT_S = 240


def program() -> str:
    """Return the program of the page."""
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def started(folder: Path, run_dir: str) -> subprocess.Popen[str]:
    """Start the program with a run directory of its own."""
    environment = {**os.environ, "HOLDFAST_RUN_DIR": str(folder / run_dir)}
    command = [sys.executable, "train.py"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def bits(output: str) -> str:
    """Return the sum of the weights' bits that the program has printed."""
    found = re.search(r"bits is (-?\d+)$", output, re.MULTILINE)
    assert found is not None, output
    return found[1]


def main() -> None:
    """Run the page's program three times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(program())
        calm = started(folder, "calm").communicate(timeout=LIMIT_S)[0]
        killed = started(folder, "killed")
        assert killed.stdout is not None
        deadline = time.monotonic() + LIMIT_S
        while not killed.stdout.readline().startswith("step 300"):
            assert killed.poll() is None, "the program ended before its step 300"
            assert time.monotonic() < deadline
        killed.send_signal(signal.SIGKILL)
        killed.wait(LIMIT_S)
        again = started(folder, "killed").communicate(timeout=LIMIT_S)[0]
    first = int(re.findall(r"beginning at step (\d+)", again)[0])
    assert first >= 298, f"the second run began at step {first}"
    assert bits(again) == bits(calm), f"{bits(again)} is not {bits(calm)}"
    print(f"quickstart: killed after step 300, continued at step {first}, equal bits at the end")


if __name__ == "__main__":
    main()
