"""What the interpreter cannot show: the kernels compile for a GPU, and pipeline as they must."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or os.uname().machine != "x86_64",
        reason="Triton carries an assembler for x86-64 Linux",
    ),
]


@pytest.fixture(scope="module")
def kernels(compile_kernels: Callable[[Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All kernels, compiled."""
    return compile_kernels(Path(__file__).with_name("triton_compilation.py"))


def test_every_kernel_compiles(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["kernel"] for kernel in kernels} == {
        "encode_kernel",
        "weigh_kernel",
        "verify_kernel",
        "recompute_kernel",
        "predict_kernel",
        "gemm_kernel",
    }
    assert all(kernel["bytes"] > 0 for kernel in kernels)


def test_the_hook_for_faults_leaves_no_trace(kernels: list[dict[str, Any]]) -> None:
    products = [kernel for kernel in kernels if kernel["kernel"] == "gemm_kernel"]
    assert len(products) == 4
    for product in products:
        assert "fault" not in product["ir"]


def test_no_operand_is_overwritten_while_it_is_read(kernels: list[dict[str, Any]]) -> None:
    # With one product pending, two stages ahead, a block needs a third buffer (triton issue 6691).
    ir = next(kernel["ir"] for kernel in kernels if kernel["kernel"] == "gemm_kernel")
    assert "isAsync = true" in ir
    assert "pendings = 1" in ir
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+x\d+x\d+)xbf16", ir)
    assert sorted(buffers) == ["3x128x64", "3x64x256"]
    # Where other code reads a block as well it gets two, so nothing may be loaded ahead.
    ir = next(kernel["ir"] for kernel in kernels if kernel["kernel"] == "recompute_kernel")
    assert "warp_group_dot" in ir
    assert "async_copy" not in ir
