"""Compiles every Triton attention kernel: see compile_only.py."""

from typing import Any

import torch
from compile_only import compile_only


def main() -> None:
    """bf16 verified and not, causal; fp16 with a mask and wide heads."""
    from holdfast.abft.attention import triton as fused
    from holdfast.abft.attention import triton_launch

    compile_only(triton_launch)

    def both(dtype: torch.dtype, width: int, **options: Any) -> None:
        q, k, v, grad = (torch.zeros(2, 4, 1024, width, dtype=dtype) for _ in range(4))
        out, lse, _ = fused.attention_forward(q, k, v, **options)
        fused.attention_backward(grad, q, k, v, out, lse, **options)

    both(torch.bfloat16, 64, causal=True)
    both(torch.bfloat16, 64, causal=True, unverified=True)
    both(torch.float16, 128, mask=torch.zeros(1024, 1024, dtype=torch.float16))


if __name__ == "__main__":
    main()
