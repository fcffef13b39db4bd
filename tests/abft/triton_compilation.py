"""Compiles every Triton kernel for a Hopper GPU, as a real call would; nothing is run.

    python triton_compilation.py [CAPABILITY …]

The attention kernels are compiled for a Blackwell GPU as well; where compute capabilities are
given, for these alone, and nothing else. Each kernel is told of by a JSON line: its name and
constants, the compute capability, the dtype of its first operand, the shared memory and registers
it takes, the stack for what does not fit these, GPU IR, PTX and the bytes of its code.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from holdfast.abft.attention import cuda as attention
from holdfast.abft.gemm import cuda as gemm
from holdfast.digest import cuda as digest

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class _Device:
    """A GPU that is not there."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps a kernel for each number of a device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def resources(code: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, in a kernel's code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [TOOL, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return {"registers": int(found[1]), "stack": int(found[2])}


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
            "capability": _Device.capability,
            **resources(kernel.asm["cubin"]),
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


def compile_digest() -> None:
    """The digests of tensors of several sizes."""
    digest.queued([torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (1, 300_000)])


if __name__ == "__main__":
    compile_only()
    given = [int(word) for word in sys.argv[1:]]
    for _Device.capability in given or (100, 90):
        compile_attention(torch.bfloat16, 64, causal=True)
    if not given:
        compile_digest()
        compile_gemm()
        compile_attention(torch.bfloat16, 64, causal=True, unverified=True)
        compile_attention(torch.float16, 128, mask=torch.zeros(1024, 1024, dtype=torch.float16))
