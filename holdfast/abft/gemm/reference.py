"""Verification of a GEMM in plain torch, with which tests compare the native kernels."""

import torch

from holdfast.abft.checksums.rows import encode_rows, fingerprint, row_residual
from holdfast.abft.gemm.row_tolerances import other, tolerances
from holdfast.abft.thresholds import rounding
from holdfast.abft.thresholds.analytic import row_bound
from holdfast.abft.thresholds.extreme import EXTREME
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.sites import Gemm


def as_batch(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix as a batch of one, and a batch as it is."""
    return matrix if matrix.dim() == 3 else matrix.unsqueeze(0)


def folded(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reshape operands of ``torch.matmul`` (two dimensions or more) to those of one mm or bmm."""
    if b.dim() == 2:
        return a.reshape(-1, a.shape[-1]), b
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (each.expand(*lead, *each.shape[-2:]).flatten(0, -3) for each in (a, b))
    return left, right


def encode_rows_reference(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute signed row checksums of b ([K, N] or [batch, K, N]) and its rounding statistics.

    Returns:
        Checksums fp64 [batch, K], and fp64 [batch, K + 2]: the spread z of each row, h (see
        ``rounding.statistics``), and a fingerprint of all these values.
    """
    batch = as_batch(b)
    return with_fingerprint(encode_rows(batch), rounding.statistics(batch.double(), b.dtype))


def with_fingerprint(
    row_sum: torch.Tensor, statistics: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the fingerprint of checksums and statistics to the statistics."""
    check = fingerprint(torch.cat([row_sum, statistics], -1))
    return row_sum, torch.cat([statistics, check.unsqueeze(-1)], -1)


def verify_rows_reference(
    c: torch.Tensor,
    a: torch.Tensor,
    row_sum: torch.Tensor,
    statistics: torch.Tensor,
    addend: torch.Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    b: torch.Tensor | None = None,
    in_force: bool = False,
) -> torch.Tensor:
    """Compute residual, threshold and energy (Σ_j C²) of every row of C, as fp64 [3, batch, M].

    If b is given, the threshold of a row that exceeds it also allows for partial sums that drift up
    and back (``rounding.common_energy``), up to the worst-case bound; with ``in_force`` that
    of every row does. If b is given and another threshold than ``rounding`` is in force
    (``row_tolerances``), that one is computed.
    """
    c, a = as_batch(c), as_batch(a)
    residual = row_residual(c, a, row_sum, addend, beta, alpha)
    energy = c.double().square().sum(-1)
    method = other()
    if b is not None and method is not None:
        gemm = Gemm(addend, a, b, beta, alpha, row_sum, statistics)
        return torch.stack([residual, tolerances(gemm, method), energy])
    added: torch.Tensor | float = 0.0
    if addend is not None and beta != 0:
        added = beta**2 * addend.expand(c.shape).double().square().sum(-1)
    walk = alpha**2 * rounding.walked(a, statistics[..., :-2])

    def threshold(common: torch.Tensor | float) -> torch.Tensor:
        drift, sizes = statistics[..., -2:-1], (c.shape[-1], a.shape[-1])
        dtypes = (c.dtype, ACCUMULATION[c.dtype])
        return rounding.threshold(walk, energy, drift, *sizes, *dtypes, added, abs(alpha), common)

    bound = threshold(0.0)
    if b is not None:
        of_b = rounding.common_energy(as_batch(b)).unsqueeze(-1)
        drifting = threshold(alpha**2 * of_b * rounding.prefix_energy(a, a.dtype))
        magnitude = abs(alpha) * (a.double().abs() * _magnitudes(b)).sum(-1)
        magnitude = magnitude + (c.shape[-1] * torch.as_tensor(added)).sqrt()
        dtypes = ACCUMULATION[c.dtype], c.dtype
        factor = max(1.0, abs(alpha))
        worst = row_bound(magnitude, a.shape[-1], c.shape[-1], *dtypes, factor=factor)
        drifting = rounding.in_force(bound, drifting, worst)
        bound = drifting if in_force else torch.where(residual.abs() > bound, drifting, bound)
    return torch.stack([residual, bound, energy])


def _magnitudes(b: torch.Tensor) -> torch.Tensor:
    """Compute ``Σ_j |B_kj|``, fp64 [batch, 1, K]."""
    return as_batch(b).double().abs().sum(-1).unsqueeze(-2)


def suspect_rows(rows: torch.Tensor) -> torch.Tensor:
    """Mark the suspect rows, bool [batch, M]: over the threshold, not finite, or extreme."""
    return over_threshold(rows) | ~(rows[2] <= EXTREME**2)


def over_threshold(rows: torch.Tensor) -> torch.Tensor:
    """Mark the rows whose residual exceeds the threshold, bool [batch, M]; a NaN does."""
    residual, threshold = rows[0], rows[1]
    return ~(threshold.isfinite() & (residual.abs() <= threshold))
