"""The Triton attention tests on a machine without a CUDA device: interpreted, in own processes.

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

# Two processes: importing torch takes a while.
PARTS = (("api", "values"), ("bench", "faults"))

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the files run on the device themselves"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_holds_under_the_interpreter(parts: tuple[str, ...]) -> None:
    here = Path(__file__)
    files = [str(here.with_name(f"test_triton_attention_{part}.py")) for part in parts]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), done.stdout[-500:]
