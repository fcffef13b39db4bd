"""Triton building blocks of the attention kernels: tiles, masks, checks and injected faults."""

import triton
import triton.language as tl

from holdfast.abft.attention.problem import FAULT_NUMBERS, Mask, Part, Place
from holdfast.abft.triton.rows import count_rows, exceeds, status_of

GROUP = tl.constexpr(16)  # tiles whose signed sums are predicted together, by one small product
FAULT = tl.constexpr(FAULT_NUMBERS)
ADDITIVE = tl.constexpr(int(Mask.ADDITIVE))
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(2.0**-126)  # largest error of a square that underflows
PIECE_STEP = tl.constexpr(2.0**11)  # ratio of one piece of a checksum to the next
# Indices of the values in ``problem.Encoding.tile``.
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
def query_tile(sizes, settings: tl.constexpr):
    """Locate the tile of queries that this program owns.

    Returns:
        Index, batch and head of the queries, head and index of the keys, the rows and their places
        in a tensor over all queries, the number of tiles of keys, and that of tiles attended to.
    """
    query_tiles = tl.cdiv(sizes.queries, settings.rows)
    index = tl.program_id(0) // query_tiles
    tile = query_tiles - 1 - tl.program_id(0) % query_tiles  # of a causal head the longest first
    batch, head = index // sizes.heads, index % sizes.heads
    kv_head = head // sizes.group
    kv_index = batch * (sizes.heads // sizes.group) + kv_head
    rows = tile * settings.rows + tl.arange(0, settings.rows)
    tiles = tl.cdiv(sizes.keys, settings.stream)
    seen = tiles
    if settings.causal:
        seen = tl.minimum(tiles, tl.cdiv((tile + 1) * settings.rows, settings.stream))
    places = index.to(tl.int64) * sizes.queries + rows
    return index, batch, head, kv_head, kv_index, rows, places, tiles, seen


@triton.jit
def _pointers(matrix, batch, head, rows, settings: tl.constexpr):
    """Return the addresses of rows of one head, [rows, padded width]."""
    lanes = tl.arange(0, settings.padded)
    origin = batch.to(tl.int64) * matrix.strides[0] + head.to(tl.int64) * matrix.strides[1]
    places = rows[:, None].to(tl.int64) * matrix.strides[2] + lanes[None, :] * matrix.strides[3]
    return matrix.data + origin + places


@triton.jit
def _inside(rows, length, settings: tl.constexpr):
    """Mark the elements [rows, padded width] that lie within the matrix."""
    lanes = tl.arange(0, settings.padded)
    return (rows[:, None] < length) & (lanes[None, :] < settings.width)


@triton.jit
def load_rows(matrix, batch, head, rows, length, settings: tl.constexpr):
    """Load rows of one head, [rows, padded width], with zeros outside of the matrix."""
    pointers = _pointers(matrix, batch, head, rows, settings)
    return tl.load(pointers, _inside(rows, length, settings), other=0.0)


@triton.jit
def load_operand(matrix, batch, head, rows, length, settings: tl.constexpr):
    """Load rows of one head in the dtype in which they are multiplied."""
    return load_rows(matrix, batch, head, rows, length, settings).to(settings.operand)


@triton.jit
def store_rows(matrix, values, batch, head, rows, length, settings: tl.constexpr):
    """Store rows of one head [rows, padded width], rounded to the matrix's dtype."""
    pointers = _pointers(matrix, batch, head, rows, settings)
    rounded = values.to(matrix.data.dtype.element_ty)
    tl.store(pointers, rounded, _inside(rows, length, settings))


@triton.jit
def exponents(scores, mask, batch, head, queries, keys, sizes, factor, settings: tl.constexpr):
    """Compute ``log₂ e · (scale · S + mask)``, with −INF where a key is not attended to.

    ``factor`` is ``scale · log₂ e``. Queries and keys are indices of shapes [M, 1] and [1, N], or
    [1, M] and [N, 1] if S is transposed.
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
    """Predict the signed row sums of GROUP products ``resident · tileᵀ``, [rows, GROUP].

    The checksums of the tiles are stored in pieces of the operands' dtype, so that matrix units can
    multiply them by ``resident`` as it lies in shared memory.
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
    """Load one of the four values of a tile in ``problem.Encoding.tile``."""
    block = index.to(tl.int64) * tiles + tile
    return tl.load(encoding.tile + block * TILE_VALUES + WHICH)


@triton.jit
def signed_rows(encoding, index, length, rows):
    """Load ``problem.Encoding.rows`` for some rows, with zeros outside of the matrix."""
    return tl.load(encoding.rows + index.to(tl.int64) * length + rows, rows < length, other=0.0)


@triton.jit
def signs_at(signs_ptr, places, length):
    """Load the random signs r of some rows or columns, with zeros from ``length`` on."""
    return tl.load(signs_ptr + places, places < length, other=0).to(tl.float32)


@triton.jit
def square_length(rows):
    """Compute ``Σ_k x_ik²`` of each row in fp32."""
    values = rows.to(tl.float32)
    return tl.sum(values * values, 1)


@triton.jit
def tile_suspect(product, signs, predicted, column, walk, tolerance):
    """Mark the rows of a tile that fail their check; the tile is number ``column`` of its group."""
    mine = tl.arange(0, GROUP)[None, :] == column
    return row_suspect(
        product, signs, tl.sum(tl.where(mine, predicted, 0.0), 1), walk, 0, tolerance
    )


@triton.jit
def row_suspect(values, signs, predicted, walk, drifted, tolerance):
    """Mark the rows of a product ``A B`` whose signed sums differ from the predicted ones.

    ``walk ≥ Σ_k a_ik² z_k``, and ``drifted`` is the square of the largest drift of partial sums
    that need not have left a trace in the result. Unlike ``rounding_bound`` this adds the drift's
    share of the whole energy, because ``walk`` may be larger than the sum that it bounds.
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
    """Find the largest element of each row by its bits, so that NaN and negative values win."""
    return tl.max(values.to(tl.uint32, bitcast=True), 1).to(tl.float32, bitcast=True)


@triton.jit
def store_verdict(verdict, places, exists, now, ever):
    """Store the status and failed checks of rows, and count suspect and corrected rows."""
    status = status_of(now, ever)
    tl.store(verdict.status + places, status, exists)
    tl.store(verdict.parts + places, ever, exists)
    if tl.max(ever, 0) > 0:
        count_rows(verdict.counts, ever > 0, status)


@triton.jit
def inject(values, faults, PLACE: tl.constexpr, tile, rows, columns, settings: tl.constexpr):
    """Inject faults into a tile or an accumulator; ``problem.Place`` describes them.

    ``faults`` is (pointer to all faults, index of the matrix, number of the attempt).
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
    """Inject faults into a vector over rows."""
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
