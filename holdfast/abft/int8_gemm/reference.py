"""The int8 product in plain torch.

``int8_linear_reference`` is what tests compare with: it computes in 64-bit integers, without packed
weights or checks. ``ReferenceInt8Gemm`` has the interface of the native ``Int8Gemm`` and gives the
same bits; it serves CPUs without FBGEMM, and CUDA.
"""

from dataclasses import dataclass

import numpy as np
import torch

from holdfast.abft.gemm.raw import raw
from holdfast.abft.int8_gemm.encoding import MODULUS, from_digits

Suspects = tuple[torch.Tensor, torch.Tensor] | None
CUDA_STEP = 8  # cuBLASLt needs int8 matrices whose sizes are multiples of this, B in columns,
CUDA_ROWS = 32  # and at least so many rows


def int8_linear_reference(
    a: torch.Tensor,
    weight: torch.Tensor,
    *,
    a_scale: float,
    a_zero_point: int = 0,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    out_scale: float | None = None,
    out_zero_point: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute ``(A − za)(W − zw)ᵀ · a_scale · scale + bias``, exact up to its conversion to fp32.

    The arguments are those of ``int8_linear``, with a weight int8 [N, K], its scale and zero point
    [1] or [N], and its bias [N]; ``relu`` clamps the output at 0.
    """
    zero = torch.zeros(1, dtype=torch.long) if zero_point is None else zero_point.long()
    exact = (a.long() - a_zero_point) @ (weight.long() - zero[:, None]).T
    inverse = 1.0 / torch.tensor(1.0 if out_scale is None else out_scale)
    factor = scale.float() * torch.tensor(a_scale, dtype=torch.float32) * inverse
    added = torch.zeros(1) if bias is None else bias.float() * inverse
    y = exact.float() * factor + added
    if relu:
        y = y.clamp_min(0.0)
    if out_scale is None:
        return y.to(dtype)
    return (y.round() + out_zero_point).clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Scales:
    """Offsets and factors of a call, one for each column, as ``dequantise`` uses them."""

    shift: torch.Tensor  # int32
    scale: torch.Tensor  # fp32
    addend: torch.Tensor  # fp32
    zero_point: int


def dequantise(
    c: torch.Tensor,
    a: torch.Tensor,
    scales: Scales,
    zero_point: torch.Tensor | None,
    relu: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Convert accumulators int32 [M, N] to the output's dtype: uint8, float32 or bfloat16.

    ``y = fp32(C − shift − zero_point Σ_k A[k]) · scale + addend``, each step rounded, where
    ``zero_point`` is that of B, int32 [N]; a uint8 output is ``rint(y) + scales.zero_point``,
    saturated. ``relu`` clamps y at 0.
    """
    columns = c.shape[1]
    t = c - scales.shift[:columns]
    if zero_point is not None:
        t -= zero_point[:columns] * a.sum(1, keepdim=True, dtype=torch.int32)
    y = t.float().mul_(scales.scale[:columns]).add_(scales.addend[:columns])
    if dtype is not torch.uint8:
        return (y.clamp_min_(0.0) if relu else y).to(dtype)
    low = 0.0 if relu else -float(scales.zero_point)
    y = y.round_().clamp_(low, 255.0 - scales.zero_point).add_(scales.zero_point)
    return y.to(torch.uint8)


def multiply_exactly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply uint8 by int8 matrices, exactly if the result fits int32.

    This is the ``signed_product`` of ``A − 128``, to which 128 times B's column sums are added.
    """
    if len(b) == 1:  # torch 2.13 returns garbage on CPU for one row whose strides are (1, 1)
        return a.to(torch.int32) * b.to(torch.int32)
    shift = 128 * b.sum(0, dtype=torch.int32)
    signed = (a ^ 128).view(torch.int8)
    rows, inner, columns = *a.shape, b.shape[1]
    if a.device.type == "cuda":
        deeper, wider = -inner % CUDA_STEP, -columns % CUDA_STEP
        signed = torch.nn.functional.pad(signed, (0, deeper, 0, padded_rows(rows) - rows))
        b = torch.nn.functional.pad(b, (0, wider, 0, deeper)).T.contiguous().T
    return signed_product(signed, b)[:rows, :columns] + shift


def signed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply int8 matrices to int32 by ``torch._int_mm``, or in fp64 where that saturates."""
    if a.device.type == "cpu" and not torch.cpu._is_vnni_supported():
        with raw():
            return (a.double() @ b.double()).to(torch.int32)
    return torch._int_mm(a, b)


def padded_rows(rows: int) -> int:
    """Return the number of rows of A with which ``torch._int_mm`` works on CUDA."""
    return -(-max(rows, CUDA_ROWS) // CUDA_STEP) * CUDA_STEP


class ReferenceInt8Gemm:
    """B [K, N] and its checks, or [K, N + 1] if ``modular``, as in the native ``Int8Gemm``.

    ``deferred`` is True if products can be verified without waiting for the device.
    """

    deferred = False

    def __init__(
        self,
        b: torch.Tensor,
        columns: int,
        modular: bool,
        digits: torch.Tensor,
        ones: torch.Tensor,
        column_sums: torch.Tensor,
        b_scale: torch.Tensor,
        b_zero_point: torch.Tensor | None,
        bias: torch.Tensor,
        relu: bool,
    ) -> None:
        self._b = b.contiguous().clone()
        self._columns, self._modular, self._relu = columns, modular, relu
        self._digits, self._column_sums = digits, column_sums
        self._scale, self._zero_point, self._bias = b_scale, b_zero_point, bias

    @property
    def buffer(self) -> torch.Tensor:
        """View of the elements of B as a vector."""
        return self._b.view(-1)

    def unpack(self) -> torch.Tensor:
        """Copy B, including its check column."""
        return self._b.clone()

    def column(self, j: int) -> torch.Tensor:
        """Copy column j of B, int8 [K]."""
        return self._b[:, j].clone()

    def address(self, k: int, j: int) -> int:
        """Locate B[k, j] in the buffer."""
        return k * self._b.shape[1] + j

    def scales(
        self,
        a_scale: float | torch.Tensor,
        a_zero_point: int | torch.Tensor,
        out_scale: float,
        out_zero_point: int,
    ) -> Scales:
        """Compute the ``Scales`` of a call; ``out_scale`` is 0 if the output is not quantised."""
        inverse = float(np.float32(1.0) / np.float32(out_scale or 1.0))
        given = a_scale.float() if isinstance(a_scale, torch.Tensor) else np.float32(a_scale)
        of_a = given if isinstance(given, torch.Tensor) else float(given)
        shift = a_zero_point * self._column_sums
        if self._zero_point is not None:
            shift = shift - len(self._b) * a_zero_point * self._zero_point
        # fp32 times a Python float that fp32 holds: rounded as the native core rounds it.
        scale = self._scale * of_a * inverse
        return Scales(shift, scale, self._bias * inverse, out_zero_point)

    def accumulate(self, a: torch.Tensor) -> torch.Tensor:
        """Multiply A by B and its check column, int32."""
        return multiply_exactly(a, self._b)

    def finish(
        self, c: torch.Tensor, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool
    ) -> Suspects:
        """Write the output; return the rows that fail their check, and their accumulators."""
        product = c[:, : self._columns]
        out.copy_(dequantise(product, a, scales, self._zero_point, self._relu, out.dtype))
        if not verify:
            return None
        sums = product.sum(1, dtype=torch.int64)
        if self._modular:
            wrong = (sums - c[:, self._columns]).fmod(MODULUS) != 0
        else:
            wrong = sums != from_digits(self.times_digits(a).T)
        return suspects_of(wrong, c)

    def times_digits(self, a: torch.Tensor) -> torch.Tensor:
        """Multiply A by the digits of B's row sums, int32 [M, digits]."""
        return multiply_exactly(a, self._digits[:, : a.shape[1]].T.contiguous())

    def multiply(
        self, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool
    ) -> Suspects:
        """Multiply, write the output, and return what ``finish`` does."""
        return self.finish(self.accumulate(a), a, out, scales, verify)


def suspects_of(wrong: torch.Tensor, c: torch.Tensor) -> Suspects:
    """Return the rows marked in ``wrong`` and their accumulators; None if there are none."""
    rows = wrong.nonzero().flatten()
    return (rows, c[rows]) if len(rows) else None
