"""The verified int8 product in plain torch: where FBGEMM is absent, and on CUDA.

The same interface as the native ``Int8Gemm``, and the same bits.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

from holdfast.abft.gemm.raw import raw
from holdfast.abft.int8_gemm.encoding import MODULUS, from_digits

Suspects = tuple[torch.Tensor, torch.Tensor] | None
CUDA_STEP = 8  # cuBLASLt multiplies int8 matrices of multiples of it
CUDA_ROWS = 32


@dataclass(frozen=True)
class Scales:
    """What a call scales by, an entry a column: see ``dequantise``."""

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
    """The output rows of accumulators.

    ``y = fp32(C − shift − zero_point Σ_k A[k]) · scale + addend``, each step rounded; uint8 is
    ``rint(y) + output zero point``, saturated.

    Args:
        c: int32 [M, N]; a: uint8 [M, K]; zero_point: of B, int32 [N].
        dtype: uint8, float32 or bfloat16.
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
    """``A B`` of uint8 and int8, int32, exact while it fits.

    By ``torch._int_mm`` of ``A − 128`` where that does not saturate: on CUDA and on processors
    with VNNI; else in fp64, which holds every int32.
    """
    if len(b) == 1:  # torch 2.13 returns garbage on CPU for one row whose strides are (1, 1)
        return a.to(torch.int32) * b.to(torch.int32)
    if a.device.type == "cpu" and not torch.cpu._is_vnni_supported():
        with raw():
            return (a.double() @ b.double()).to(torch.int32)
    shift = 128 * b.sum(0, dtype=torch.int32)
    signed = (a ^ 128).view(torch.int8)
    rows, inner, columns = *a.shape, b.shape[1]
    if a.device.type == "cuda":
        more = -(-max(rows, CUDA_ROWS) // CUDA_STEP) * CUDA_STEP - rows
        deeper, wider = -inner % CUDA_STEP, -columns % CUDA_STEP
        signed = torch.nn.functional.pad(signed, (0, deeper, 0, more))
        b = torch.nn.functional.pad(b, (0, wider, 0, deeper))
    return torch._int_mm(signed, b)[:rows, :columns] + shift


class TorchInt8Gemm:
    """B [K, N] and its checks, with N + 1 columns where ``modular``."""

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
        """B's elements, flat, shared."""
        return self._b.view(-1)

    def unpack(self) -> torch.Tensor:
        """A copy of B, with its check column."""
        return self._b.clone()

    def column(self, j: int) -> torch.Tensor:
        """B[:, j], int8 [K]."""
        return self._b[:, j].clone()

    def address(self, k: int, j: int) -> int:
        """Where B[k, j] is in the buffer."""
        return k * self._b.shape[1] + j

    def scales(
        self, a_scale: float, a_zero_point: int, out_scale: float, out_zero_point: int
    ) -> Scales:
        """See ``dequantise``; out_scale 0: the output is not quantised."""
        single = torch.tensor([a_scale, out_scale or 1.0], dtype=torch.float32)
        of_a, inverse = (float(x) for x in (single[0], 1.0 / single[1]))
        shift = a_zero_point * self._column_sums
        if self._zero_point is not None:
            shift = shift - len(self._b) * a_zero_point * self._zero_point
        # fp32 times a Python float that fp32 holds: rounded as the native core rounds it.
        scale = self._scale * of_a * inverse
        return Scales(shift, scale, self._bias * inverse, out_zero_point)

    def accumulate(self, a: torch.Tensor) -> torch.Tensor:
        """``A B`` with the check column, int32."""
        return multiply_exactly(a, self._b)

    def finish(
        self, c: torch.Tensor, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool
    ) -> Suspects:
        """Write the output; rows whose check fails, and their accumulators."""
        if c.is_cuda and _has_triton() and len(c):
            return self._finish_on_device(c, a, out, scales, verify)
        product = c[:, : self._columns]
        out.copy_(dequantise(product, a, scales, self._zero_point, self._relu, out.dtype))
        if not verify:
            return None
        sums = product.sum(1, dtype=torch.int64)
        if self._modular:
            wrong = (sums - c[:, self._columns]).fmod(MODULUS) != 0
        else:
            wrong = sums != from_digits(self._times_digits(a).T)
        return _suspects(wrong, c)

    def _times_digits(self, a: torch.Tensor) -> torch.Tensor:
        return multiply_exactly(a, self._digits[:, : a.shape[1]].T.contiguous())

    def _finish_on_device(
        self, c: torch.Tensor, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool
    ) -> Suspects:
        """The same in one pass, by Triton."""
        from holdfast.abft.int8_gemm import triton

        zero = self._zero_point
        wrong = triton.finish(
            c,
            self._times_digits(a) if verify and not self._modular else None,
            None if zero is None else a.sum(1, dtype=torch.int32),
            (scales.shift, scales.scale, scales.addend),
            zero,
            out,
            zero_point=scales.zero_point,
            relu=self._relu,
            verify=verify,
        )
        return _suspects(wrong, c) if verify else None

    def multiply(
        self, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool
    ) -> Suspects:
        """``accumulate`` and ``finish``."""
        return self.finish(self.accumulate(a), a, out, scales, verify)


def _suspects(wrong: torch.Tensor, c: torch.Tensor) -> Suspects:
    rows = wrong.nonzero().flatten()
    return (rows, c[rows]) if len(rows) else None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
