"""The fused verification of a GEMM in plain torch: the oracle of the native passes."""

import torch

from holdfast.checksums.rows import encode_rows, fingerprint, row_residual
from holdfast.thresholds.extreme import EXTREME
from holdfast.thresholds.vabft import C_SIGMA, E_MAX, b_statistics, spread, variance_bound


def as_batch(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix as a batch of one; batches as they are."""
    return matrix if matrix.dim() == 3 else matrix.unsqueeze(0)


def encode_rows_reference(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row checksums of b ([K, N] or [batch, K, N]) and the sums V-ABFT's threshold needs.

    Returns:
        fp64 [batch, K] and fp64 [batch, 4] (Σ|μ_k|, Σμ_k², Σσ_k², fingerprint of row_sum).
    """
    batch = as_batch(b)
    row_sum = encode_rows(batch)
    check = fingerprint(row_sum).unsqueeze(-1)
    return row_sum, torch.cat([b_statistics(batch), check], dim=-1)


def verify_rows_reference(
    c: torch.Tensor,
    a: torch.Tensor,
    row_sum: torch.Tensor,
    statistics: torch.Tensor,
    addend: torch.Tensor | None,
    beta: float,
    alpha: float,
) -> torch.Tensor:
    """Residual, threshold and energy (Σ_j C²) of every row of C, as fp64 [3, batch, M]."""
    c, a = as_batch(c), as_batch(a)
    columns = c.shape[-1]
    residual = row_residual(c, a, row_sum, addend, beta, alpha)
    rows = a.double()
    scale = abs(alpha) * spread(rows.mean(-1), variance_bound(rows), float(columns), statistics)
    if addend is not None and beta != 0:
        added = addend.expand(c.shape).double()
        scale = scale + abs(beta) * (
            added.sum(-1).abs() + C_SIGMA * (columns * variance_bound(added)).sqrt()
        )
    info = torch.finfo(c.dtype)
    threshold = E_MAX[c.dtype] * scale + columns * info.smallest_normal * info.eps
    return torch.stack([residual, threshold, c.double().square().sum(-1)])


def suspect_rows(rows: torch.Tensor) -> torch.Tensor:
    """Which rows are suspect, bool [batch, M]: over the threshold, not finite, or extreme."""
    return over_threshold(rows) | ~(rows[2] <= EXTREME**2)


def over_threshold(rows: torch.Tensor) -> torch.Tensor:
    """Rows whose residual exceeds the threshold, bool [batch, M]; a NaN on either side does."""
    residual, threshold = rows[0], rows[1]
    return ~(threshold.isfinite() & (residual.abs() <= threshold))
