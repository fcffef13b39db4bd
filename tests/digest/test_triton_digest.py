"""The Triton digest gives the value of the CPU's, on a device or interpreted."""

import os

import pytest
import torch
from case_loops import for_each

pytest.importorskip("triton")

from holdfast import digest
from holdfast.digest.tensors import tensor_digest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs CUDA; interpreted by abft/test_triton.py",
    ),
]


@for_each("nbytes", [0, 1, 8, 63, 64, 4095, 4096, 4097, 3 * 4096, 50_001])
@for_each("offset", [0, 3, 8])
def test_the_value_is_that_of_the_cpu(nbytes: int, offset: int) -> None:
    from holdfast.digest import cuda

    data = torch.randint(256, (nbytes + offset,), dtype=torch.uint8)[offset:]
    assert cuda.digest(data.to(DEVICE)) == digest.digest(data.numpy())


@for_each("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_elements_count_in_c_order(dtype: torch.dtype) -> None:
    from holdfast.digest import cuda

    matrix = torch.randn(70, 130).to(dtype)
    assert cuda.digest(matrix.to(DEVICE).t()).hex() == tensor_digest(matrix.t())
    if dtype.is_complex:
        assert cuda.digest(matrix.to(DEVICE).conj()).hex() == tensor_digest(matrix.conj())
