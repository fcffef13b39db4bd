"""Measurement of how many products this machine's GEMM kernels add in one running sum.

The rounding of a sum grows with the length of its chains, and kernels differ: MKL sums fp32 in
panels of 192 or 384 products, and fp64 on some processors over the whole of K. This is not
documented, but one product of integers shows it exactly.
"""

from functools import lru_cache

import torch

UNBOUNDED = 1 << 30  # the chain is as long as K
LEAST = 128  # assumed if a shorter chain is measured
_INNER = 2048  # K of the measured products; a chain of half of it or more counts as unbounded
_PROBED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SHAPES = ((64, 64), (16, 48))  # M, N


@lru_cache
def longest_chain(dtype: torch.dtype) -> int:
    """Measure the longest chain of additions in ``torch.mm`` and ``torch.bmm`` on CPU.

    The first product of a row is 2^p, the last −2^p, all others 1, with p such that 2^p + 1 rounds
    to 2^p in the accumulator: ones that are added in the chain of 2^p are lost, the others remain.

    Returns ``UNBOUNDED`` if the whole row is one chain, and for dtypes other than fp64, fp32, fp16
    and bf16. Products of few rows or columns are not measured, as they count as one chain.
    """
    if dtype not in _PROBED:
        return UNBOUNDED
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        lost = max(_lost(dtype, *shape, layout) for shape in _SHAPES for layout in range(4))
    return UNBOUNDED if lost >= _INNER // 2 else max(LEAST, lost)


def _lost(dtype: torch.dtype, rows: int, columns: int, layout: int) -> int:
    """Count the ones that rounding dropped from the most affected element of a product."""
    root = 2.0**27 if dtype == torch.float64 else 2.0**12
    a = torch.ones(rows, _INNER, dtype=dtype, device="cpu")
    b = torch.ones(_INNER, columns, dtype=dtype, device="cpu")
    a[:, 0], a[:, -1], b[0], b[-1] = root, -root, root, root
    a = a.t().contiguous().t() if layout & 1 else a
    b = b.t().contiguous().t() if layout & 2 else b
    return _INNER - int((a @ b).double().min())
