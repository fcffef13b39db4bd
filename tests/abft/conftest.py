"""What the operators' tests share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Compile = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compile_kernels(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Runs a script that compiles Triton kernels, in a process that does not interpret them."""

    def run(script: Path) -> list[dict[str, Any]]:
        settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        settings["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
        paths = [str(Path(__file__).parent), *filter(None, [settings.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, str(script)],
            env=settings | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run
