"""Triton kernel that pools bags and verifies them while their rows are in the cache."""

import triton
import triton.language as tl

UINT8, UINT4, FLOAT32, FLOAT16, BFLOAT16 = (tl.constexpr(number) for number in range(5))
SAMPLES = tl.constexpr(32)  # rows whose checksums are read at once
UNIT = tl.constexpr(2.0**-24)


@triton.jit
def word_at(at, inside, ALIGNED: tl.constexpr):
    """Load four bytes as uint32, little-endian; 0 outside."""
    if ALIGNED:
        return tl.load(at.to(tl.pointer_type(tl.uint32)), inside, other=0)
    word = tl.load(at, inside, other=0).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        word |= tl.load(at + byte, inside, other=0).to(tl.uint32) << (8 * byte)
    return word


@triton.jit
def half_of(word):
    """Return the lower half of a word as the fp16 value that it is, in fp32."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def parameters_at(at, inside, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Load scale and bias of quantised rows, fp32; 1 and 0 of others."""
    if KIND == UINT8:
        scale = word_at(at, inside, ALIGNED).to(tl.float32, bitcast=True)
        bias = word_at(at + 4, inside, ALIGNED).to(tl.float32, bitcast=True)
    elif KIND == UINT4:
        word = word_at(at, inside, ALIGNED)
        scale = half_of(word)
        bias = half_of(word >> 16)
    else:
        scale = tl.where(inside, 1.0, 0.0)
        bias = scale * 0.0
    return scale, bias


@triton.jit
def elements_at(
    row, inside, start, dim, KIND: tl.constexpr, BAGS: tl.constexpr, BLOCK: tl.constexpr
):
    """Load the elements from ``start`` on of one row for each bag, fp32 [BAGS, BLOCK]."""
    j = start + tl.arange(0, BLOCK)
    stored = inside[:, None] & (j < dim)[None, :]
    if KIND == UINT4:
        byte = start // 2 + tl.arange(0, BLOCK // 2)
        stored = inside[:, None] & (2 * byte < dim)[None, :]
        pair = tl.load(row[:, None] + byte[None, :], stored, other=0)
        x = tl.interleave((pair & 15).to(tl.float32), (pair >> 4).to(tl.float32))
    elif KIND == UINT8:
        x = tl.load(row[:, None] + j[None, :], stored, other=0).to(tl.float32)
    elif KIND == FLOAT32:
        at = row.to(tl.pointer_type(tl.float32))
        x = tl.load(at[:, None] + j[None, :], stored, other=0.0)
    elif KIND == FLOAT16:
        at = row.to(tl.pointer_type(tl.float16))
        x = tl.load(at[:, None] + j[None, :], stored, other=0.0).to(tl.float32)
    else:
        at = row.to(tl.pointer_type(tl.uint16))
        bits = tl.load(at[:, None] + j[None, :], stored, other=0).to(tl.uint32) << 16
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def guard_of(first, second, third, guards_ptr):
    """Compute the guard byte of 11 bytes in three words, by a table for each byte."""
    guard = tl.load(guards_ptr + (first & 255))
    for byte in tl.static_range(1, 4):
        guard ^= tl.load(guards_ptr + 256 * byte + ((first >> (8 * byte)) & 255))
    for byte in tl.static_range(4):
        guard ^= tl.load(guards_ptr + 256 * (4 + byte) + ((second >> (8 * byte)) & 255))
    for byte in tl.static_range(3):
        guard ^= tl.load(guards_ptr + 256 * (8 + byte) + ((third >> (8 * byte)) & 255))
    return guard.to(tl.uint32)


@triton.jit
def checked_rows(batch, i, inside, rows):
    """Load the indices of positions i; mark those of rows to pool, and those outside the table."""
    index = tl.load(batch.indices + i, inside, other=0).to(tl.int64)
    outside = inside & ((index < 0) | (index >= rows))
    return index, inside & ~outside & (index != batch.padding), outside


