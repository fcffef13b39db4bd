"""Signed row checksums of a matrix product: ``C r = A (B r)``, after Huang and Abraham."""

import numpy as np
import torch

from holdfast.abft.checksums.weights import signs


def encode_rows(b: torch.Tensor) -> torch.Tensor:
    """Compute ``B r``, the signed sum of each row of b [.., K, N], fp64 [.., K]."""
    return (b.double() * signs(b.shape[-1]).to(b.device)).sum(-1)


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
        c: The product, [.., M, N].
        a: The left operand, [.., M, K].
        row_sum: The encoding ``B r``, fp64 [.., K].
        addend: Addend of the product, broadcastable to c.
        beta: Factor of the addend.
        alpha: Factor of the product.

    Returns:
        fp64 [.., M]; zero up to rounding if and only if the signed sum of the row is right.
    """
    # Not a matmul, whose long chains of additions may round fp64 by more than the threshold.
    predicted = alpha * (a.double() * row_sum.unsqueeze(-2)).sum(-1)
    if addend is not None and beta != 0:
        predicted = predicted + beta * encode_rows(addend.expand(c.shape))
    return encode_rows(c) - predicted


_POSITION, _MULTIPLIER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Compute 32-bit fingerprints of encodings [.., n] from all bits and positions, fp64 [batch].

    Damage of an encoding leaves its fingerprint unchanged with a probability of 2⁻³².
    """
    rows = values.detach().cpu().contiguous().reshape(-1, values.shape[-1])
    positions = np.arange(rows.shape[-1], dtype=np.uint64) * _POSITION
    product = (rows.numpy().view(np.uint64) ^ positions) * _MULTIPLIER
    mixed = np.bitwise_xor.reduce(product ^ (product >> np.uint64(32)), axis=-1)
    return torch.from_numpy(mixed.astype(np.uint32).astype(np.float64))


def self_consistent(row_sum: torch.Tensor, statistics: torch.Tensor) -> bool:
    """Check an encoding against its fingerprint, which is the last of its statistics."""
    values = torch.cat([row_sum, statistics[..., :-1]], -1)
    return torch.equal(fingerprint(values), statistics[..., -1].reshape(-1))
