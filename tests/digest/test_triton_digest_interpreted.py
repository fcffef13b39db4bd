"""The Triton digest on a machine without a CUDA device: interpreted, in a process of its own."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the file runs on the device itself"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


def test_holds_under_the_interpreter(interpret: Callable[..., None]) -> None:
    interpret(Path(__file__).with_name("test_triton_digest.py"))
