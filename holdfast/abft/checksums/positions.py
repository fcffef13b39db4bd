"""Position codes: weights of checksums from whose residuals a wrong element can be located.

An element at position i that is off by e changes the plain checksum by ``r_i e`` and the weighted
checksum d by ``p_d(i) r_i e``. The ratio of the residuals is therefore the code word ``p(i)``, up
to the rounding noise of all other elements.
"""

from dataclasses import dataclass

import torch

from holdfast.abft.checksums.weights import signs

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Up to here every position is exact in fp32.
MAX_COUNT = 1 << 24


@dataclass(frozen=True)
class Bits:
    """A code of weights ``p_d(k) = ±1``: one sign for each bit of the position k, and their parity.

    Every weighted residual of one wrong element is ±δ1, so only signs have to be read to locate it,
    however long the vector is. The number of bits is rounded up to an even one; two code words then
    differ in at least two signs and agree in at least one, and none is the negative of another.

    Guarantees: like an extended Hamming code, but over real numbers and including damage of the
    checksums themselves, it distinguishes any single fault with |δ1| > 3 T from any other, and any
    two faults that each exceed 4 T from any single one, also if they cancel in the plain checksum.
    Not covered: three or more faults that together look like one. It takes ⌈log2 count⌉ + 1 or + 2
    checksums in place of one.

    Attributes:
        spread: Largest difference between two weights of one checksum. If T bounds the rounding
            noise of every checksum, ``spread · T`` bounds that of ``δ2 − p(i) δ1``.
    """

    name: str = "bits"
    spread: float = 2.0

    def resolution(self, count: int) -> float:
        """Return the ratio |δ1| / T above which a single wrong element or checksum is located.

        Above 2 T two elements are distinguished, above 3 T an element and the plain checksum.
        """
        return 3.0

    def weights(self, count: int) -> torch.Tensor:
        """Compute ``p``, fp64 [D, count]: the bits of k from the lowest up, then their parity."""
        digits = max(1, (count - 1).bit_length())
        shifts = torch.arange(digits + digits % 2)[:, None]
        address = 1 - 2 * ((torch.arange(count) >> shifts) & 1)
        return torch.cat([address, address.prod(0, keepdim=True)]).double()

    def decode(self, residuals: torch.Tensor, count: int) -> torch.Tensor:
        """Locate a wrong element by residuals [.., 1 + D], int64 [..].

        A bit of the position is set if δ2 and δ1 differ in sign; the parity is not read. Residuals
        that no position explains, or that are not finite, give an arbitrary value.
        """
        differs = residuals[..., 1:-1].signbit() != residuals[..., :1].signbit()
        place = 1 << torch.arange(differs.shape[-1], device=residuals.device)
        return (differs * place).sum(-1)


@dataclass(frozen=True, eq=False)
class Encoding:
    """The weights of the checksums of vectors of one length, on one device, in the dtype of sums.

    Attributes:
        table: The plain weights v1 and then ``p_d · v1``, [1 + D, n]. The checksums of the rows of
            C = A B are predicted as ``A @ (B @ table.T)``.
        words: The code word ``p(k)`` of each position, [n, D].
    """

    code: Bits
    table: torch.Tensor
    words: torch.Tensor

    @property
    def count(self) -> int:
        """Length n of the vectors."""
        return self.table.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which sums are accumulated."""
        return self.table.dtype

    def sums(self, vectors: torch.Tensor) -> torch.Tensor:
        """Compute all checksums of vectors [.., n]: [.., 1 + D], the plain one first."""
        # Not a matmul: its precision may be lowered by settings (TF32), and it may be intercepted.
        values = vectors.to(self.dtype)
        return torch.stack([(values * row).sum(-1) for row in self.table.unbind()], -1)

    def encode(self, matrix: torch.Tensor, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the plain [..] and the weighted [.., D] checksums along a dimension."""
        self.check(matrix, dim)
        sums = self.sums(matrix.detach().movedim(dim, -1))
        return sums[..., 0], sums[..., 1:]

    def check(self, matrix: torch.Tensor, dim: int) -> None:
        """Raise ValueError or TypeError if this encoding is not for vectors of a matrix."""
        if matrix.dtype not in DTYPES:
            raise TypeError(f"no floating-point checksums of {matrix.dtype}: use one of {DTYPES}")
        if matrix.dtype == torch.float64 and self.dtype != torch.float64:
            raise TypeError(f"fp64 data overflow sums in {self.dtype}: accumulate in torch.float64")
        if not -matrix.dim() <= dim < matrix.dim() or matrix.shape[dim] != self.count:
            raise ValueError(
                f"dimension {dim} of a matrix of shape {tuple(matrix.shape)} does not hold "
                f"vectors of {self.count} elements: make an encoding for its length"
            )
        if matrix.device != self.table.device:
            raise ValueError(
                f"the matrix is on {matrix.device} and the encoding on {self.table.device}: "
                "make one for each device"
            )


def encoding(
    count: int,
    *,
    code: Bits = Bits(),
    accumulate: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Encoding:
    """Build the checksum vectors for vectors of ``count`` elements, with random signs.

    All weights are ±1, so that a weighted sum is never larger than the sum of magnitudes, and sums
    of bf16 and fp16 values do not overflow.

    Args:
        count: Length of the vectors.
        code: Code of positions, from which the weighted checksums are made.
        accumulate: torch.float32 or torch.float64; by default fp64 on CPU and fp32 elsewhere.
        device: Device of the vectors.

    Raises:
        ValueError: ``count`` is not from 1 to 2²⁴.
        TypeError: Sums cannot be accumulated in that dtype.
    """
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"vectors of {count} elements cannot be encoded: use 1 … {MAX_COUNT}")
    default = torch.float64 if torch.device(device).type == "cpu" else torch.float32
    dtype = accumulate or default
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"sums are accumulated in torch.float32 or torch.float64, not in {dtype}")
    plain, words = signs(count), code.weights(count)
    table = torch.cat([plain[None], words * plain])
    return Encoding(code, table.to(device, dtype), words.T.contiguous().to(device, dtype))
