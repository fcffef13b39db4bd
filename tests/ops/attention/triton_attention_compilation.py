"""Compiles every Triton attention kernel for a Hopper GPU, as a real call would; nothing is run.

Prints a JSON line for each: what was compiled, Triton's GPU IR, and what it takes.
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
        told = {
            "kernel": self.__name__,
            "verified": bool(options.get("VERIFY", True)),
            "dtype": str(args[0].data.dtype),
            "shared_bytes": kernel.metadata.shared,
            "ir": kernel.asm["ttgir"],
            "bytes": len(kernel.asm["cubin"]),
        }
        print(json.dumps(told), flush=True)
        return kernel

    JITFunction.run = compile_and_tell


def main() -> None:
    """bf16 verified and not, causal; fp16 with a mask and wide heads."""
    driver.set_active(_Device())
    _compile_only()
    from holdfast.ops.attention import triton as fused
    from holdfast.ops.attention import triton_launch

    triton_launch.on = lambda tensor: contextlib.nullcontext()

    def both(dtype: torch.dtype, width: int, **options: Any) -> None:
        q, k, v, grad = (torch.zeros(2, 4, 1024, width, dtype=dtype) for _ in range(4))
        out, lse, _ = fused.attention_forward(q, k, v, **options)
        fused.attention_backward(grad, q, k, v, out, lse, **options)

    both(torch.bfloat16, 64, causal=True)
    both(torch.bfloat16, 64, causal=True, unverified=True)
    both(torch.float16, 128, mask=torch.zeros(1024, 1024, dtype=torch.float16))


if __name__ == "__main__":
    main()