@triton.jit
def tally(
    table, batch, begin, end, KIND: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr,
    BAGS: tl.constexpr,
):  # fmt: skip
    """Read the checksums of the rows of bags.

    Returns:
        For each bag Σ_j r_j R_j as the checksums predict it; the sum of squares that no element's
        rounding exceeds, and that of the weighted sums; the number of rows; and a number that is
        not 0 if a guard does not match or an index is outside the table.
    """
    expected = tl.zeros([BAGS, SAMPLES], tl.float64)
    peaks = tl.zeros([BAGS, SAMPLES], tl.float64)
    weighting = tl.zeros([BAGS, SAMPLES], tl.float64)
    pooled = tl.zeros([BAGS, SAMPLES], tl.int32)
    wrong = tl.zeros([BAGS, SAMPLES], tl.int32)
    TOP: tl.constexpr = 255.0 if KIND == UINT8 else 15.0
    for first in range(0, tl.max(end - begin), SAMPLES):
        i = begin[:, None] + first + tl.arange(0, SAMPLES)[None, :]
        index, inside, outside = checked_rows(batch, i, i < end[:, None], table.rows)
        at = table.data + index * table.stride + table.elements
        weight = tl.zeros([BAGS, SAMPLES], tl.float64) + 1.0
        if WEIGHTED:
            weight = tl.load(batch.weights + i, inside, other=0.0).to(tl.float64)
        one = word_at(at, inside, ALIGNED)
        if KIND == UINT8 or KIND == UINT4:  # noqa: SIM109
            if KIND == UINT8:
                two = word_at(at + 4, inside, ALIGNED)
                word = word_at(at + 8, inside, ALIGNED)
            else:
                two = one * 0
                word = word_at(at + 4, inside, ALIGNED)
            guarded = word & 0xFFFFFF
            stored = word >> 24
            scale, bias = parameters_at(at, inside, KIND, ALIGNED)
            scale = scale.to(tl.float64) * weight
            bias = bias.to(tl.float64) * weight
            code_sum = ((word << 8).to(tl.int32, bitcast=True) >> 8).to(tl.float64)
            of_codes = scale * code_sum
            of_bias = bias * table.sign_sum
            peak = TOP * TOP * scale * scale + bias * bias
            rounded = of_codes * of_codes + of_bias * of_bias
            product = of_codes + of_bias
        else:
            two = word_at(at + 4, inside, ALIGNED)
            word = word_at(at + 8, inside, ALIGNED)
            guarded = word >> 8
            stored = word & 255
            bits = one.to(tl.uint64) | (two.to(tl.uint64) << 32)
            product = bits.to(tl.float64, bitcast=True) * weight
            largest = (word & 0xFFFFFF00).to(tl.float32, bitcast=True).to(tl.float64) * weight
            peak = largest * largest
            rounded = peak * 0.0
        matches = guard_of(one, two, guarded, table.guards) == stored
        wrong |= (outside | (inside & ~matches)).to(tl.int32)
        expected += tl.where(inside, product, 0.0)
        peaks += tl.where(inside, peak, 0.0)
        if WEIGHTED:
            weighting += tl.where(inside, rounded, 0.0)
        pooled += inside.to(tl.int32)
    sums = tl.sum(expected, 1), tl.sum(peaks, 1), tl.sum(weighting, 1)
    return sums[0], sums[1], sums[2], tl.sum(pooled, 1), tl.max(wrong, 1)


