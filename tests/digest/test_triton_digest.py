"""The Triton digest gives the value of the CPU's, on a device or interpreted."""

from typing import Any

import pytest
import torch
from case_loops import for_each
from triton_device import DEVICE, MARKS

from holdfast import digest
from holdfast.digest import cuda, kernels
from holdfast.digest.tensors import tensor_digest

pytestmark = MARKS


@for_each("nbytes", [0, 1, 8, 63, 64, 4095, 4096, 4097, 3 * 4096, 50_001])
@for_each("offset", [0, 3, 8])
def test_the_value_is_that_of_the_cpu(nbytes: int, offset: int) -> None:
    data = torch.randint(256, (nbytes + offset,), dtype=torch.uint8)[offset:]
    assert cuda.digests([data.to(DEVICE)])[0] == digest.digest(data.numpy())


@for_each("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_elements_count_in_c_order(dtype: torch.dtype) -> None:
    matrix = torch.randn(70, 130).to(dtype)
    assert cuda.digests([matrix.to(DEVICE).t()])[0].hex() == tensor_digest(matrix.t())
    if dtype.is_complex:
        assert cuda.digests([matrix.to(DEVICE).conj()])[0].hex() == tensor_digest(matrix.conj())


def test_many_tensors_are_digested_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int]] = []

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            grids.append(grid)
            return kernels.digest_kernel[grid]

    monkeypatch.setattr(cuda, "digest_kernel", Counted())
    sizes = [1, 300_000, 0, 131_072, 131_073, 7, 64]
    held = [torch.randint(256, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
    found = cuda.digests([tensor.to(DEVICE) for tensor in held])
    assert found == [digest.digest(tensor.numpy()) for tensor in held]
    assert grids == [(1 + 3 + 0 + 1 + 2 + 1 + 1,)]
    assert cuda.digests([torch.empty(0, device=DEVICE)]) == [digest.digest(b"")]
