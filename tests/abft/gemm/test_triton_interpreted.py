"""The Triton tests on a machine without a CUDA device: interpreted, each file in its own process.

Triton decides when it is imported whether it interprets, and torch.compile imports it too.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

PARTS = ("api", "bench", "encode", "online", "repair", "verify")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the files run on the device themselves"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


@pytest.mark.parametrize("part", PARTS)
def test_holds_under_the_interpreter(interpret: Callable[..., None], part: str) -> None:
    interpret(Path(__file__).with_name(f"test_triton_{part}.py"))
