"""The Triton kernel that verifies a finished product on the device, and encodes right operands.

Its programs read C and A once, each a part of some rows, and write partial sums, so that any shape
keeps the whole device busy. The last program that contributes to a group of rows adds the parts
in a fixed order, compares each residual with its threshold, and raises one number of the ledger to
the largest ratio. ``csrc/device/kernel_backend.cpp`` launches it; ``csrc/device/backend.h`` has the
equations.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from holdfast.abft.gemm.kernels import GROUP, batch_rows, load_tile, rounding_bound
from holdfast.abft.gemm.kernels_groups import OF_ROWS, sums_of_groups
from holdfast.abft.triton.rows import spread_of

PARTS = tl.constexpr(32)  # parts that are added at a time
MAX_FP32, MAX_FP64 = tl.constexpr(3.4028234663852886e38), tl.constexpr(1.7976931348623157e308)
SQUARE_OF_FP32, SQUARE_OF_FP16 = tl.constexpr(1.1579207543382391e77), tl.constexpr(65504.0**2)
INF_BITS, NAN_BITS = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)  # NaN is above all others


@dataclass(frozen=True)
class Variant:
    """Constants that the kernel is compiled for.

    Attributes:
        c_layout, d_layout, a_layout: 0 if rows of C, of the addend or of A are contiguous, 1 if
            columns are, 2 if neither.
        c_rows, c_columns: Sizes of a tile of C; 0 if there is no C, only a matrix to be encoded.
        a_rows, a_columns: Sizes of a tile of A; 0 if it is not read, as its sums are known.
        addend: True if C has an addend.
        predict: True if the sums of A that predict those of C are computed.
        encode: True if A is encoded as the right operand of a later product.
        across: True if weighted column sums of A are computed; with ``encode`` those that encode
            its transpose.
        turned: True if ``a`` is Aᵀ, and ``encoding`` and ``across`` are swapped; no ``encode``.
        scaled: True if rows of C, or columns of a matrix that is encoded, have scales.
        groups: 1 if groups divide the rows of A, 2 if they divide its columns, 0 without any.
        stages: Number of tiles in flight.
    """

    c_layout: int = 0
    d_layout: int = 0
    a_layout: int = 0
    c_rows: int = 0
    c_columns: int = 0
    a_rows: int = 0
    a_columns: int = 0
    addend: bool = False
    predict: bool = True
    encode: bool = False
    across: bool = False
    turned: bool = False
    scaled: bool = False
    groups: int = 0
    stages: int = 3


@triton.jit
def verify_kernel(
    c, addend, a, signs, encoding, across, known, partials, counters, slot, encoded, summed,
    sizes, split, factors, growth, tolerance, scale, groups, VARIANT: tl.constexpr,
):  # fmt: skip
    """Verify rows of C, encode A, or both; the first programs read C and the others A.

    Args:
        c: Pointer and strides of batch, row and column of C [batch, M, N].
        addend: Those of the addend, which is broadcast to C by strides of zero.
        a: Those of A [batch, M, K].
        signs: int8 [≥ N] and [≥ K].
        encoding: s and z of B, [batch, K].
        across: u and z, [M], by which columns of A are summed.
        known: ``P`` and ``W`` of the rows, [batch, M], if A is not read.
        partials: Sections [parts, batch, M] in fp32 or fp64: of C ``S``, ``E`` (with an addend
            ``F`` and ``G``), of A ``P`` and ``W``, and its signed sums, squares and plain sums;
            then the column sums [chunks, K]. If A is turned: its column sums [parts, K], and behind
            them ``P`` and ``W`` [chunks, M].
        counters: int32, zero before and after: [batch, groups of rows], then one for each tile of
            columns, or for each group of columns if A is turned.
        slot: int32 [1], raised to the bits of the largest ``|D| / T``, a non-negative fp32: NaN for
            a result that finite operands cannot have, INF where that cannot be said.
        encoded: s and z of A as a right operand, [batch, M]; without C each twice, [2, batch, M].
        summed: Column sums of A and of its squares, [K], or s and z of Aᵀ, each twice, [2, K].
        sizes: M, N and K.
        split: Programs and parts of C, steps of a part of C, parts of A and steps of one.
        factors: beta and alpha.
        growth: Ratios g for drifting and for repeating rows, and those for columns.
        tolerance: scale, output, walk, drift and floor.
        scale: Pointer to fp32 factors of the rows of C, or of the columns of a matrix that is
            encoded, and the step from one to the next, which is 0 if all have the same.
        groups: Pointer to the ends of groups of rows or columns of A, int32 [G], and G. Each group
            of rows has its own s and z [G, K] in ``encoding``; rows in no group are not judged.
        VARIANT: What the kernel is compiled for.
    """
    batch = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0) - split[0]  # of those that read A, and negative for the others
    first, last, of_a = 0 * program, 0 * program, partials
    if VARIANT.c_rows > 0:
        of_a += (4 if VARIANT.addend else 2) * split[1] * batch_rows(sizes)
        if program < 0:
            first, last = _sums_of_output(
                c, addend, signs, partials, sizes, split, factors[0], batch, program, VARIANT
            )
    if VARIANT.a_rows > 0 and program >= 0:
        if VARIANT.across:
            first, last = _sums_of_both(
                a, signs, encoding, across, of_a, sizes, split, program, VARIANT
            )
        elif VARIANT.groups > 0:
            first, last = sums_of_groups(
                a, encoding, of_a, sizes, split, groups, batch, program, VARIANT
            )
        else:
            first, last = _sums_of_operand(
                a, signs, encoding, of_a, sizes, split, scale, batch, program, VARIANT
            )
    # All threads have stored their sums before the program is counted.
    tl.debug_barrier()
    blocks = tl.cdiv(sizes[0], GROUP)
    for group in range(first, last):
        counter = counters + batch * blocks + group
        if tl.atomic_add(counter, 1) == _contributions(sizes[0], group, split, VARIANT) - 1:
            _finish_rows(
                known, partials, of_a, slot, encoded, sizes, split, factors[1], growth, tolerance,
                scale, groups, batch, group, c[0].dtype.element_ty, VARIANT,
            )  # fmt: skip
            tl.store(counter, 0)
    if VARIANT.across and program >= 0:
        first, parts = program % split[3], _chunks(split)
        last = first + 1
        if VARIANT.turned:
            first, last = _groups(program // split[3], split[4] * VARIANT.a_rows, sizes[2])
            parts = split[3]
        for group in range(first, last):
            counter = counters + blocks + group
            if tl.atomic_add(counter, 1) == parts - 1:
                _finish_columns(of_a, summed, sizes, split, growth, group, parts, VARIANT)
                tl.store(counter, 0)


@triton.jit
def _chunks(split):
    """Return the number of chunks of a column that is summed."""
    return (tl.num_programs(0) - split[0]) // split[3]


@triton.jit
def _groups(index, extent, length):
    """Return the range of the groups to which one range of rows or columns belongs."""
    first = index * extent
    return first // GROUP, tl.cdiv(first + tl.minimum(extent, length - first), GROUP)


@triton.jit
def _contributions(M, group, split, VARIANT: tl.constexpr):
    """Return the number of programs that write partial sums of a group of rows."""
    rows = tl.minimum(M - group * GROUP, GROUP)
    count = 0 * rows
    if VARIANT.c_rows > 0:
        count += tl.cdiv(rows, VARIANT.c_rows) * split[1]
    if VARIANT.turned:
        count += tl.cdiv(rows, VARIANT.a_columns) * _chunks(split)
    elif VARIANT.across:
        count += split[3]
    elif VARIANT.a_rows > 0:
        count += tl.cdiv(rows, VARIANT.a_rows) * split[3]
    return count


@triton.jit
def _sums_of_output(
    c, addend, signs, partials, sizes, split, beta, batch, program, VARIANT: tl.constexpr
):
    """Compute ``S`` and ``E`` of a tile's rows of C, with an addend also ``F`` and ``G``.

    Like the functions below it returns the range of the groups to which its rows belong.
    """
    dtype: tl.constexpr = partials.dtype.element_ty
    shape: tl.constexpr = (VARIANT.c_rows, VARIANT.c_columns)
    M, N = sizes[0], sizes[1]
    program += split[0]
    part = program % split[1]
    rows = (program // split[1]) * VARIANT.c_rows + tl.arange(0, VARIANT.c_rows)
    signed, energy = tl.zeros(shape, dtype), tl.zeros(shape, dtype)
    rest, added = tl.zeros(shape, dtype), tl.zeros(shape, dtype)
    last = tl.minimum((part + 1) * split[2], tl.cdiv(N, VARIANT.c_columns))
    for step in tl.range(part * split[2], last, num_stages=VARIANT.stages):
        columns = step * VARIANT.c_columns + tl.arange(0, VARIANT.c_columns)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        values = load_tile(c, batch, rows, columns, inside, VARIANT.c_layout).to(dtype)
        energy += values * values
        if VARIANT.addend:
            other = load_tile(addend, batch, rows, columns, inside, VARIANT.d_layout).to(dtype)
            other *= beta.to(dtype)
            added += other * other
            values -= other
            rest += values * values
        signed += values * tl.load(signs + columns, columns < N, other=0).to(dtype)[None, :]
    plane = batch_rows(sizes)
    out = partials + part * plane + batch * M + rows
    plane *= split[1]
    tl.store(out, tl.sum(signed, 1), rows < M)
    tl.store(out + plane, tl.sum(energy, 1), rows < M)
    if VARIANT.addend:
        tl.store(out + 2 * plane, tl.sum(rest, 1), rows < M)
        tl.store(out + 3 * plane, tl.sum(added, 1), rows < M)
    group = (program // split[1]) * VARIANT.c_rows // GROUP
    return group, group + 1


@triton.jit
def _sums_of_operand(
    a, signs, encoding, partials, sizes, split, scale, batch, program, VARIANT: tl.constexpr
):
    """Compute ``P`` and ``W`` of a tile's rows of A, and the sums that encode them."""
    dtype: tl.constexpr = partials.dtype.element_ty
    shape: tl.constexpr = (VARIANT.a_rows, VARIANT.a_columns)
    M, K = sizes[0], sizes[2]
    part = program % split[3]
    rows = (program // split[3]) * VARIANT.a_rows + tl.arange(0, VARIANT.a_rows)
    dots, walks = tl.zeros(shape, dtype), tl.zeros(shape, dtype)
    signed, squares, plain = tl.zeros(shape, dtype), tl.zeros(shape, dtype), tl.zeros(shape, dtype)
    last = tl.minimum((part + 1) * split[4], tl.cdiv(K, VARIANT.a_columns))
    for step in tl.range(part * split[4], last, num_stages=VARIANT.stages):
        columns = step * VARIANT.a_columns + tl.arange(0, VARIANT.a_columns)
        inside = (rows < M)[:, None] & (columns < K)[None, :]
        values = load_tile(a, batch, rows, columns, inside, VARIANT.a_layout).to(dtype)
        if VARIANT.predict:
            known = batch * K + columns
            dots += values * tl.load(encoding[0] + known, columns < K, other=0.0)[None, :]
            spread = tl.load(encoding[1] + known, columns < K, other=0.0)
            walks += values * values * spread[None, :]
        if VARIANT.encode:
            if VARIANT.scaled:
                of_columns = scale[0] + columns.to(tl.int64) * scale[1]
                values *= tl.load(of_columns, columns < K, other=0.0).to(dtype)[None, :]
            sign = tl.load(signs + columns, columns < K, other=0).to(dtype)
            signed += values * sign[None, :]
            squares += values * values
            plain += values
    plane = batch_rows(sizes)
    out = partials + part * plane + batch * M + rows
    plane *= split[3]
    if VARIANT.predict:
        tl.store(out, tl.sum(dots, 1), rows < M)
        tl.store(out + plane, tl.sum(walks, 1), rows < M)
        out += 2 * plane
    if VARIANT.encode:
        tl.store(out, tl.sum(signed, 1), rows < M)
        tl.store(out + plane, tl.sum(squares, 1), rows < M)
        tl.store(out + 2 * plane, tl.sum(plain, 1), rows < M)
    group = (program // split[3]) * VARIANT.a_rows // GROUP
    return group, group + 1


@triton.jit
def _sums_of_both(
    a, signs, encoding, across, partials, sizes, split, program, VARIANT: tl.constexpr
):
    """Compute ``P`` and ``W`` of rows of A within one tile's columns, and sums of these columns.

    To encode A and its transpose, the weights are signs and ones, and values are summed plainly as
    well. Each part of a row is one tile wide; a chunk of a column is ``split[4]`` tiles high. If A
    is turned, its transpose is meant, of which the sums of columns are ``P`` and ``W``.
    """
    dtype: tl.constexpr = partials.dtype.element_ty
    shape: tl.constexpr = (VARIANT.a_rows, VARIANT.a_columns)
    M, K = sizes[0], sizes[2]
    if VARIANT.turned:
        M, K = sizes[2], sizes[0]
    part, chunk = program % split[3], program // split[3]
    columns = part * VARIANT.a_columns + tl.arange(0, VARIANT.a_columns)
    if VARIANT.encode:
        encoded = tl.load(signs + columns, columns < K, other=0).to(dtype)
    else:
        encoded = tl.load(encoding[0] + columns, columns < K, other=0.0)
        spread = tl.load(encoding[1] + columns, columns < K, other=0.0)
    sums, walks, plain = tl.zeros(shape, dtype), tl.zeros(shape, dtype), tl.zeros(shape, dtype)
    plane = split[3].to(tl.int64) * M
    last = tl.minimum((chunk + 1) * split[4], tl.cdiv(M, VARIANT.a_rows))
    for step in tl.range(chunk * split[4], last, num_stages=VARIANT.stages):
        rows = step * VARIANT.a_rows + tl.arange(0, VARIANT.a_rows)
        inside = (rows < M)[:, None] & (columns < K)[None, :]
        values = load_tile(a, 0, rows, columns, inside, VARIANT.a_layout).to(dtype)
        squares = values * values
        out = partials + part.to(tl.int64) * M + rows
        tl.store(out, tl.sum(values * encoded[None, :], 1), rows < M)
        if VARIANT.encode:
            tl.store(out + plane, tl.sum(squares, 1), rows < M)
            tl.store(out + 2 * plane, tl.sum(values, 1), rows < M)
            sums += values * tl.load(signs + rows, rows < M, other=0).to(dtype)[:, None]
            walks += squares
            plain += values
        else:
            tl.store(out + plane, tl.sum(squares * spread[None, :], 1), rows < M)
            sums += values * tl.load(across[0] + rows, rows < M, other=0.0)[:, None]
            walks += squares * tl.load(across[1] + rows, rows < M, other=0.0)[:, None]
    sections: tl.constexpr = 3 if VARIANT.encode else 2
    out = partials + sections * plane + chunk.to(tl.int64) * K + columns
    plane = _chunks(split) * K.to(tl.int64)
    tl.store(out, tl.sum(sums, 0), columns < K)
    tl.store(out + plane, tl.sum(walks, 0), columns < K)
    if VARIANT.encode:
        tl.store(out + 2 * plane, tl.sum(plain, 0), columns < K)
    if VARIANT.turned:
        return _groups(part, VARIANT.a_columns, K)
    return _groups(chunk, split[4] * VARIANT.a_rows, M)


@triton.jit
def _finish_rows(
    known, partials, of_a, slot, encoded, sizes, split, alpha, growth, tolerance, scale, groups,
    batch, group, output: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """Judge a group of rows and complete their encoding."""
    dtype: tl.constexpr = partials.dtype.element_ty
    rows = group * GROUP + tl.arange(0, GROUP)
    exists = rows < sizes[0]
    own = batch * sizes[0] + rows
    plane = batch_rows(sizes)
    section = split[3] * plane
    if VARIANT.encode:
        sums = of_a + 2 * section if VARIANT.predict else of_a
        signed = _total(sums, split[3], plane, own, exists)
        squares = _total(sums + section, split[3], plane, own, exists)
        plain = _total(sums + 2 * section, split[3], plane, own, exists)
        drifting, repeating = growth[0].to(dtype), growth[1].to(dtype)
        spread = spread_of(squares, plain, sizes[2].to(dtype), drifting, repeating, GROUP)
        for copy in tl.static_range(2 if VARIANT.c_rows == 0 else 1):
            tl.store(encoded[0] + copy * plane + own, signed, exists)
            tl.store(encoded[1] + copy * plane + own, spread, exists)
    if VARIANT.c_rows > 0:
        if VARIANT.predict:
            parts = split[3]
            if VARIANT.turned:
                parts = _chunks(split)
                of_a += 2 * split[3] * sizes[2].to(tl.int64)
            dots = _total(of_a, parts, plane, own, exists)
            walks = _total(of_a + parts * plane, parts, plane, own, exists)
        else:
            dots = tl.load(known[0] + own, exists, other=0.0)
            walks = tl.load(known[1] + own, exists, other=0.0)
        section = split[1] * plane
        signed = _total(partials, split[1], plane, own, exists)
        energy = _total(partials + section, split[1], plane, own, exists)
        rest = energy
        factor = alpha.to(dtype)
        if VARIANT.scaled:
            of_rows = scale[0] + rows.to(tl.int64) * scale[1]
            factor *= tl.load(of_rows, exists, other=0.0).to(dtype)
        walk = factor * factor * walks
        if VARIANT.addend:
            rest = _total(partials + 2 * section, split[1], plane, own, exists)
            added = _total(partials + 3 * section, split[1], plane, own, exists)
            exists &= added != float("inf")  # a mask, beside which nothing can be predicted
            walk += 2 * added
        residual = tl.abs(signed - factor * dots)
        bound = rounding_bound(energy, rest, walk, tolerance)
        if VARIANT.groups == OF_ROWS:
            exists &= rows < tl.load(groups[0] + groups[1] - 1)
        # A residual of zero is right even where the threshold is zero.
        ratio = tl.where(residual == 0, 0.0, residual / bound)
        judged = (ratio == ratio) & (bound < float("inf"))
        bits = tl.minimum(ratio, MAX_FP32).to(tl.float32).to(tl.int32, bitcast=True)
        impossible = (tl.abs(factor * dots) < float("inf")) & _holds(walk, sizes, output)
        bits = tl.where(judged, bits, tl.where(impossible, NAN_BITS, INF_BITS))
        tl.atomic_max(slot, tl.max(tl.where(exists, bits, 0), 0), sem="relaxed")


@triton.jit
def _holds(walk, sizes, output: tl.constexpr):
    """Mark rows whose elements and their squares the formats hold, as each is at most √(K W)."""
    sums: tl.constexpr = walk.dtype
    element = 4 * walk * sizes[2].to(sums)
    row = element * sizes[1].to(sums)
    if sums == tl.float64:
        holds = row < MAX_FP64
        if output == tl.float32:
            holds &= element < SQUARE_OF_FP32
    else:
        holds = row < MAX_FP32
    if output == tl.float16:
        holds &= element < SQUARE_OF_FP16
    return holds


@triton.jit
def _finish_columns(of_a, summed, sizes, split, growth, group, parts, VARIANT: tl.constexpr):
    """Add the parts of one tile's or group's columns, and complete their encoding, if any."""
    dtype: tl.constexpr = of_a.dtype.element_ty
    K = sizes[2].to(tl.int64)
    width: tl.constexpr = GROUP if VARIANT.turned else VARIANT.a_columns
    columns = group * width + tl.arange(0, width)
    if not VARIANT.turned:
        of_a += (3 if VARIANT.encode else 2) * split[3] * batch_rows(sizes)
    sums = _total(of_a, parts, K, columns, columns < K)
    walks = _total(of_a + parts * K, parts, K, columns, columns < K)
    if VARIANT.encode:
        plain = _total(of_a + 2 * parts * K, parts, K, columns, columns < K)
        drifting, repeating = growth[2].to(dtype), growth[3].to(dtype)
        count = sizes[0].to(dtype)
        walks = spread_of(walks, plain, count, drifting, repeating, VARIANT.a_columns)
    for copy in tl.static_range(2 if VARIANT.encode else 1):
        tl.store(summed[0] + copy * K + columns, sums, columns < K)
        tl.store(summed[1] + copy * K + columns, walks, columns < K)


@triton.jit
def _total(section, parts, plane, lanes, exists):
    """Add the parts of a section [parts, plane] in a fixed order, PARTS of them at a time.

    They are read past the first-level caches, which may hold what was there before.
    """
    total = tl.zeros((PARTS, lanes.shape[0]), section.dtype.element_ty)
    for first in tl.range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        pointers = section + part[:, None].to(tl.int64) * plane + lanes[None, :]
        inside = (part < parts)[:, None] & exists[None, :]
        total += tl.load(pointers, inside, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)
