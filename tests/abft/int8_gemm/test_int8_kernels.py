"""The pass over int8 accumulators, compiled for GPUs that are not there."""

import pytest
import torch
from triton_resources import ARCHITECTURES, MOST_REGISTERS, resources, skip_without_compiler


@pytest.mark.compile
def test_it_spills_nothing_reads_128_bits_and_fuses_no_product_with_a_sum() -> None:
    skip_without_compiler()
    from holdfast.abft.int8_gemm import cuda
    from holdfast.abft.int8_gemm.weights import Int8Weights

    weights = Int8Weights(
        torch.ones((512, 64), dtype=torch.int8), 0.01, 3, implementation="reference"
    )
    weights._implementation = cuda.TritonInt8Gemm
    weights.gemm = weights._make(weights.matrix())
    a, scales = torch.zeros((32, 64), dtype=torch.uint8), weights.scales(0.1, 7, 0.0, 3)
    slot = torch.zeros(1, dtype=torch.int32)
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        out = torch.empty((32, 512), dtype=dtype)
        for architecture in ARCHITECTURES if dtype is torch.float32 else (90,):
            (kernel,) = resources(
                lambda out=out: weights.gemm.multiply(a, out, scales, True, slot),
                architecture,
                cuda,
            )
            assert kernel.spilled_bytes == 0
            assert kernel.registers <= MOST_REGISTERS
            assert kernel.loads.get(128, 0) >= 4
            assert "fma.rn.f32" not in kernel.ptx
