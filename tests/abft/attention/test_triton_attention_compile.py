"""What the interpreter cannot show: the attention kernels compile for a GPU, and pipeline there."""

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

SHARED_BYTES = 232448  # what a block may have on sm_90
KERNELS = {"attention_forward_kernel", "grad_query_kernel", "grad_key_value_kernel"}


@pytest.fixture(scope="module")
def kernels(compile_kernels: Callable[[Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All kernels, compiled."""
    return compile_kernels(Path(__file__).with_name("triton_attention_compilation.py"))


def test_every_kernel_compiles_and_fits_a_multiprocessor(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["kernel"] for kernel in kernels} == KERNELS | {"attention_encode_kernel"}
    assert {kernel["verified"] for kernel in kernels} == {True, False}
    for kernel in kernels:
        assert kernel["bytes"] > 0
        assert kernel["shared_bytes"] <= SHARED_BYTES


def test_the_hook_for_faults_leaves_no_trace(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        assert "fault" not in kernel["ir"]


def test_without_verification_no_check_is_left(kernels: list[dict[str, Any]]) -> None:
    bare = [kernel for kernel in kernels if not kernel["verified"]]
    assert {kernel["kernel"] for kernel in bare} == KERNELS
    verified = [kernel for kernel in kernels if kernel["verified"] and kernel["kernel"] in KERNELS]
    for trace in ("signs", "pieces", "atomic"):
        assert all(trace not in kernel["ir"] for kernel in bare)
        assert all(trace in kernel["ir"] for kernel in verified)


def test_the_checks_leave_the_shared_memory_and_the_pipeline_as_they_are(
    kernels: list[dict[str, Any]],
) -> None:
    bf16 = [kernel for kernel in kernels if kernel["dtype"] == "torch.bfloat16"]
    for name in KERNELS:
        of_kind = {kernel["verified"]: kernel for kernel in bf16 if kernel["kernel"] == name}
        buffers = [
            sorted(re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+x\d+x\d+)xbf16", ir))
            for ir in (of_kind[True]["ir"], of_kind[False]["ir"])
        ]
        assert buffers[0] == buffers[1] != []
        assert "async_copy_global_to_local" in of_kind[True]["ir"]
        assert "warp_group_dot" in of_kind[True]["ir"]
        assert of_kind[True]["shared_bytes"] <= of_kind[False]["shared_bytes"] + 4096
