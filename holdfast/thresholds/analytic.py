"""Worst-case rounding bounds (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3)."""

import math

import torch

# What a product accumulates in, by operand dtype.
ACCUMULATION = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}


def analytic(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Threshold of ``|C e − A (B e)|`` for each row: the worst case summed over the row.

    Args:
        a: [.., M, K]; b: [.., K, N]; dtype: dtype of C.

    Returns:
        fp64 [.., M].

    Guarantees: never exceeded by rounding alone, whatever the data. Not covered: it is loose by
    about √(K N); small faults pass below it.
    """
    magnitude = a.double().abs() @ b.double().abs()
    return element_bound(magnitude, a.shape[-1], dtype).sum(-1)


def element_bound(
    magnitude: torch.Tensor, inner: int, dtype: torch.dtype, factor: float = 1.0
) -> torch.Tensor:
    """How far an element of C may be from the exact value.

    ``2 γ·(|A||B| + |addend|) + 2 u_out·(same) + factor·(K + 2)·ω``, ``γ = e^{(K+2) u_acc} − 1``,
    which holds for any K; ω is the smallest normal number: each step may underflow or be flushed.

    Args:
        magnitude: fp64, |alpha| |A||B| + |beta addend| at each element.
        inner: K; dtype: dtype of C; factor: by what alpha or beta enlarge an underflow.
    """
    accumulation, output = torch.finfo(ACCUMULATION[dtype]), torch.finfo(dtype)
    gamma = math.expm1((inner + 2) * accumulation.eps / 2)
    underflow = factor * (inner + 2) * accumulation.smallest_normal
    underflow += 2 * output.smallest_normal * output.eps
    return 2 * (gamma + output.eps / 2) * magnitude + underflow
