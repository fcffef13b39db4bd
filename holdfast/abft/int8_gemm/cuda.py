"""The int8 product on a CUDA device: one pass over its accumulators verifies and dequantises them.

``torch._int_mm`` multiplies A − 128 by B, the digits of B's row sums (or its check column) and a
column of ones, which together are padded to the sizes that cuBLASLt takes. The equation of the
check holds for A − 128 as it does for A.

With ``TRITON_INTERPRET=1`` set before Triton is first imported it runs on CPU tensors, for tests.
"""

import torch
import triton
from torch.nn.functional import pad

from holdfast.abft.int8_gemm.encoding import MODULUS, row_sums, signed_digits
from holdfast.abft.int8_gemm.kernels import finish_kernel
from holdfast.abft.int8_gemm.reference import (
    CUDA_STEP,
    ReferenceInt8Gemm,
    Scales,
    Suspects,
    padded_rows,
    signed_product,
)
from holdfast.abft.triton.launch import FAILED, on, slot_on

LARGEST_BLOCK = 2048


class TritonInt8Gemm(ReferenceInt8Gemm):
    """``ReferenceInt8Gemm`` with verification and dequantisation in Triton.

    The bits are those of ``dequantise``, as no product is fused with a sum, and the sums of the
    check are exact in 64 bits. Accumulators are those of A − 128, int32 [M or more, columns and
    check columns and padding].
    """

    deferred = True

    def __init__(
        self,
        b: torch.Tensor,
        columns: int,
        modular: bool,
        digits: torch.Tensor,
        ones: torch.Tensor,
        *rest: torch.Tensor | bool | None,
    ) -> None:
        inner, stored = b.shape
        checks = b.new_zeros((0, inner)) if modular else signed_digits(row_sums(b)[0])
        self._checks = stored - columns + len(checks)
        joined = torch.cat([b.T, checks, b.new_ones((1, inner))])
        # B in columns, the only layout of which every cuBLASLt has an int8 product.
        self._packed = pad(joined, (0, -inner % CUDA_STEP, 0, -len(joined) % CUDA_STEP))
        super().__init__(b[:0], columns, modular, digits, ones, *rest)  # type: ignore[arg-type]
        self._b = self._packed[:stored, :inner].T

    @property
    def buffer(self) -> torch.Tensor:
        """View of B, its checks and the padding as a vector."""
        return self._packed.view(-1)

    def address(self, k: int, j: int) -> int:
        """Locate B[k, j] in the buffer."""
        return j * self._packed.shape[1] + k

    def accumulate(self, a: torch.Tensor) -> torch.Tensor:
        """Multiply A − 128 by B, its checks and ones, int32."""
        rows, inner = padded_rows(len(a)), self._packed.shape[1]
        if (rows, inner) == a.shape:
            signed = a ^ 128
        else:
            signed = a.new_zeros((rows, inner))
            torch.bitwise_xor(a, 128, out=signed[: len(a), : a.shape[1]])
        return signed_product(signed.view(torch.int8), self._packed.T)

    def finish(
        self, c: torch.Tensor, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool,
        slot: torch.Tensor | None = None,
    ) -> Suspects:  # fmt: skip
        """Write the output; return the rows that fail their check, and the accumulators of A B.

        Args:
            c: The result of ``accumulate``.
            a: uint8 [M, K].
            out: uint8, float32 or bfloat16 [M, columns], contiguous.
            scales: Scales of the call.
            verify: True if rows are checked.
            slot: int32 [1], which becomes at least the bits of 2.0 if a row fails. Then nothing
                is returned, and the host does not wait for the device.
        """
        rows, columns = out.shape
        if not rows:
            return None
        wrong = c.new_empty(rows, dtype=torch.int8)
        flag = slot_on(c.device, slot)
        zero = self._zero_point
        with on(c):
            finish_kernel[(rows,)](
                c, self._column_sums, scales.shift, zero, scales.scale, scales.addend,
                out.view(torch.uint16) if out.dtype is torch.bfloat16 else out,
                wrong, flag, columns, c.stride(0), a.shape[1], float(scales.zero_point),
                VERIFY=verify,
                MODULAR=self._modular, DIGITS=self._checks, B_ZERO=zero is not None,
                RELU=self._relu,
                QUANTISE=out.dtype is torch.uint8, BF16=out.dtype is torch.bfloat16,
                MODULUS=MODULUS, FAILED=FAILED,
                BLOCK=min(LARGEST_BLOCK, triton.next_power_of_2(columns)),
                enable_fp_fusion=False,
            )  # fmt: skip
        if not verify or slot is not None or not int(flag):
            return None
        suspects = wrong.nonzero().flatten()
        shift = 128 * self._b.sum(0, dtype=torch.int32)
        return suspects, c[suspects, : len(shift)] + shift

    def multiply(
        self, a: torch.Tensor, out: torch.Tensor, scales: Scales, verify: bool,
        slot: torch.Tensor | None = None,
    ) -> Suspects:  # fmt: skip
        """Multiply, write the output, and return what ``finish`` does."""
        return self.finish(self.accumulate(a), a, out, scales, verify, slot)
