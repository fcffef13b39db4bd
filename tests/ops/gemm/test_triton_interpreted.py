"""The Triton tests on a machine without a CUDA device: interpreted, each file in its own process.

Triton decides when it is imported whether it interprets, and torch.compile imports it too.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PARTS = ("api", "bench", "encode", "online", "repair", "verify")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the files run on the device themselves"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


@pytest.mark.parametrize("part", PARTS)
def test_holds_under_the_interpreter(part: str) -> None:
    file = Path(__file__).with_name(f"test_triton_{part}.py")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(file),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), done.stdout[-500:]
