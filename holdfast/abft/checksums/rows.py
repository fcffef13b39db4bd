"""Signed row checksums of a matrix product: ``C r = A (B r)``, after Huang and Abraham."""

import numpy as np
import torch

from holdfast.abft.checksums.weights import signs


def encode_rows(b: torch.Tensor) -> torch.Tensor:
    """Compute ``B r``, the fp64 signed sum of each row of b [.., K, N]: [.., K]."""
    return _signed_sum(b)


def row_residual(
    c: torch.Tensor,
    a: torch.Tensor,
    row_sum: torch.Tensor,
    addend: torch.Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Compute ``C r − alpha · A (B r) − beta · addend r`` for each row, in fp64.

    Args:
        c: [.., M, N].
        a: [.., M, K].
        row_sum: ``B r``, fp64 [.., K].
        addend: broadcastable to c.
        beta: factor of the addend.
        alpha: factor of the product.

    Returns:
        fp64 [.., M]; zero up to rounding if and only if the row's signed sum is right.
    """
    # Summed in a cascade: a product's long chains may round fp64 by more than its threshold.
    predicted = alpha * (a.double() * row_sum.unsqueeze(-2)).sum(-1)
    if addend is not None and beta != 0:
        predicted = predicted + beta * _signed_sum(addend.expand(c.shape))
    return _signed_sum(c) - predicted


def _signed_sum(rows: torch.Tensor) -> torch.Tensor:
    return (rows.double() * signs(rows.shape[-1]).to(rows.device)).sum(-1)


_POSITION, _MULTIPLIER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Compute 32 bits that mix every bit of an encoding with its position: [.., n] → fp64 [batch].

    The encoding's own check, exact in fp64; a sum would round away the damage of a small entry
    beside large ones. Damage passes it by a chance of 2⁻³².
    """
    rows = values.detach().cpu().contiguous().reshape(-1, values.shape[-1])
    positions = np.arange(rows.shape[-1], dtype=np.uint64) * _POSITION
    product = (rows.numpy().view(np.uint64) ^ positions) * _MULTIPLIER
    mixed = np.bitwise_xor.reduce(product ^ (product >> np.uint64(32)), axis=-1)
    return torch.from_numpy(mixed.astype(np.uint32).astype(np.float64))


def self_consistent(row_sum: torch.Tensor, statistics: torch.Tensor) -> bool:
    """Check that an encoding has the fingerprint it was made with, its last statistic."""
    values = torch.cat([row_sum, statistics[..., :-1]], -1)
    return torch.equal(fingerprint(values), statistics[..., -1].reshape(-1))
