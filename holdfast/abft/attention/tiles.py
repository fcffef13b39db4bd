"""Triton building blocks of the attention kernels: tiles, masks, checks, faults of tests."""

import triton
import triton.language as tl

from holdfast.abft.attention.problem import FAULT_NUMBERS, Mask, Part, Place
from holdfast.abft.triton.rows import count_rows, exceeds, status_of

GROUP = tl.constexpr(16)  # tiles whose signed sums are predicted at once, by one small product
FAULT = tl.constexpr(FAULT_NUMBERS)
ADDITIVE = tl.constexpr(int(Mask.ADDITIVE))
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(2.0**-126)  # what a square may lose by underflow
PIECE_STEP = tl.constexpr(2.0**11)  # from one piece of a checksum to the next
# Positions in ``problem.Encoding.tile``.
INVERSE, SPREAD, TOP, MEAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TILE_VALUES = tl.constexpr(4)

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
def _pointers(matrix, batch, head, rows, settings: tl.constexpr):
    """Addresses of the rows of one head, [rows, padded width]."""
    lanes = tl.arange(0, settings.padded)
    origin = batch.to(tl.int64) * matrix.strides[0] + head.to(tl.int64) * matrix.strides[1]
    places = rows[:, None].to(tl.int64) * matrix.strides[2] + lanes[None, :] * matrix.strides[3]
    return matrix.data + origin + places


@triton.jit
def _inside(rows, length, settings: tl.constexpr):
    """Mask of the elements that the matrix has."""
    lanes = tl.arange(0, settings.padded)
    return (rows[:, None] < length) & (lanes[None, :] < settings.width)


@triton.jit
def load_rows(matrix, batch, head, rows, length, settings: tl.constexpr):
    """Load rows of one head, [rows, padded width]; zeros outside."""
    pointers = _pointers(matrix, batch, head, rows, settings)
    return tl.load(pointers, _inside(rows, length, settings), other=0.0)


@triton.jit
def load_operand(matrix, batch, head, rows, length, settings: tl.constexpr):
    """Load rows in the dtype that the matrix units multiply."""
    return load_rows(matrix, batch, head, rows, length, settings).to(settings.operand)


@triton.jit
def store_rows(matrix, values, batch, head, rows, length, settings: tl.constexpr):
    """Store what ``load_rows`` reads, rounded to the tensor's dtype."""
    pointers = _pointers(matrix, batch, head, rows, settings)
    rounded = values.to(matrix.data.dtype.element_ty)
    tl.store(pointers, rounded, _inside(rows, length, settings))


@triton.jit
def exponents(scores, mask, batch, head, queries, keys, sizes, factor, settings: tl.constexpr):
    """Compute ``log₂ e · (scale · S + mask)``, −INF where nothing is attended to.

    Queries and keys are indices of shapes [M, 1] and [1, N], or transposed as S is.
    """
    x = scores * factor
    visible = (queries < sizes.queries) & (keys < sizes.keys)
    if settings.mask > 0:
        origin = batch.to(tl.int64) * mask.strides[0] + head.to(tl.int64) * mask.strides[1]
        places = queries.to(tl.int64) * mask.strides[2] + keys.to(tl.int64) * mask.strides[3]
        added = tl.load(mask.data + origin + places, visible, other=0)
        if settings.mask == ADDITIVE:
            x += added.to(tl.float32) * LOG2_E
        else:
            visible = visible & (added != 0)
    if settings.causal:
        visible = visible & (keys <= queries)
    return tl.where(visible, x, -float("inf"))


@triton.jit
def predictions(resident, encoding, index, first, tiles, settings: tl.constexpr):
    """Predict what the rows of GROUP products ``resident · tileᵀ`` sum to, [rows, GROUP].

    The checksums come in pieces of the operands' dtype, so that the matrix units multiply them by
    what is in shared memory already.
    """
    lanes = tl.arange(0, settings.padded)
    group = first + tl.arange(0, GROUP)
    block = index.to(tl.int64) * tiles + group
    width: tl.constexpr = settings.width
    terms: tl.constexpr = settings.terms
    pieces_ptr = encoding.pieces + block[None, :] * terms * width + lanes[:, None]
    inside = (group[None, :] < tiles) & (lanes[:, None] < width)
    predicted = tl.zeros((resident.shape[0], GROUP), tl.float32)
    unit = tl.load(encoding.tile + block * TILE_VALUES + INVERSE, group < tiles, other=0.0)
    for term in tl.static_range(terms):
        piece = tl.load(pieces_ptr + term * width, inside, other=0.0).to(resident.dtype)
        part = tl.dot(resident, piece, input_precision=settings.prediction)
        predicted += part * unit[None, :]
        unit = unit / PIECE_STEP
    return predicted


