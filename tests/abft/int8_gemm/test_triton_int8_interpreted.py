"""The int8 pass on a machine without a CUDA device: interpreted, and compiled for one."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the file runs on the device itself")
def test_holds_under_the_interpreter(interpret: Callable[..., None]) -> None:
    interpret(Path(__file__).with_name("test_triton_int8.py"))


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.uname().machine != "x86_64",
    reason="Triton carries an assembler for x86-64 Linux",
)
def test_it_compiles_and_fuses_no_product_with_a_sum(
    compile_kernels: Callable[[Path], list[dict[str, Any]]],
) -> None:
    kernels = compile_kernels(Path(__file__).with_name("triton_int8_compilation.py"))
    assert [kernel["kernel"] for kernel in kernels] == ["finish_kernel"] * 3
    assert all(kernel["bytes"] > 0 and "fma.rn.f32" not in kernel["ptx"] for kernel in kernels)
