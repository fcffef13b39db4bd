"""EEC-ABFT: one wrong element of a vector found and repaired, INF and NaN included.

Plain torch on whole stacks of vectors, with masks in place of branches: no host synchronisation,
no shape that depends on data. Source: ATTNChecker, section 4.2 and figure 3.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from holdfast.abft.checksums.positions import Encoding

# A bound for each vector, or how to compute it from the matrix: where the bound depends on the
# data (``rounding``), that of the repaired vector is the one that counts.
Bound = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


class Status:
    """State of a vector after its check."""

    # Plain integers: torch 2.13 compiles ``tensor == IntEnum`` to False, silently.
    CLEAN = 0  # every checksum agrees
    CORRECTED = 1  # one element was wrong and is repaired
    PROPAGATED = 2  # several extreme elements: left for the other direction's checksums
    UNLOCATABLE = 3  # damaged, but not as one element or one checksum: left as it is
    CHECKSUM_FAULT = 4  # a checksum was wrong, the data are right; the checksum is encoded again


def near_inf(dtype: torch.dtype) -> float:
    """Magnitude above which an element is extreme (T_nearINF): the paper's 1e10, fp16 2¹⁵.

    fp16 ends at 65504. 2¹⁵ opens its last binade: the values that overflow when doubled, and where
    a flip of the top exponent bit takes elements of [0.5, 1).
    """
    return 2.0**15 if dtype == torch.float16 else 1e10


class Correction(NamedTuple):
    """The record of ``correct_vectors``; [..] runs over the vectors.

    Attributes:
        matrix: as given, repaired elements replaced; vectors that are not corrected are untouched.
        status: int8 [..], values of ``Status``.
        position: int64 [..], index of the repaired element in its vector, else −1.
        checksum, weighted: as given, damaged ones encoded again.
    """

    matrix: torch.Tensor
    status: torch.Tensor
    position: torch.Tensor
    checksum: torch.Tensor
    weighted: torch.Tensor

    @property
    def corrected(self) -> torch.Tensor:
        """True, [..], where one element was repaired."""
        return self.status == Status.CORRECTED

    @property
    def uncorrectable(self) -> torch.Tensor:
        """True, [..], where the vector is damaged and was left as it is."""
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

    ``δ1 = csum − Σ r_j v_j``, ``δ2_d = wsum_d − Σ p_d(j) r_j v_j``; the element is located by
    ``δ2 / δ1``, or as the largest where a δ is INF or NaN, and becomes
    ``r_i (csum − Σ_{j≠i} r_j v_j)``. Then the weighted checksums must agree as well, or the vector
    is left as it was.

    Args:
        matrix: [.., M, N], bf16, fp16, fp32 or fp64; read, not changed, not differentiated.
        checksum: [.., V], predicted plain checksums of the V vectors.
        weighted: [.., V, D], predicted weighted ones, ``encoding.encode`` of the true data.
        threshold: [.., V], or a function from a matrix to it: bounds the rounding noise of every
            checksum (weights of at most 1) of a healthy vector, the accumulation in
            ``encoding.dtype`` included.
        encoding: of vectors of this length.
        dim: along which the vectors run: −1 checks rows, −2 columns.
        extreme: T_nearINF; by default ``near_inf`` of the matrix's dtype.

    Guarantees: one wrong element that is extreme, or off by more than
    ``(code.resolution(n) + 1) T``, is repaired to within ``T + u |v_i|``; smaller damage that is
    seen is repaired so or left and reported. A threshold that is a function may grow with the
    fault, if more slowly. A damaged checksum leaves the data alone. With the ``bits`` code two
    damages in one vector, each above 4 T, leave it as it was. A threshold that is not finite
    passes nothing: its vectors are UNLOCATABLE.

    Not covered: damage below T; three damages that look like one; with the ``linear`` code two
    that look like one (see there). Healthy vectors with several elements above T_nearINF count as
    PROPAGATED once they are damaged.

    Raises:
        ValueError: shapes or devices do not fit; TypeError: dtypes.

    Source: ATTNChecker, section 4.2, where E is 1 and v1 is ones. There a |δ1| up to T_correct =
    1e5 is added to the element, and only a larger one makes it be rebuilt from the others. Here it
    is always rebuilt: the verification needs that sum anyway, it equals the addition where that is
    exact, and an addition loses ``u |δ1|`` of the sums' dtype, more than T in fp64. Verification
    by the weighted checksums is ours.
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
    flagged: torch.Tensor  # bool [.., V, 1 + D]: this checksum disagrees
    several: torch.Tensor  # bool [.., V]: more than one element is extreme
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
    """Locate by the code where all residuals are finite, else the largest: int64 [.., V]."""
    encoding = found.encoding
    decoded = encoding.code.decode(found.residual, encoding.count).clamp(0, encoding.count - 1)
    largest = found.vectors.abs().argmax(-1)  # NaN counts as the largest
    return torch.where(found.residual.isfinite().all(-1), decoded, largest)


def _repair(found: _Inspection, threshold: Bound, dim: int) -> _Repair:
    """Rebuild the located element; verify without it, so that its size absorbs nothing."""
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
    """Mark where one checksum disagrees by more than an element could alone, bool [.., V]."""
    # A wrong element above T shows in the plain checksum, two that cancel there in several others.
    floor = found.encoding.code.resolution(found.encoding.count) * found.bound
    beyond = ~(found.residual.abs() <= floor.unsqueeze(-1)) & found.flagged
    return (found.flagged.sum(-1) == 1) & beyond.any(-1)


def _mismatch(residual: torch.Tensor, position: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """``max_d |δ2_d − p_d(i) δ1|``: [.., V], zero up to noise if element i is the only damage."""
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