@triton.jit
def of_tile(encoding, index, tiles, tile, WHICH: tl.constexpr):
    """Load a value of ``Encoding.tile``."""
    block = index.to(tl.int64) * tiles + tile
    return tl.load(encoding.tile + block * TILE_VALUES + WHICH)


@triton.jit
def signed_rows(encoding, index, length, rows):
    """Load ``Encoding.rows``; zeros outside."""
    return tl.load(encoding.rows + index.to(tl.int64) * length + rows, rows < length, other=0.0)


@triton.jit
def signs_at(signs_ptr, places, length):
    """Load the signs r; zeros outside."""
    return tl.load(signs_ptr + places, places < length, other=0).to(tl.float32)


@triton.jit
def square_length(rows):
    """Compute ``Σ_k x_ik²`` in fp32."""
    values = rows.to(tl.float32)
    return tl.sum(values * values, 1)


@triton.jit
def tile_suspect(product, signs, predicted, column, walk, tolerance):
    """Compare the signed sum of each row of a tile; column is the tile's in its group."""
    mine = tl.arange(0, GROUP)[None, :] == column
    return row_suspect(
        product, signs, tl.sum(tl.where(mine, predicted, 0.0), 1), walk, 0, tolerance
    )


@triton.jit
def row_suspect(values, signs, predicted, walk, drifted, tolerance):
    """Compare the signed sums of the rows of a product ``A B`` with what was predicted.

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
def most(values):
    """Find each row's largest element by its bits: NaN and negative ones are above all."""
    return tl.max(values.to(tl.uint32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def store_verdict(verdict, places, exists, now, ever):
    """Store status and failed checks of rows; count those that were suspect, or corrected."""
    status = status_of(now, ever)
    tl.store(verdict.status + places, status, exists)
    tl.store(verdict.parts + places, ever, exists)
    if tl.max(ever, 0) > 0:
        count_rows(verdict.counts, ever > 0, status)


@triton.jit
def inject(values, faults, PLACE: tl.constexpr, tile, rows, columns, settings: tl.constexpr):
    """Replace elements of a tile or an accumulator, for tests; ``problem.Place``.

    ``faults`` is (pointer, matrix, attempt).
    """
    count: tl.constexpr = settings.faults
    for number in tl.static_range(count):
        fault = faults[0] + FAULT * number
        hit = _here(fault, PLACE, faults[1], tile, faults[2])
        row, column = tl.load(fault + 3).to(tl.int32), tl.load(fault + 4).to(tl.int32)
        there = (rows[:, None] == row) & (columns[None, :] == column) & hit
        values = tl.where(there, tl.load(fault + 5), values)
    return values


@triton.jit
def inject_rows(values, faults, PLACE: tl.constexpr, tile, rows, settings: tl.constexpr):
    """Replace elements of a vector over rows."""
    count: tl.constexpr = settings.faults
    for number in tl.static_range(count):
        fault = faults[0] + FAULT * number
        hit = _here(fault, PLACE, faults[1], tile, faults[2])
        there = (rows == tl.load(fault + 3).to(tl.int32)) & hit
        values = tl.where(there, tl.load(fault + 5), values)
    return values


@triton.jit
def _here(fault, PLACE: tl.constexpr, index, tile, attempt):
    place = tl.load(fault).to(tl.int32) == PLACE
    matrix = tl.load(fault + 1).to(tl.int32) == index
    streamed = tl.load(fault + 2).to(tl.int32) == tile
    return place & matrix & streamed & (attempt < tl.load(fault + 6).to(tl.int32))
