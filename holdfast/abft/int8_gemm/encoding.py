"""Checksums of an int8 matrix, with which rows of its products are verified and corrected.

``digits`` (this project's): the row sums ``S[k] = Σ_j B[k, j]`` and the weighted ones
``W[k] = Σ_j (j + 1) B[k, j]`` in signed digits to the base 256, which are int8 like B itself. A
product with them is exact, so that ``Σ_j C[i, j] = Σ_d 256^d Σ_k A[i, k] digits[d, k]`` holds over
the integers. ``mod127`` (the DLRM paper): one int8 column ``S[k] mod 127``, and the same equation
modulo 127.
"""

from collections.abc import Iterator

import torch

from holdfast.errors import ConfigError

ENCODINGS = ("digits", "mod127")
BASE, MODULUS = 256, 127
PADDING = 64  # elements that the kernels may read past the end: kInt8Padding
LARGEST_COLUMNS = 1 << 16  # three digits hold every row sum, and 32-bit lanes every sum of C
LARGEST_ACCUMULATOR = (1 << 31) - 1
LARGEST_INNER = LARGEST_ACCUMULATOR // (255 * 128)
LARGEST_INNER_SHIFTED = LARGEST_ACCUMULATOR // (255 * 255)  # with zero points of B

LARGEST_PACKED = (1 << 31) - 1  # bytes; FBGEMM counts them in an int
PACKED_PADDING = 512  # more than it adds to an extent
SLAB = 1 << 20  # elements that are widened to 64 bits at once


def signed_digits(values: torch.Tensor) -> torch.Tensor:
    """Write int64 [K] in signed base-256 digits, int8 [digits, K], the least significant first.

    ``values[k] = Σ_d 256^d digits[d, k]`` with −128 ≤ digit ≤ 127, in as many digits as the largest
    value needs, at least one.
    """
    digits: list[torch.Tensor] = []
    rest = values.clone()
    while not digits or bool(rest.any()):
        digit = (rest + BASE // 2).remainder(BASE) - BASE // 2
        digits.append(digit.to(torch.int8))
        rest = (rest - digit) // BASE
    return torch.stack(digits)


def from_digits(digits: torch.Tensor) -> torch.Tensor:
    """Convert signed digits [digits, K] back to integers, int64 [K]."""
    powers = BASE ** torch.arange(len(digits), device=digits.device)
    return (digits.long() * powers[:, None]).sum(0)


def positions(columns: int, device: torch.device) -> torch.Tensor:
    """Return the position weights of the columns, 1 … N, int64."""
    return torch.arange(1, columns + 1, device=device)


def row_sums(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute S and W of B [K, N], int64 [K] each."""
    of_columns = positions(b.shape[1], b.device)
    sums = torch.empty((2, len(b)), dtype=torch.int64, device=b.device)
    for rows, wide in _slabs(b):
        torch.sum(wide, 1, out=sums[0, rows])
        torch.sum(wide.mul_(of_columns), 1, out=sums[1, rows])
    return sums[0], sums[1]


def column_sums(b: torch.Tensor) -> torch.Tensor:
    """Compute ``Σ_k B[k, j]`` and ``Σ_k (k + 1) B[k, j]``, int64 [2, N], for locating errors."""
    of_rows = positions(len(b), b.device)[:, None]
    sums = torch.zeros((2, b.shape[1]), dtype=torch.int64, device=b.device)
    for rows, wide in _slabs(b):
        sums[0] += wide.sum(0)
        sums[1] += wide.mul_(of_rows[rows]).sum(0)
    return sums


def modular_column(sums: torch.Tensor) -> torch.Tensor:
    """Compute the check column of ``mod127``, int8 [K, 1]: sums modulo 127, with their sign."""
    return torch.fmod(sums, MODULUS).to(torch.int8)[:, None]


def _slabs(b: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield parts of B, ``SLAB`` elements or one row, as int64 in a reused buffer."""
    most = min(len(b), max(1, SLAB // b.shape[1]))
    wide = torch.empty((most, b.shape[1]), dtype=torch.int64, device=b.device)
    for first in range(0, len(b), most):
        rows = slice(first, min(first + most, len(b)))
        yield rows, wide[: rows.stop - first].copy_(b[rows])


def locate(plain: int, weighted: int, columns: int) -> int | None:
    """Locate a single error e in column j by its residuals e and (j + 1) e; None if none fits."""
    if plain == 0 or weighted % plain != 0:
        return None
    column = weighted // plain - 1
    return column if 0 <= column < columns else None


def largest_accumulator(inner: int, *, shifted: bool) -> int:
    """Bound ``Σ_k (A[k] − za)(B[k] − zb)``; ``shifted`` where B has zero points."""
    return inner * 255 * (255 if shifted else 128)


def check_extents(inner: int, columns: int, *, shifted: bool) -> None:
    """Raise ConfigError if int32 accumulators or the checksums cannot hold a product."""
    largest = LARGEST_INNER_SHIFTED if shifted else LARGEST_INNER
    if inner > largest:
        kind = "with zero points of the weight " if shifted else ""
        raise ConfigError(
            f"{inner} inputs overflow the int32 accumulators: {kind}at most {largest} are exact "
            "whatever the values; split the layer along its inputs and add the parts"
        )
    if (inner + PACKED_PADDING) * (columns + 1 + PACKED_PADDING) > LARGEST_PACKED:
        raise ConfigError(
            f"{inner} inputs x {columns} outputs: a packed weight has less than 2**31 bytes, with "
            f"up to {PACKED_PADDING} more in each extent; split the layer along its outputs"
        )
    if columns > LARGEST_COLUMNS:
        raise ConfigError(
            f"{columns} outputs: row checks are exact up to {LARGEST_COLUMNS}; split the layer "
            "along its outputs"
        )
