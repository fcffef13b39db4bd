"""Triton building blocks of the attention kernels: tiles, masks, checks, faults of tests."""

import triton
import triton.language as tl

from holdfast.abft.attention.triton_types import Part, Place
from holdfast.abft.gemm.triton_rows import CLEAN, CORRECTED, SUSPECT, exceeds

GROUP = tl.constexpr(16)  # tiles whose signed sums are predicted at once, by one small product
FAULT = tl.constexpr(7)  # numbers that describe a fault
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(2.0**-126)  # what a square may lose by underflow
PIECE_STEP = tl.constexpr(2.0**11)  # from one piece of a checksum to the next
# What an encoding says of a tile: ``triton_types.Encoding``.
INVERSE, SPREAD, TOP, MEAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TILE_VALUES = tl.constexpr(4)
NO_MASK, ADDITIVE, BOOLEAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

SCORES = tl.constexpr(int(Part.SCORES))
PROBABILITIES = tl.constexpr(int(Part.PROBABILITIES))
STATE = tl.constexpr(int(Part.STATE))
GRAD_PROBABILITIES = tl.constexpr(int(Part.GRAD_PROBABILITIES))
OUTPUT = tl.constexpr(int(Part.OUTPUT))
GRAD_VALUE = tl.constexpr(int(Part.GRAD_VALUE))

AT_SCORES = tl.constexpr(int(Place.SCORES))
AT_PROBABILITIES = tl.constexpr(int(Place.PROBABILITIES))
AT_MAXIMUM = tl.constexpr(int(Place.MAXIMUM))
AT_SUM = tl.constexpr(int(Place.SUM))
AT_ACCUMULATOR = tl.constexpr(int(Place.ACCUMULATOR))
AT_GRAD_PROBABILITIES = tl.constexpr(int(Place.GRAD_PROBABILITIES))
AT_DELTA = tl.constexpr(int(Place.DELTA))
AT_GRAD_VALUE = tl.constexpr(int(Place.GRAD_VALUE))


