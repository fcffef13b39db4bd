"""Location and repair of one wrong element of a vector, also of INF and NaN (EEC-ABFT).

All vectors are treated at once in plain torch, with masks in place of branches, so that the host
never waits for the device and no shape depends on data. Source: ATTNChecker, section 4.2, figure 3.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from holdfast.abft.checksums.positions import Encoding

# A bound for each vector, or a function that computes it from the matrix; a bound that depends on
# the data (``rounding``) is computed again from the repaired matrix.
Bound = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


class Status:
    """State of a vector after its check."""

    # Plain integers: torch 2.13 compiles ``tensor == IntEnum`` to False, silently.
    CLEAN = 0  # every checksum agrees
    CORRECTED = 1  # one element was wrong and was repaired
    PROPAGATED = 2  # not changed: several elements are extreme, as after a fault in an operand
    UNLOCATABLE = 3  # not changed: the damage is not one wrong element or one wrong checksum
    CHECKSUM_FAULT = 4  # a checksum was wrong and was computed again; the data are right


def near_inf(dtype: torch.dtype) -> float:
    """Return the magnitude above which an element is extreme: the paper's 1e10, and 2¹⁵ for fp16.

    The largest fp16 number is 65504. Values above 2¹⁵ overflow when doubled, and a flip of the top
    exponent bit takes elements of [0.5, 1) there.
    """
    return 2.0**15 if dtype == torch.float16 else 1e10


class Correction(NamedTuple):
    """The result of ``correct_vectors``, in which [..] runs over the vectors.

    Attributes:
        matrix: The given matrix with repaired elements; other vectors are unchanged.
        status: Values of ``Status``, int8 [..].
        position: Index of the repaired element in its vector, or −1, int64 [..].
        checksum, weighted: The given checksums, of which damaged ones are computed again.
    """

    matrix: torch.Tensor
    status: torch.Tensor
    position: torch.Tensor
    checksum: torch.Tensor
    weighted: torch.Tensor

    @property
    def corrected(self) -> torch.Tensor:
        """Mark the vectors in which one element was repaired, bool [..]."""
        return self.status == Status.CORRECTED

    @property
    def uncorrectable(self) -> torch.Tensor:
        """Mark the vectors that are damaged and were not changed, bool [..]."""
        return (self.status == Status.PROPAGATED) | (self.status == Status.UNLOCATABLE)


def correct_vectors(
    matrix: torch.Tensor,
    checksum: torch.Tensor,
    weighted: torch.Tensor,
    threshold: Bound,
    encoding: Encoding,
    dim: int = -1,
    *,
    extreme: float | None = None,
) -> Correction:
    """Find and repair one wrong element in each vector along ``dim``.

    With ``δ1 = csum − Σ r_j v_j`` and ``δ2_d = wsum_d − Σ p_d(j) r_j v_j``, the element is located
    by ``δ2 / δ1``, or as the largest one if a δ is INF or NaN, and becomes
    ``r_i (csum − Σ_{j≠i} r_j v_j)``. If the weighted checksums do not agree then, the vector is not
    changed.

    Args:
        matrix: [.., M, N], bf16, fp16, fp32 or fp64; not changed and not differentiated.
        checksum: Predicted plain checksums of the V vectors, [.., V].
        weighted: Predicted weighted checksums, [.., V, D], as ``encoding.encode`` gives them.
        threshold: [.., V], or a function from a matrix to it, that bounds the rounding noise of
            every checksum of a healthy vector, including its accumulation in ``encoding.dtype``.
        encoding: Checksum vectors of the length of these vectors.
        dim: Dimension along which the vectors run: −1 checks rows, −2 columns.
        extreme: Magnitude that counts as near-INF; by default ``near_inf`` of the matrix's dtype.

    Guarantees: one wrong element that is extreme, or off by more than
    ``(code.resolution(n) + 1) T``, is repaired to within ``T + u |v_i|``; smaller damage that is
    found is repaired likewise, or not changed and reported. If a checksum is damaged the data are
    not changed, nor are they after two faults in one vector that each exceed 4 T. Vectors whose
    threshold is not finite are UNLOCATABLE. A threshold that is a function may grow with the fault,
    if more slowly than it.

    Not covered: damage below T; three faults in a vector that together look like one. Healthy
    vectors with several elements above ``extreme`` count as PROPAGATED once they are damaged.

    Raises:
        ValueError: Shapes or devices do not fit. TypeError: Dtypes do not.

    Source: ATTNChecker, section 4.2, with all weights 1. There a |δ1| up to 1e5 is added to the
    element, and only a larger one makes it be rebuilt from the others. Here it is always rebuilt:
    the verification, which is this project's, needs that sum anyway, and an addition would lose
    ``u |δ1|`` in the sums' dtype, which exceeds T in fp64.
    """
    encoding.check(matrix, dim)
    vectors = matrix.detach().movedim(dim, -1)
    _check_shapes(vectors, checksum, weighted, encoding)
    limit = near_inf(matrix.dtype) if extreme is None else extreme
    bound = _bound(threshold, matrix, vectors, encoding.dtype)
    found = _inspect(vectors, checksum, weighted, bound, encoding, limit)
    return _report(found, _repair(found, threshold, dim), checksum, weighted, dim)


class _Inspection(NamedTuple):
    """Residuals of the vectors [.., V, n] and their given sums [.., V, 1 + D]."""

    vectors: torch.Tensor
    given: torch.Tensor
    sums: torch.Tensor
    residual: torch.Tensor
    flagged: torch.Tensor  # checksums that disagree, bool [.., V, 1 + D]
    several: torch.Tensor  # vectors with more than one extreme element, bool [.., V]
    bound: torch.Tensor
    encoding: Encoding


class _Repair(NamedTuple):
    """The vectors with one element replaced, and whether every checksum then agrees."""

    vectors: torch.Tensor
    position: torch.Tensor
    verified: torch.Tensor


def _inspect(
    vectors: torch.Tensor,
    checksum: torch.Tensor,
    weighted: torch.Tensor,
    bound: torch.Tensor,
    encoding: Encoding,
    extreme: float,
) -> _Inspection:
    given = torch.cat([checksum.unsqueeze(-1), weighted], -1).detach().to(encoding.dtype)
    sums = encoding.sums(vectors)
    residual = given - sums
    # Negated, so that NaN on either side counts as disagreement, and as extreme.
    flagged = ~((residual.abs() <= bound.unsqueeze(-1)) & bound.isfinite().unsqueeze(-1))
    several = (~(vectors.abs() <= extreme)).sum(-1) > 1
    return _Inspection(vectors, given, sums, residual, flagged, several, bound, encoding)


def _locate(found: _Inspection) -> torch.Tensor:
    """Locate the wrong elements by their residuals, or as the largest ones, int64 [.., V]."""
    encoding = found.encoding
    decoded = encoding.code.decode(found.residual, encoding.count).clamp(0, encoding.count - 1)
    largest = found.vectors.abs().argmax(-1)  # NaN counts as the largest
    return torch.where(found.residual.isfinite().all(-1), decoded, largest)


def _repair(found: _Inspection, threshold: Bound, dim: int) -> _Repair:
    """Rebuild the located elements from the others, and verify them by the weighted checksums.

    The sums exclude the located element, as a large wrong value would absorb the others.
    """
    encoding, code, position = found.encoding, found.encoding.code, _locate(found)
    hit = torch.arange(encoding.count, device=position.device) == position.unsqueeze(-1)
    others = found.given - encoding.sums(torch.where(hit, 0, found.vectors))
    rebuilt = encoding.table[0][position] * others[..., 0]
    stored = rebuilt.to(found.vectors.dtype)
    vectors = torch.where(hit, stored.unsqueeze(-1), found.vectors)
    bound = _bound(threshold, vectors.movedim(-1, dim), vectors, encoding.dtype)
    size = (rebuilt - found.vectors.gather(-1, position.unsqueeze(-1)).squeeze(-1)).abs()
    verified = (
        (stored.isfinite() & bound.isfinite() & ~found.several)
        & (_mismatch(others, position, encoding) <= code.spread * bound)
        # Negated: an element of INF or NaN is far enough from any true value.
        & ~(size <= code.resolution(encoding.count) * bound)
    )
    return _Repair(vectors, position, verified)


def _report(
    found: _Inspection, repair: _Repair, checksum: torch.Tensor, weighted: torch.Tensor, dim: int
) -> Correction:
    clean, lone = ~found.flagged.any(-1), _lone_checksum(found)
    status = torch.where(found.several, Status.PROPAGATED, Status.UNLOCATABLE)
    status = torch.where(repair.verified, Status.CORRECTED, status)
    status = torch.where(lone, Status.CHECKSUM_FAULT, status)
    status = torch.where(clean, Status.CLEAN, status)
    corrected = status == Status.CORRECTED
    matrix = torch.where(corrected.unsqueeze(-1), repair.vectors, found.vectors)
    damaged = lone.unsqueeze(-1) & found.flagged
    return Correction(
        matrix.movedim(-1, dim),
        status.to(torch.int8),
        torch.where(corrected, repair.position, -1),
        torch.where(damaged[..., 0], found.sums[..., 0].to(checksum.dtype), checksum.detach()),
        torch.where(damaged[..., 1:], found.sums[..., 1:].to(weighted.dtype), weighted.detach()),
    )


def _lone_checksum(found: _Inspection) -> torch.Tensor:
    """Mark vectors of which one damaged checksum explains the disagreement, bool [.., V]."""
    # A wrong element shows in the plain checksum, and two that cancel there in several others.
    floor = found.encoding.code.resolution(found.encoding.count) * found.bound
    beyond = ~(found.residual.abs() <= floor.unsqueeze(-1)) & found.flagged
    return (found.flagged.sum(-1) == 1) & beyond.any(-1)


def _mismatch(residual: torch.Tensor, position: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Compute ``max_d |δ2_d − p_d(i) δ1|``, [.., V]: only noise if just element i is wrong."""
    return (residual[..., 1:] - encoding.words[position] * residual[..., :1]).abs().amax(-1)


def _bound(
    threshold: Bound, matrix: torch.Tensor, vectors: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    bound = threshold(matrix.detach()) if callable(threshold) else threshold
    if bound.shape != vectors.shape[:-1]:
        raise ValueError(
            f"the threshold has shape {tuple(bound.shape)}, and there are "
            f"{tuple(vectors.shape[:-1])} vectors: give one bound for each"
        )
    return bound.detach().to(dtype)


def _check_shapes(
    vectors: torch.Tensor, checksum: torch.Tensor, weighted: torch.Tensor, encoding: Encoding
) -> None:
    expected = vectors.shape[:-1], (*vectors.shape[:-1], encoding.words.shape[1])
    for name, tensor, shape in zip(
        ("checksum", "weighted"), (checksum, weighted), expected, strict=True
    ):
        if not tensor.is_floating_point():
            raise TypeError(f"the {name} sums are {tensor.dtype}: encode in floating point")
        if tensor.shape != shape:
            raise ValueError(
                f"the {name} sums have shape {tuple(tensor.shape)}, and these vectors with the "
                f"{encoding.code.name} code have {tuple(shape)}"
            )
