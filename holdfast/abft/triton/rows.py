"""Triton functions that all kernels share: the spread of B's rows, and the status of rows."""

import triton
import triton.language as tl

from holdfast.abft.thresholds import rounding
from holdfast.abft.triton.launch import RowStatus

MEAN_NOISE = tl.constexpr(rounding.MEAN_NOISE)
CLEAN = tl.constexpr(int(RowStatus.CLEAN))
SUSPECT = tl.constexpr(int(RowStatus.SUSPECT))
CORRECTED = tl.constexpr(int(RowStatus.CORRECTED))


@triton.jit
def spread_of(squares, plain, count, drifting, repeating, BLOCK_K: tl.constexpr):
    """Compute ``z = Σ b² + g · n · m²`` of rows whose mean over n columns is m beyond its noise.

    g is ``drifting``, or ``repeating`` for a row with the same sums as its neighbour, as the
    roundings of repeated rows all have the same direction.
    """
    same = _equals_neighbour(squares, BLOCK_K) & _equals_neighbour(plain, BLOCK_K)
    beyond_noise = tl.maximum(plain * plain - MEAN_NOISE * squares, 0)
    return squares + tl.where(same, repeating, drifting) * beyond_noise / count


@triton.jit
def _equals_neighbour(values, COUNT: tl.constexpr):
    """Mark both values of each pair (0, 1), (2, 3), … that are equal."""
    pairs = tl.reshape(values, (COUNT // 2, 2))
    same = tl.max(pairs, 1) == tl.min(pairs, 1)
    return tl.reshape(tl.broadcast_to(same[:, None], (COUNT // 2, 2)), (COUNT,))


@triton.jit
def exceeds(residual, bound):
    """Mark residuals that exceed their bounds, or where either of them is NaN or INF."""
    return ~((tl.abs(residual) <= bound) & (bound < float("inf")))


@triton.jit
def status_of(now, ever):
    """Return the status of rows from the checks that they fail now and that they ever failed."""
    return tl.where(now > 0, SUSPECT, tl.where(ever > 0, CORRECTED, CLEAN))


@triton.jit
def count_rows(counts_ptr, suspect, status):
    """Add the numbers of suspect and of corrected rows to the two counters of a verdict."""
    tl.atomic_add(counts_ptr, tl.sum(suspect.to(tl.int32), 0))
    tl.atomic_add(counts_ptr + 1, tl.sum((status == CORRECTED).to(tl.int32), 0))
