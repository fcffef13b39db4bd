"""The Triton attention tests on a machine without a CUDA device: interpreted, in own processes.

Triton decides when it is imported whether it interprets, and torch.compile imports it too.
"""

import importlib.util
from collections.abc import Callable
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
def test_holds_under_the_interpreter(
    interpret: Callable[..., None], parts: tuple[str, ...]
) -> None:
    here = Path(__file__)
    interpret(*(here.with_name(f"test_triton_attention_{part}.py") for part in parts))
