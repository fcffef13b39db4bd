"""Verification and dequantisation of int8 accumulators in one pass over them, on a CUDA device.

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
    """Write the dequantised rows of ``out`` [M, N]; mark those that fail their check, int8 [M].

    The bits are those of ``dequantise``, as no product is fused with a sum, and the sums of the
    check are exact in 64 bits.

    Args:
        c: Accumulators int32 [M, N], or [M, N + 1] with the check column of ``mod127``.
        checks: A times the digits of B's row sums, int32 [M, digits]; None for ``mod127``.
        a_sums: Σ_k A[i, k], int32 [M]; needed if B has zero points.
        operands: ``shift`` (int32), ``scale`` and ``addend`` (fp32) of ``Scales``, N or more each.
        b_zero_point: Zero points of B, int32, N or more; None if all are 0.
        out: uint8, float32 or bfloat16, contiguous.
        zero_point: Zero point of a uint8 output.
        relu: True if the output is clamped at 0.
        verify: True if rows are checked.
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
    """``ReferenceInt8Gemm`` with verification and dequantisation in Triton."""

    def finish(
        self, c: torch.Tensor, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool
    ) -> Suspects:
        """Write the output; return the rows that fail their check, and their accumulators."""
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
