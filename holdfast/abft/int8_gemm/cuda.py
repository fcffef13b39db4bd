"""``ReferenceInt8Gemm.finish`` as one pass over the accumulators, on a CUDA device.

With ``TRITON_INTERPRET=1`` set before Triton is first imported it runs on CPU tensors, for tests.
"""

import torch
import triton

from holdfast.abft.int8_gemm.encoding import MODULUS
from holdfast.abft.int8_gemm.kernels import finish_kernel
from holdfast.abft.int8_gemm.reference import ReferenceInt8Gemm, Scales, Suspects, suspects_of

LARGEST_BLOCK = 2048


def finish(
    c: torch.Tensor,
    checks: torch.Tensor | None,
    a_sums: torch.Tensor | None,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    b_zero_point: torch.Tensor | None,
    out: torch.Tensor,
    *,
    zero_point: int,
    relu: bool,
    verify: bool,
) -> torch.Tensor:
    """Write the dequantised output rows; mark those that do not match their checksum, int8 [M].

    Args:
        c: int32 [M, N], or [M, N + 1] with the check column of ``mod127``.
        checks: int32 [M, digits], A times the digits; None: the check column.
        a_sums: int32 [M], Σ_k A[i, k], where B has zero points: int32, N or more.
        operands: shift (int32), scale and addend (fp32), N or more each: see ``dequantise``.
        b_zero_point: Zero points of B, int32, N or more; None: all are 0.
        out: [M, N], contiguous, uint8, float32 or bfloat16.
        zero_point: Zero point of a uint8 output.
        relu: whether the output is clamped at 0.
        verify: whether rows are checked.

    Guarantees: ``dequantise``'s bits, as nothing is fused; the sum is exact in 64 bits.
    """
    rows, columns = out.shape
    suspects = torch.zeros(rows, dtype=torch.int8, device=c.device)
    shift, scale, addend = operands
    unused = suspects  # a pointer that is not read
    finish_kernel[(rows,)](
        c,
        unused if checks is None else checks,
        unused if a_sums is None else a_sums,
        shift,
        unused if b_zero_point is None else b_zero_point,
        scale,
        addend,
        out.view(torch.uint16) if out.dtype is torch.bfloat16 else out,
        suspects,
        columns,
        c.stride(0),
        0 if checks is None else checks.stride(0),
        float(zero_point),
        VERIFY=verify,
        MODULAR=checks is None,
        DIGITS=0 if checks is None else checks.shape[1],
        B_ZERO=b_zero_point is not None,
        RELU=relu,
        QUANTISE=out.dtype is torch.uint8,
        BF16=out.dtype is torch.bfloat16,
        MODULUS=MODULUS,
        BLOCK=min(LARGEST_BLOCK, triton.next_power_of_2(columns)),
        enable_fp_fusion=False,
    )
    return suspects


class TritonInt8Gemm(ReferenceInt8Gemm):
    """The reference with its second pass in Triton."""

    def finish(
        self, c: torch.Tensor, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool
    ) -> Suspects:
        """Write the output; return the rows whose check fails, and their accumulators."""
        if not len(c):
            return None
        zero = self._zero_point
        wrong = finish(
            c,
            self.times_digits(a) if verify and not self._modular else None,
            None if zero is None else a.sum(1, dtype=torch.int32),
            (scales.shift, scales.scale, scales.addend),
            zero,
            out,
            zero_point=scales.zero_point,
            relu=self._relu,
            verify=verify,
        )
        return suspects_of(wrong, c) if verify else None
