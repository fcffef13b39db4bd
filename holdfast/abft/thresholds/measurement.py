"""Measurements for ``holdfast calibrate``: checksum errors of one kernel's products at one K."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.abft.thresholds.profile import Bucket, Growth
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.digest.tensors import state_digest
from holdfast.errors import UncorrectableFault

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
ONLINE = "-online"
# Rows and columns (M, N) of the products, in turn; the last shape only up to a largest K.
SHAPES = ((128, 128), (16, 512), (512, 512))
LARGEST_INNER_OF_LARGE = 1024
GROWTH_EVERY = 4  # growth, being a mean, is measured on every fourth product only

Operands = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Effort:
    """Number and sizes of the products of a measurement.

    Args:
        inners: The K that are measured.
        products: Largest number of products for one K.
        depth: Largest number of products times K, for one K.
        seconds: Time for one K, after which no further products are made if every shape was.
    """

    name: str
    inners: tuple[int, ...]
    products: int
    depth: int
    seconds: float

    def products_of(self, inner: int) -> int:
        """Count the products that are made for one K."""
        return max(len(shapes_of(inner)), min(self.products, self.depth // inner))

    def work(self, inner: int) -> float:
        """Estimate the duration of one K, in arbitrary units, for a progress bar."""
        return self.products_of(inner) * (inner + 256.0)


@dataclass(frozen=True)
class Kernel:
    """A kind of product to measure, given by the dtypes of operands and verified result."""

    operand: torch.dtype
    verified: torch.dtype

    @property
    def name(self) -> str:
        """Name of the operands' dtype, with "-online" if their fp32 accumulator is verified."""
        name = next(name for name, dtype in DTYPES.items() if dtype == self.operand)
        return name if self.operand == self.verified else name + ONLINE

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply by torch's own kernel for these dtypes, whose rounding is measured."""
        if self.operand == self.verified:
            return a @ b
        return torch.mm(a, b, out_dtype=self.verified)

    def cast(self, operands: Operands) -> Operands:
        """Convert operands to this kernel's dtype, scaled so that their checksums do not overflow.

        The scale is a power of two, so that it changes no rounding.
        """
        a, b = operands
        # A row checksum of |N(1, 1)| operands stays below 8 K N; only fp16's can overflow.
        excess = math.log2(8 * b.numel() / torch.finfo(self.verified).max)
        shift = max(0, math.ceil(excess))
        return (
            (a * 2.0 ** -(shift // 2)).to(self.operand),
            (b * 2.0 ** -(shift - shift // 2)).to(self.operand),
        )


def unit_roundoff(dtype: str) -> float:
    """Return the unit roundoff of the verified values of a bucket, given its dtype's name."""
    operand = DTYPES[dtype.removesuffix(ONLINE)]
    return torch.finfo(ACCUMULATION[operand] if dtype.endswith(ONLINE) else operand).eps / 2


def kernels_of(device: torch.device, dtypes: tuple[str, ...]) -> list[Kernel]:
    """List the kernels of these dtypes; on CUDA those with an fp32 accumulator too."""
    kernels = [Kernel(DTYPES[name], DTYPES[name]) for name in dict.fromkeys(dtypes)]
    if device.type != "cuda":
        return kernels
    low = [kernel.operand for kernel in kernels if ACCUMULATION[kernel.operand] != kernel.operand]
    return kernels + [Kernel(operand, ACCUMULATION[operand]) for operand in low]


def shapes_of(inner: int) -> tuple[tuple[int, int], ...]:
    """List the (M, N) of the products that a K is measured with."""
    return SHAPES if inner <= LARGEST_INNER_OF_LARGE else SHAPES[:-1]


@dataclass
class Tally:
    """Accumulates the measured errors of the products of one kernel at one K."""

    kernel: Kernel
    inner: int
    rows: int = 0
    e_max: float = 0.0
    growth_rows: int = 0
    squares: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def bucket(self) -> Bucket:
        """Summarise the products so far."""
        growth = {
            name: Growth(math.sqrt(total / self.growth_rows), self.largest[name], self.growth_rows)
            for name, total in self.squares.items()
        }
        return Bucket(self.kernel.name, self.inner, self.rows, self.e_max, growth)

    def compare_checksums(self, operands: Operands) -> None:
        """Raise ``e_max`` to the largest relative checksum error of a row; ``confirm`` it."""
        cast = self.kernel.cast(operands)
        errors = checksum_errors(self.kernel, cast)
        self.rows += len(errors)
        largest = float(errors.max())
        if not largest <= self.e_max:
            confirm(self.kernel, cast, errors, checksum_errors(self.kernel, cast))
            self.e_max = largest

    def compare_signed(self, samples: dict[str, Operands], signs: torch.Tensor) -> None:
        """Add the signed residuals of products to the growth, by the name of their distribution.

        All operands a [M, K] and b [K, N] have one shape; ``signs`` are r, fp64 [N]. New maxima are
        measured again (``confirm``).
        """
        for name, operands in samples.items():
            cast = self.kernel.cast(operands)
            residuals = signed_residuals(self.kernel, cast, signs)
            largest = float(residuals.abs().max())
            if not largest <= self.largest.get(name, 0.0):
                confirm(self.kernel, cast, residuals, signed_residuals(self.kernel, cast, signs))
                self.largest[name] = largest
            self.squares[name] = self.squares.get(name, 0.0) + float(residuals.square().sum())
        self.growth_rows += len(residuals)


def checksum_errors(kernel: Kernel, operands: Operands) -> torch.Tensor:
    """Compute the relative error ``|C e − A(B e)| / |A(B e)|`` of each row sum, fp64 [M].

    Both checksums are rounded to the verified dtype, as in the paper.
    """
    a, b = operands
    product = kernel.multiply(a, b)
    encoded = b.to(kernel.verified).sum(-1, keepdim=True)
    checksum = (a.to(kernel.verified) @ encoded).squeeze(-1).double()
    return (product.sum(-1).double() - checksum).abs() / checksum.abs()


def signed_residuals(kernel: Kernel, operands: Operands, signs: torch.Tensor) -> torch.Tensor:
    """Compute ``(C r − A(B r)) / (u ‖C_i‖₂)`` of each row i, for random signs r, fp64 [M]."""
    a, b = operands
    product = kernel.multiply(a, b).double()
    residual = product @ signs - a.double() @ (b.double() @ signs)
    norm: torch.Tensor = torch.linalg.vector_norm(product, dim=-1)
    return residual / (unit_roundoff(kernel.name) * norm)


def confirm(
    kernel: Kernel, operands: Operands, measured: torch.Tensor, again: torch.Tensor
) -> None:
    """Raise UncorrectableFault if errors are not finite or differ when measured again.

    Rounding errors repeat bit for bit; those of a fault usually do not.
    """
    a, b = operands
    reason = "does not repeat bit for bit" if not torch.equal(measured, again) else ""
    if not torch.isfinite(measured).all():
        reason = "is not finite"
    if reason:
        raise UncorrectableFault(
            f"the checksum error of a {kernel.name} product of {a.shape[0]} × {a.shape[1]} × "
            f"{b.shape[1]} {reason}: {a.device} computes wrong, or not deterministically, and is "
            "not calibrated"
        )


def measure(
    tallies: list[Tally], effort: Effort, seed: int, device: torch.device
) -> Iterator[float]:
    """Fill the tallies of one K; yield the share done before each product and at the end."""
    inner = tallies[0].inner
    shapes, count = shapes_of(inner), effort.products_of(inner)
    deadline = time.monotonic() + effort.seconds
    generator = torch.Generator(device)
    drawn: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float64}
    for index in range(count):
        if index >= len(shapes) and time.monotonic() > deadline:
            break
        yield index / count
        # torch's CPU generator uses only 32 bits of its seed.
        generator.manual_seed(int(state_digest([seed, inner, index])[:8], 16))
        rows, columns = shapes[index % len(shapes)]
        normal = torch.randn(rows, inner, **drawn), torch.randn(inner, columns, **drawn)
        positive = ((normal[0] + 1).abs(), (normal[1] + 1).abs())
        for tally in tallies:
            tally.compare_checksums(positive)
        if index % GROWTH_EVERY == 0:
            uniform = torch.rand(rows, inner, **drawn), torch.rand(inner, columns, **drawn)
            samples = {"n01": normal, "n11": positive, "u01": uniform}
            bits = torch.randint(0, 2, (columns,), generator=generator, device=device)
            signs = 2.0 * bits.double() - 1.0
            for tally in tallies:
                tally.compare_signed(samples, signs)
    yield 1.0
