"""The Triton digest gives the value of the CPU's, on a device or interpreted."""

import torch
from case_loops import for_each
from triton_device import DEVICE, MARKS

from holdfast import digest
from holdfast.digest import cuda
from holdfast.digest.tensors import tensor_digest

pytestmark = MARKS


@for_each("nbytes", [0, 1, 8, 63, 64, 4095, 4096, 4097, 3 * 4096, 50_001])
@for_each("offset", [0, 3, 8])
def test_the_value_is_that_of_the_cpu(nbytes: int, offset: int) -> None:
    data = torch.randint(256, (nbytes + offset,), dtype=torch.uint8)[offset:]
    assert cuda.digest(data.to(DEVICE)) == digest.digest(data.numpy())


@for_each("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_elements_count_in_c_order(dtype: torch.dtype) -> None:
    matrix = torch.randn(70, 130).to(dtype)
    assert cuda.digest(matrix.to(DEVICE).t()).hex() == tensor_digest(matrix.t())
    if dtype.is_complex:
        assert cuda.digest(matrix.to(DEVICE).conj()).hex() == tensor_digest(matrix.conj())