@triton.jit
def load_rows(matrix, batch, head, rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head, [rows, BLOCK_D]; zeros outside."""
    lanes = tl.arange(0, BLOCK_D)
    origin = batch.to(tl.int64) * matrix.batch + head.to(tl.int64) * matrix.head
    places = rows[:, None].to(tl.int64) * matrix.row + lanes[None, :] * matrix.column
    inside = (rows[:, None] < length) & (lanes[None, :] < D)
    return tl.load(matrix.data + origin + places, inside, other=0.0)


@triton.jit
def store_rows(matrix, values, batch, head, rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of ``load_rows``, rounded to the tensor's dtype."""
    lanes = tl.arange(0, BLOCK_D)
    origin = batch.to(tl.int64) * matrix.batch + head.to(tl.int64) * matrix.head
    places = rows[:, None].to(tl.int64) * matrix.row + lanes[None, :] * matrix.column
    inside = (rows[:, None] < length) & (lanes[None, :] < D)
    tl.store(matrix.data + origin + places, values.to(matrix.data.dtype.element_ty), inside)


@triton.jit
def exponents(
    scores, mask, batch, head, queries, keys, Lq, Lk, factor, CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """``log₂ e · (scale · S + mask)``, −INF where nothing is attended to.

    Queries and keys are indices of shapes [M, 1] and [1, N], or transposed as S is.
    """
    x = scores * factor
    visible = (queries < Lq) & (keys < Lk)
    if MASK > 0:
        origin = batch.to(tl.int64) * mask.batch + head.to(tl.int64) * mask.head
        places = queries.to(tl.int64) * mask.row + keys.to(tl.int64) * mask.column
        added = tl.load(mask.data + origin + places, visible, other=0)
        if MASK == ADDITIVE:
            x += added.to(tl.float32) * LOG2_E
        else:
            visible = visible & (added != 0)
    if CAUSAL:
        visible = visible & (keys <= queries)
    return tl.where(visible, x, -float("inf"))


@triton.jit
def predictions(
    resident, encoding, index, first, tiles, TERMS: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the rows of GROUP products ``resident · tileᵀ`` sum to, [rows, GROUP].

    The checksums come in pieces of the operands' dtype, so that the matrix units multiply them by
    what is in shared memory already.
    """
    lanes = tl.arange(0, BLOCK_D)
    group = first + tl.arange(0, GROUP)
    block = index.to(tl.int64) * tiles + group
    pieces_ptr = encoding.pieces + block[None, :] * TERMS * D + lanes[:, None]
    inside = (group[None, :] < tiles) & (lanes[:, None] < D)
    predicted = tl.zeros((resident.shape[0], GROUP), tl.float32)
    unit = tl.load(encoding.tile + block * TILE_VALUES + INVERSE, group < tiles, other=0.0)
    for term in tl.static_range(TERMS):
        piece = tl.load(pieces_ptr + term * D, inside, other=0.0).to(resident.dtype)
        part = tl.dot(resident, piece, input_precision=PRECISION)
        predicted += part * unit[None, :]
        unit = unit / PIECE_STEP
    return predicted


@triton.jit
def of_tile(encoding, index, tiles, tile, WHICH: tl.constexpr):
    """A value of ``Encoding.tile``."""
    block = index.to(tl.int64) * tiles + tile
    return tl.load(encoding.tile + block * TILE_VALUES + WHICH)


@triton.jit
def signed_rows(encoding, index, length, rows):
    """``Encoding.rows``; zeros outside."""
    return tl.load(encoding.rows + index.to(tl.int64) * length + rows, rows < length, other=0.0)


@triton.jit
def signs_at(signs_ptr, places, length):
    """The signs r; zeros outside."""
    return tl.load(signs_ptr + places, places < length, other=0).to(tl.float32)


@triton.jit
def square_length(rows):
    """``Σ_k x_ik²`` in fp32."""
    values = rows.to(tl.float32)
    return tl.sum(values * values, 1)


@triton.jit
def tile_suspect(product, signs, predicted, column, walk, tolerance):
    """Whether the signed sum of each row of a tile is off; column is the tile's in its group."""
    mine = tl.arange(0, GROUP)[None, :] == column
    return row_suspect(
        product, signs, tl.sum(tl.where(mine, predicted, 0.0), 1), walk, 0, tolerance
    )


@triton.jit
def row_suspect(values, signs, predicted, walk, drifted, tolerance):
    """Whether the signed sums of the rows of a product ``A B`` are off what was predicted.

    ``walk ≥ Σ_k a_ik² z_k``, and ``drifted`` is the square of the largest drift of partial sums
    that need not have left a trace in the result. Unlike ``rounding_bound`` this lets the whole of
    the energy drift: it stays a bound where the walk is one and not exact.
    """
    residual = tl.sum(values * signs[None, :], 1) - predicted
    energy = tl.sum(values * values, 1) + values.shape[1] * LEAST
    # In units of the walk's tolerance, whose square times a small energy would underflow.
    output, drift = tolerance.output / tolerance.walk, tolerance.drift / tolerance.walk
    squared = walk + output * output * energy + drift * drift * (energy + drifted)
    bound = tolerance.scale * tolerance.walk * tl.sqrt(squared) + tolerance.floor
    return exceeds(residual, bound)


@triton.jit
def carry(sums, weights, signed):
    """Adds a tile of the left operand to what is known of an accumulator's rows.

    Sums are (Σ_k a_ik (B r)_k, Σ_k a_ik², Σ_k a_ik, the largest magnitude of the last so far).
    """
    carried, squares, drift, swing = sums
    a = weights.to(tl.float32)
    carried += tl.sum(a * signed[None, :], 1)
    squares += tl.sum(a * a, 1) + a.shape[1] * LEAST
    drift += tl.sum(a, 1)
    return carried, squares, drift, tl.maximum(swing, tl.abs(drift))


@triton.jit
def unit_slack(reach):
    """How far from 1 a sum of probabilities may be whose scores and logarithm reach so far.

    A sum is right to 2⁻¹², and to what rounding of the exponents explains.
    """
    return 2.0**-12 + 2.0**-18 * (1 + reach)


@triton.jit
def most(values):
    """The largest element of each row by its bits: NaN and negative ones are above all others."""
    return tl.max(values.to(tl.uint32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def store_verdict(status_ptr, parts_ptr, counts_ptr, places, exists, now, ever):
    """Status and failed checks of rows; counts those that were suspect, and those corrected."""
    status = tl.where(now > 0, SUSPECT, tl.where(ever > 0, CORRECTED, CLEAN))
    tl.store(status_ptr + places, status, exists)
    tl.store(parts_ptr + places, ever, exists)
    if tl.max(ever, 0) > 0:
        tl.atomic_add(counts_ptr, tl.sum((ever > 0).to(tl.int32), 0))
        tl.atomic_add(counts_ptr + 1, tl.sum((status == CORRECTED).to(tl.int32), 0))


@triton.jit
def inject(
    values, faults_ptr, PLACE: tl.constexpr, index, tile, rows, columns, attempt,
    FAULTS: tl.constexpr,
):  # fmt: skip
    """Replace elements of a tile or an accumulator, for tests; ``triton_types.Place``."""
    for number in range(FAULTS):
        fault = faults_ptr + FAULT * number
        hit = _here(fault, PLACE, index, tile, attempt)
        row, column = tl.load(fault + 3).to(tl.int32), tl.load(fault + 4).to(tl.int32)
        there = (rows[:, None] == row) & (columns[None, :] == column) & hit
        values = tl.where(there, tl.load(fault + 5), values)
    return values


@triton.jit
def inject_rows(
    values, faults_ptr, PLACE: tl.constexpr, index, tile, rows, attempt, FAULTS: tl.constexpr
):
    """Replace elements of a vector over rows."""
    for number in range(FAULTS):
        fault = faults_ptr + FAULT * number
        hit = _here(fault, PLACE, index, tile, attempt)
        there = (rows == tl.load(fault + 3).to(tl.int32)) & hit
        values = tl.where(there, tl.load(fault + 5), values)
    return values


@triton.jit
def _here(fault, PLACE: tl.constexpr, index, tile, attempt):
    place = tl.load(fault).to(tl.int32) == PLACE
    matrix = tl.load(fault + 1).to(tl.int32) == index
    streamed = tl.load(fault + 2).to(tl.int32) == tile
    return place & matrix & streamed & (attempt < tl.load(fault + 6).to(tl.int32))
