"""Triton kernel that verifies rows of int8 accumulators and dequantises them in one pass."""

import triton
import triton.language as tl


@triton.jit
def rounded(y):
    """Round to the nearest integer, ties to even, after clamping to ±2²¹, far beyond uint8."""
    y = tl.minimum(tl.maximum(y, -2097152.0), 2097152.0)
    return (y + 12582912.0) - 12582912.0


@triton.jit
def as_bf16(y):
    """Round fp32 values other than NaN to bf16, ties to even; return the bits as uint16."""
    bits = y.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def finish_kernel(
    c_ptr, b_sums_ptr, shift_ptr, b_zero_ptr, scale_ptr, addend_ptr, out_ptr, suspects_ptr,
    slot_ptr, columns, c_stride, inner, zero_point,
    VERIFY: tl.constexpr, MODULAR: tl.constexpr, DIGITS: tl.constexpr, B_ZERO: tl.constexpr,
    RELU: tl.constexpr, QUANTISE: tl.constexpr, BF16: tl.constexpr, MODULUS: tl.constexpr,
    FAILED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Verify and dequantise one row of ``(A − 128) B`` per program.

    Behind the columns of B the row has its check column or the products with B's digits, and then
    the sum of A's row. ``suspects`` of the row is 1 if it fails its check, else 0; ``slot`` then
    becomes at least ``FAILED``.
    """
    row = tl.program_id(0).to(tl.int64)
    c_row = c_ptr + row * c_stride
    a_sum = 0
    if B_ZERO:
        a_sum = tl.load(c_row + columns + DIGITS) + 128 * inner
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, columns, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < columns
        c = tl.load(c_row + j, inside, other=0)
        if VERIFY:
            total += c.to(tl.int64)
        t = c + 128 * tl.load(b_sums_ptr + j, inside, other=0)
        t -= tl.load(shift_ptr + j, inside, other=0)
        if B_ZERO:
            t -= tl.load(b_zero_ptr + j, inside, other=0) * a_sum
        y = t.to(tl.float32) * tl.load(scale_ptr + j, inside, other=0.0)
        y = y + tl.load(addend_ptr + j, inside, other=0.0)
        if QUANTISE:
            low = 0.0 if RELU else -255.0
            y = tl.maximum(rounded(y), low) + zero_point
            y = tl.minimum(tl.maximum(y, 0.0), 255.0)
        elif RELU:
            y = tl.maximum(y, 0.0)
        to = out_ptr + row * columns + j
        if BF16:
            tl.store(to, as_bf16(y), inside)
        else:
            tl.store(to, y.to(out_ptr.dtype.element_ty), inside)
    if VERIFY:
        predicted = tl.zeros([], tl.int64)
        for d in tl.static_range(DIGITS):
            of_digit = tl.load(c_row + columns + DIGITS - 1 - d)
            predicted = predicted * 256 + of_digit.to(tl.int64)
        residual = tl.sum(total, axis=0) - predicted
        if MODULAR:
            residual = residual % MODULUS
        tl.store(suspects_ptr + row, (residual != 0).to(tl.int8))
        tl.atomic_max(slot_ptr, FAILED, mask=residual != 0, sem="relaxed")
