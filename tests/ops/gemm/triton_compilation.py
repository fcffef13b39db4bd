"""Compiles every Triton kernel for a Hopper GPU, as a real call would; nothing is run.

Prints a JSON line for each: what was compiled, and Triton's GPU IR.
"""

import contextlib
import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)


class _Device:
    """A GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _compile_only() -> None:
    run = JITFunction.run

    def compile_and_tell(self: JITFunction, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options | {"warmup": True})
        told = {"kernel": self.__name__, "constants": str(kernel.src.constants)}
        code = {"ir": kernel.asm["ttgir"], "ptx": kernel.asm["ptx"]}
        print(json.dumps(told | code | {"bytes": len(kernel.asm["cubin"])}))
        return kernel

    JITFunction.run = compile_and_tell


def main() -> None:
    """Every kernel in bf16; the GEMM in every dtype and with transposed operands."""
    driver.set_active(_Device())
    _compile_only()
    from holdfast.ops.gemm import triton as passes
    from holdfast.ops.gemm import triton_launch

    triton_launch.on = lambda tensor: contextlib.nullcontext()
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