@triton.jit
def bag_kernel(
    table, batch, faults_ptr, faults, out_ptr, suspects_ptr, slot_ptr, dim,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
    VERIFY: tl.constexpr, SIGMAS: tl.constexpr, FAILED: tl.constexpr,
    BAGS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Pool and check ``BAGS`` bags per program, row by row as the kernels on CPU do.

    ``suspects`` of a bag is 1 if it fails its check, else 0; ``slot`` then becomes at least
    ``FAILED``.
    """
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    present = bag < batch.bags
    begin = tl.load(batch.bounds + bag, present, other=0).to(tl.int64)
    end = tl.load(batch.bounds + bag + 1, present & (bag < batch.ends), other=0).to(tl.int64)
    end = tl.where(bag < batch.ends, end, batch.indices_count)
    end = tl.where(present, end, 0)
    invalid = (
        (begin < 0) | (end < begin) | (end > batch.indices_count) | ((bag == 0) & (begin != 0))
    )
    begin = tl.where(invalid, 0, begin)
    end = tl.where(invalid, 0, end)
    expected, peaks, weighting, pooled, wrong = tally(
        table, batch, begin, end, KIND, ALIGNED, WEIGHTED, BAGS
    )
    wrong |= invalid.to(tl.int32)
    inverse = tl.zeros([BAGS], tl.float32) + 1.0
    if MEAN:
        inverse = tl.div_rn(inverse, tl.maximum(pooled, 1).to(tl.float32))
    signed = tl.zeros([BAGS], tl.float64)
    walk = tl.zeros([BAGS], tl.float64)
    ends = tl.zeros([BAGS], tl.float64)
    longest = tl.max(end - begin)
    for start in range(0, dim, BLOCK):
        j = start + tl.arange(0, BLOCK)
        sums = tl.zeros([BAGS, BLOCK], tl.float32)
        squares = tl.zeros([BAGS, BLOCK], tl.float32)
        for first in range(0, longest, UNROLL):
            for u in tl.static_range(UNROLL):
                i = begin + first + u
                index, inside, _ = checked_rows(batch, i, i < end, table.rows)
                row = table.data + index * table.stride
                scale, bias = parameters_at(row + table.elements, inside, KIND, ALIGNED)
                if WEIGHTED:
                    weight = tl.load(batch.weights + i, inside, other=0.0)
                    scale *= weight
                    bias *= weight
                x = elements_at(row, inside, start, dim, KIND, BAGS, BLOCK)
                scales = tl.broadcast_to(scale[:, None], (BAGS, BLOCK))
                added = tl.fma(x, scales, sums + bias[:, None])
                sums = tl.where(inside[:, None], added, sums)
                squares = tl.where(inside[:, None], tl.fma(added, added, squares), squares)
        stored = present[:, None] & (j < dim)[None, :]
        kept = tl.where(stored, sums, 0.0)
        ends += tl.sum((kept * kept).to(tl.float64), 1)
        walk += tl.sum(tl.where(stored, squares, 0.0).to(tl.float64), 1)
        result = kept
        if MEAN:
            result = kept * inverse[:, None]
        if faults_ptr is not None:
            for f in range(faults):
                there = (bag == tl.load(faults_ptr + 3 * f).to(tl.int64))[:, None]
                there &= (j == tl.load(faults_ptr + 3 * f + 1).to(tl.int32))[None, :]
                value = tl.load(faults_ptr + 3 * f + 2).to(tl.int32).to(tl.float32, bitcast=True)
                result = tl.where(there, value, result)
        to = out_ptr + bag[:, None] * dim + j[None, :]
        half = result.to(out_ptr.dtype.element_ty)
        tl.store(to, half, stored)
        if VERIFY:
            sign = tl.load(table.signs + j, j < dim, other=0).to(tl.float32)
            signed += tl.sum((result * sign[None, :]).to(tl.float64), 1)
            if out_ptr.dtype.element_ty == tl.float16:
                off = tl.abs(half.to(tl.float32) - result)
                far = ~(off <= tl.abs(result) * 0.00048828125 + 2.0**-25)
                far &= (result == result) & (tl.abs(result) < 65520.0)
                wrong |= tl.max((far & stored).to(tl.int32), 1)
    if VERIFY:
        n = tl.maximum(pooled, 1).to(tl.float64)
        variance = UNIT * UNIT / 3 * (2 * walk + 2 * dim * peaks + weighting)
        variance += 2 * n * dim * 2.0**-252
        if MEAN:
            expected = expected / n
            variance = variance / (n * n)
            variance += UNIT * UNIT * (expected * expected + ends / (3 * n * n))
        residual = signed - expected
        good = (residual * residual <= SIGMAS * SIGMAS * variance) & (variance < float("inf"))
        failed = present & (~good | (wrong != 0))
        tl.store(suspects_ptr + bag, failed.to(tl.int8), present)
        tl.atomic_max(slot_ptr + bag * 0, FAILED, mask=failed, sem="relaxed")
