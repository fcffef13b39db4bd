"""V-ABFT's variance-based threshold (V-ABFT, section 4; ``e_max`` from its tables 1 and 2)."""

import torch

# Largest relative error of a row checksum, by output dtype: on CPU, outputs verified after
# rounding ("offline"). fp16 and bf16 are the paper's figures for a rounded output.
E_MAX = {torch.float64: 6e-16, torch.float32: 4e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
C_SIGMA = 2.5


def vabft(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Threshold of ``|C e − A (B e)|`` for each row of ``C = A B``.

    ``T = e_max (N|μ_A|Σ|μ_k| + c√(N μ_A² Σσ_k² + N² σ_A² Σμ_k²) + c√N σ_A √Σσ_k²)``

    Args:
        a: [.., M, K]; b: [.., K, N]; any supported floating dtype.
        dtype: dtype of C, whose rounding decides.

    Returns:
        fp64 [.., M].

    Not covered: rounding errors that are not independent (constant or strongly coherent
    operands) exceed it; such rows are only suspected and then cleared by a second opinion.
    """
    row, operand = a.double(), b.double()
    columns = b.shape[-1]
    mean = row.mean(-1)
    return E_MAX[dtype] * spread(
        mean, variance_bound(row), float(columns), b_statistics(operand)
    ) + columns * _smallest_subnormal(dtype)


def b_statistics(b: torch.Tensor) -> torch.Tensor:
    """Σ_k|μ_k|, Σ_k μ_k² and Σ_k σ_k² over the rows k of b [.., K, N], as fp64 [.., 3]."""
    mean = b.double().mean(-1)
    variance = variance_bound(b.double())
    return torch.stack([mean.abs().sum(-1), mean.square().sum(-1), variance.sum(-1)], -1)


def variance_bound(rows: torch.Tensor) -> torch.Tensor:
    """σ² ≤ (max − μ)(μ − min) over the last dimension (Bhatia–Davis)."""
    mean = rows.mean(-1)
    return ((rows.amax(-1) - mean) * (mean - rows.amin(-1))).clamp_min(0)


def spread(
    mean: torch.Tensor, variance: torch.Tensor, columns: float, statistics: torch.Tensor
) -> torch.Tensor:
    """The bracket of V-ABFT's threshold: the size a row checksum can have, fp64 [.., M]."""
    absolute, squared, between = (statistics[..., i].unsqueeze(-1) for i in range(3))
    crossed = columns * mean.square() * between + columns**2 * variance * squared
    return (
        columns * mean.abs() * absolute
        + C_SIGMA * crossed.sqrt()
        + C_SIGMA * (columns * variance * between).sqrt()
    )


def _smallest_subnormal(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps
