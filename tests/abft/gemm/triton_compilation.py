"""Compiles every Triton GEMM kernel: see compile_only.py."""

import torch
from compile_only import compile_only


def main() -> None:
    """Every kernel in bf16; the GEMM in every dtype and with transposed operands."""
    from holdfast.abft.gemm import triton as passes
    from holdfast.abft.gemm import triton_launch

    compile_only(triton_launch)
    size = 2048
    half = torch.zeros(size, size, dtype=torch.bfloat16)
    checksums = passes.encode(half, weighted=True)
    for mode in ("recompute", "checksum"):
        passes.verify(half.clone(), half, checksums, half, mode=mode)
    passes.matmul_online(half, half, passes.encode(half, block=256))
    passes.matmul_online(half.mT, half.mT)
    passes.matmul_online(half.float(), half.float())
    passes.matmul_online(half.to(torch.float8_e4m3fn), half.to(torch.float8_e4m3fn).mT)


if __name__ == "__main__":
    main()
