"""The kernel that pools bags, compiled for GPUs that are not there."""

from functools import partial

import pytest
import torch
from bag_cases import batch_of, table_of
from triton_resources import ARCHITECTURES, MOST_REGISTERS, resources, skip_without_compiler

CASES = [  # kind, dim, dtype of the output, and options of the batch
    ("uint8", 128, torch.float32, {"weighted": True}),
    ("uint4", 64, torch.float16, {"mode": "mean"}),
    ("uint8", 33, torch.float32, {}),
    ("float32", 1024, torch.float32, {}),
]


@pytest.mark.compile
def test_it_spills_nothing_and_reads_words() -> None:
    skip_without_compiler()
    from holdfast.abft.embedding_bag import cuda

    slot = torch.zeros(1, dtype=torch.int32)
    for kind, dim, dtype, options in CASES:
        table, batch = table_of(kind, dim), batch_of(**options, dtype=dtype)  # type: ignore[arg-type]
        launch = partial(cuda.pool_triton, table, batch, slot=slot)
        for architecture in ARCHITECTURES if dim == 128 else (90,):
            (kernel,) = resources(launch, architecture, cuda)
            assert kernel.spilled_bytes == 0
            assert kernel.registers <= MOST_REGISTERS
            # A row's checksums, then four codes of a lane; of a float row 128 bits.
            widest = {"uint8": 32, "uint4": 16, "float32": 128}[kind]
            assert dim == 33 or max(kernel.loads) >= widest, kernel.loads
            assert dim == 33 or kernel.loads.get(8, 0) <= 11 + (dim == 64) * 32
            # Where products are fused with sums, they are so as on CPU.
            assert "fma.rn.f32" in kernel.ptx
            assert ".approx" not in kernel.ptx
