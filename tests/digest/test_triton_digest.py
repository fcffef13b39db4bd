"""The Triton digest gives the value of the CPU's, on a device or interpreted."""

import os

import pytest
import torch

pytest.importorskip("triton")

from holdfast import digest
from holdfast.digest.tensors import tensor_digest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs CUDA; interpreted by test_triton_digest_interpreted",
    ),
]


@pytest.mark.parametrize("nbytes", [0, 1, 8, 63, 64, 4095, 4096, 4097, 3 * 4096, 50_001])
@pytest.mark.parametrize("offset", [0, 3, 8])
def test_the_value_is_that_of_the_cpu(nbytes: int, offset: int) -> None:
    from holdfast.digest import triton

    data = torch.randint(256, (nbytes + offset,), dtype=torch.uint8)[offset:]
    assert triton.digest(data.to(DEVICE)) == digest.digest(data.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_elements_count_in_c_order(dtype: torch.dtype) -> None:
    from holdfast.digest import triton

    matrix = torch.randn(70, 130).to(dtype)
    assert triton.digest(matrix.to(DEVICE).t()).hex() == tensor_digest(matrix.t())
    if dtype.is_complex:
        assert triton.digest(matrix.to(DEVICE).conj()).hex() == tensor_digest(matrix.conj())
