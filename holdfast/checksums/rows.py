"""Row checksums of a matrix product (Huang and Abraham): ``C e = A (B e)``."""

import numpy as np
import torch


def encode_rows(b: torch.Tensor) -> torch.Tensor:
    """``B e``: the fp64 sum of each row of b [.., K, N] → [.., K]."""
    return b.double().sum(-1)


def row_residual(
    c: torch.Tensor,
    a: torch.Tensor,
    row_sum: torch.Tensor,
    addend: torch.Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """``C e − alpha · A (B e) − beta · addend e`` for each row, in fp64.

    Args:
        c: [.., M, N]; a: [.., M, K]; row_sum: fp64 [.., K]; addend: broadcastable to c.

    Returns:
        fp64 [.., M]; zero up to rounding if and only if the row's sum is right.
    """
    predicted = alpha * (a.double() @ row_sum.unsqueeze(-1)).squeeze(-1)
    if addend is not None and beta != 0:
        predicted = predicted + beta * addend.expand(c.shape).double().sum(-1)
    return c.double().sum(-1) - predicted


_POSITION, _MULTIPLIER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def fingerprint(row_sum: torch.Tensor) -> torch.Tensor:
    """32 bits that mix every bit of a checksum vector with its position: [.., K] → fp64 [batch].

    The checksum's own check, exact in fp64; a sum would round away the damage of a small entry
    beside large ones. Damage passes it by a chance of 2⁻³².
    """
    rows = row_sum.detach().cpu().contiguous().reshape(-1, row_sum.shape[-1])
    positions = np.arange(rows.shape[-1], dtype=np.uint64) * _POSITION
    product = (rows.numpy().view(np.uint64) ^ positions) * _MULTIPLIER
    mixed = np.bitwise_xor.reduce(product ^ (product >> np.uint64(32)), axis=-1)
    return torch.from_numpy(mixed.astype(np.uint32).astype(np.float64))


def self_consistent(row_sum: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a checksum vector still has the fingerprint it was made with."""
    return torch.equal(fingerprint(row_sum), expected.reshape(-1))
