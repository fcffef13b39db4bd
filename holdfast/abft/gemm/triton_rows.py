"""Triton building blocks over rows: their signed sums, predictions and rounding bounds."""

import triton
import triton.language as tl

# Row status (``triton.RowStatus``).
CLEAN = tl.constexpr(0)
SUSPECT = tl.constexpr(1)
CORRECTED = tl.constexpr(2)


@triton.jit
def rounding_bound(energy, walk, tolerance):
    """The threshold of a signed residual (see ``triton_types.Tolerance``).

    In units of its largest part: the square of a tolerance times the energy of a small row
    underflows.
    """
    unit = tl.maximum(tl.maximum(tolerance.output, tolerance.drift), tolerance.walk)
    unit = tl.maximum(unit, 1e-30)
    output, walking, drift = tolerance.output / unit, tolerance.walk / unit, tolerance.drift / unit
    rounded = output * output * energy
    random = walking * walking * walk
    coherent = drift * drift * tl.maximum(energy - 4 * walk, 0)
    return tolerance.scale * unit * tl.sqrt(rounded + random + coherent) + tolerance.floor


@triton.jit
def exceeds(residual, bound):
    """Whether a residual is over its bound; NaN and INF on either side are."""
    return ~((tl.abs(residual) <= bound) & (bound < float("inf")))


@triton.jit
def row_sums(
    c_rows,
    stride_cn,
    weights_ptr,
    wanted,
    column,
    value,
    N,
    dtype: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``Σ_j t_j c_ij`` and ``Σ_j c_ij²`` of wanted rows, with ``value`` in place of ``column``.

    Where column is None the rows are taken as they are.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype)
    energy = tl.zeros((BLOCK_M, BLOCK_N), dtype)
    for start in tl.range(0, N, BLOCK_N, num_stages=3):
        columns = start + tl.arange(0, BLOCK_N)
        inside = wanted[:, None] & (columns[None, :] < N)
        c = tl.load(c_rows[:, None] + columns[None, :].to(tl.int64) * stride_cn, inside, other=0.0)
        c = c.to(dtype)
        if column is not None:
            c = tl.where(columns[None, :] == column[:, None], value[:, None], c)
        weights = tl.load(weights_ptr + columns, columns < N, other=0).to(dtype)
        total += c * weights[None, :]
        energy += c * c
    return tl.sum(total, 1), tl.sum(energy, 1)


@triton.jit
def prediction(
    a_rows,
    stride_ak,
    sums_ptr,
    exists,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``A_i (B r)`` and the walk ``Σ_k a_ik² z_k`` of each row."""
    dtype: tl.constexpr = sums_ptr.dtype.element_ty
    predicted = tl.zeros((BLOCK_M, BLOCK_K), dtype)
    walk = tl.zeros((BLOCK_M, BLOCK_K), dtype)
    for start in tl.range(0, K, BLOCK_K, num_stages=3):
        lanes = start + tl.arange(0, BLOCK_K)
        inside = exists[:, None] & (lanes[None, :] < K)
        a = tl.load(a_rows[:, None] + lanes[None, :].to(tl.int64) * stride_ak, inside, other=0.0)
        a = a.to(dtype)
        signed = tl.load(sums_ptr + lanes, lanes < K, other=0.0)
        spreads = tl.load(sums_ptr + K + lanes, lanes < K, other=0.0)
        predicted += a * signed[None, :]
        walk += a * a * spreads[None, :]
    return tl.sum(predicted, 1), tl.sum(walk, 1)


@triton.jit
def product_with(
    a_rows,
    stride_ak,
    checksum_ptr,
    wanted,
    K,
    dtype: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``A_i e`` of wanted rows, for one weighted checksum e of B."""
    predicted = tl.zeros((BLOCK_M, BLOCK_K), dtype)
    for start in range(0, K, BLOCK_K):
        lanes = start + tl.arange(0, BLOCK_K)
        inside = wanted[:, None] & (lanes[None, :] < K)
        a = tl.load(a_rows[:, None] + lanes[None, :].to(tl.int64) * stride_ak, inside, other=0.0)
        checksum = tl.load(checksum_ptr + lanes, lanes < K, other=0.0).to(dtype)
        predicted += a.to(dtype) * checksum[None, :]
    return tl.sum(predicted, 1)
