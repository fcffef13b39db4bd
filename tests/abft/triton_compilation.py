"""Compiles every Triton kernel for a Hopper GPU, as a real call would; nothing is run.

Each kernel is told of by a JSON line: its name and constants, the dtype of its first operand, the
shared memory it takes, GPU IR, PTX and the bytes of its code.
"""

import contextlib
import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from holdfast.abft.attention import cuda as attention
from holdfast.abft.gemm import cuda as gemm
from holdfast.abft.int8_gemm.cuda import finish

HOPPER = GPUTarget("cuda", 90, 32)


class _Device:
    """A GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only() -> None:
    """Compile kernels and print them from now on, instead of running them."""
    driver.set_active(_Device())
    for launch in (gemm, attention):
        launch.on = lambda tensor: contextlib.nullcontext()
    run = JITFunction.run

    def compile_and_tell(self: JITFunction, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options | {"warmup": True})
        operand = args[0]  # a tensor, a tuple that begins with one, or a descriptor of one
        for held in ("q", "data", "base"):
            operand = getattr(operand, held, operand)
        told = {
            "kernel": self.__name__,
            "constants": str(kernel.src.constants),
            "verified": all(getattr(each, "verify", True) for each in args),
            "dtype": str(operand.dtype),
            "shared_bytes": kernel.metadata.shared,
            "ir": kernel.asm["ttgir"],
            "ptx": kernel.asm["ptx"],
            "bytes": len(kernel.asm["cubin"]),
        }
        print(json.dumps(told), flush=True)
        return kernel

    JITFunction.run = compile_and_tell


def compile_gemm() -> None:
    """Every kernel in bf16; the product in every dtype and with transposed operands."""
    half = torch.zeros(2048, 2048, dtype=torch.bfloat16)
    gemm.matmul_online(half, half, gemm.encode(half, block=256))
    gemm.matmul_online(half.mT, half.mT)
    gemm.matmul_online(half.float(), half.float())
    gemm.matmul_online(half.to(torch.float8_e4m3fn), half.to(torch.float8_e4m3fn).mT)


def compile_attention(dtype: torch.dtype, width: int, **options: Any) -> None:
    q, k, v, grad = (torch.zeros(2, 4, 1024, width, dtype=dtype) for _ in range(4))
    out, lse, _ = attention.attention_forward(q, k, v, **options)
    attention.attention_backward(grad, q, k, v, out, lse, **options)


def compile_int8() -> None:
    """Each dtype of the output, with digits and with zero points of B."""
    c, vector = torch.zeros((4, 512), dtype=torch.int32), torch.zeros(576, dtype=torch.int32)
    operands = vector, vector.float(), vector.float()
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        out = torch.empty((4, 512), dtype=dtype)
        finish(c, c[:, :3], c[:, 0], operands, vector, out, zero_point=3, relu=False, verify=True)


if __name__ == "__main__":
    compile_only()
    compile_gemm()
    compile_attention(torch.bfloat16, 64, causal=True)
    compile_attention(torch.bfloat16, 64, causal=True, unverified=True)
    compile_attention(torch.float16, 128, mask=torch.zeros(1024, 1024, dtype=torch.float16))
    compile_int8()
