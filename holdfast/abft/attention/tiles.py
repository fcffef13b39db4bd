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
NOT_A_NUMBER = tl.constexpr(int(Part.NOT_A_NUMBER))
# What a suspect row raises a slot of the ledger to: the bits of 2.0 and, with NaN, of INF.
SUSPECT_BITS, INFINITE_BITS = tl.constexpr(0x40000000), tl.constexpr(0x7F800000)

AT_SCORES = tl.constexpr(int(Place.SCORES))
AT_PROBABILITIES = tl.constexpr(int(Place.PROBABILITIES))
AT_MAXIMUM = tl.constexpr(int(Place.MAXIMUM))
AT_SUM = tl.constexpr(int(Place.SUM))
AT_ACCUMULATOR = tl.constexpr(int(Place.ACCUMULATOR))
AT_GRAD_PROBABILITIES = tl.constexpr(int(Place.GRAD_PROBABILITIES))
AT_DELTA = tl.constexpr(int(Place.DELTA))
AT_GRAD_VALUE = tl.constexpr(int(Place.GRAD_VALUE))


@triton.jit
def span(starts, batch, head, heads, length, settings: tl.constexpr):
    """Locate the rows of one head of one sequence.

    Returns:
        The first row within the operand, the number of rows, and the place of the first row in
        vectors over the rows of all heads. Packed sequences begin at ``starts.first``; others have
        ``length`` rows.
    """
    if settings.packed:
        first = tl.load(starts.first + batch)
        count = tl.load(starts.first + batch + 1) - first
        return first, count, head.to(tl.int64) * starts.total + first
    return 0, length, (batch * heads + head).to(tl.int64) * length


@triton.jit
def _element(matrix, batch, head, row):
    """Return the address of the first of the values of a tile of rows."""
    s = matrix.strides
    place = batch.to(tl.int64) * s[0] + head.to(tl.int64) * s[1] + row.to(tl.int64) * s[2]
    return matrix.data + place


@triton.jit
def list_length(order, batch, head, row):
    """Return the number of streamed tiles in the list of a tile of rows."""
    return tl.load(_element(order.counts, batch, head, row))


@triton.jit
def listed_tiles(order, batch, head, row, places, last, settings: tl.constexpr):
    """Return the streamed tiles at places of the list of a tile of rows; −1 beyond the list."""
    if settings.mask > 0:
        address = _element(order.tiles, batch, head, row) + places * order.tiles.strides[3]
        return tl.load(address, places < last, other=-1)
    return places


@triton.jit
def listed_group(order, batch, head, row, first, last, settings: tl.constexpr):
    """Return the tiles at GROUP places from ``first`` on, and −1 from place ``last`` on."""
    places = first + tl.arange(0, GROUP)
    tiles = listed_tiles(order, batch, head, row, places, last, settings)
    return tl.where(places < last, tiles, -1)


@triton.jit
def query_tile(sizes, starts, order, settings: tl.constexpr):
    """Locate the tile of queries that this program owns.

    Returns:
        Batch, head, number of the tile, head and index of the keys; the rows; ``span`` of the
        queries and of the keys; the number of tiles of keys; and that of tiles attended to.
    """
    query_tiles = tl.cdiv(sizes.queries, settings.rows)
    index = tl.program_id(0) // query_tiles
    tile = query_tiles - 1 - tl.program_id(0) % query_tiles  # of a causal head the longest first
    batch, head = index // sizes.heads, index % sizes.heads
    kv_heads = sizes.heads // sizes.group
    kv_head = head // sizes.group
    rows = tile * settings.rows + tl.arange(0, settings.rows)
    queries = span(starts.queries, batch, head, sizes.heads, sizes.queries, settings)
    keys = span(starts.keys, batch, kv_head, kv_heads, sizes.keys, settings)
    seen = tl.cdiv(keys[1], settings.stream)
    if settings.causal:
        last = (tile + 1) * settings.rows + causal_shift(queries[1], keys[1], settings)
        seen = tl.minimum(seen, tl.cdiv(tl.maximum(last, 0), settings.stream))
    if settings.mask > 0:
        seen = list_length(order, batch, head, tile)
    seen = tl.where(tile * settings.rows < queries[1], seen, 0)
    tiles = tl.cdiv(sizes.keys, settings.stream)
    kv_index = batch * kv_heads + kv_head
    return batch, head, tile, kv_head, kv_index, rows, queries, keys, tiles, seen


@triton.jit
def causal_shift(queries, keys, settings: tl.constexpr):
    """Return how many keys the first query sees beyond one: packed sequences end together."""
    return keys - queries if settings.packed else 0


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
def load_rows(matrix, batch, head, rows, owner, settings: tl.constexpr):
    """Load rows of one head, [rows, padded width], with zeros outside of ``owner``, their span."""
    pointers = _pointers(matrix, batch, head, owner[0] + rows, settings)
    return tl.load(pointers, _inside(rows, owner[1], settings), other=0.0)


@triton.jit
def load_operand(matrix, batch, head, rows, owner, settings: tl.constexpr):
    """Load rows of one head in the dtype in which they are multiplied."""
    return load_rows(matrix, batch, head, rows, owner, settings).to(settings.operand)


@triton.jit
def store_rows(matrix, values, batch, head, rows, owner, settings: tl.constexpr):
    """Store rows of one head [rows, padded width], rounded to the matrix's dtype."""
    pointers = _pointers(matrix, batch, head, owner[0] + rows, settings)
    rounded = values.to(matrix.data.dtype.element_ty)
    tl.store(pointers, rounded, _inside(rows, owner[1], settings))


@triton.jit
def exponents(
    scores, mask, batch, head, queries, keys, count, key_count, factor, settings: tl.constexpr
):
    """Compute ``log₂ e · (scale · S + mask)``, with −INF where a key is not attended to.

    ``factor`` is ``scale · log₂ e``. Queries and keys are indices of shapes [M, 1] and [1, N], or
    [1, M] and [N, 1] if S is transposed; ``count`` and ``key_count`` are their numbers.
    """
    x = scores * factor
    visible = (queries < count) & (keys < key_count)
    if settings.mask > 0:
        origin = batch.to(tl.int64) * mask.strides[0] + head.to(tl.int64) * mask.strides[1]
        places = queries.to(tl.int64) * mask.strides[2] + keys.to(tl.int64) * mask.strides[3]
        added = tl.load(mask.data + origin + places, visible, other=0)
        if settings.mask == ADDITIVE:
            x += added.to(tl.float32) * LOG2_E
        else:
            visible = visible & (added != 0)
    if settings.causal:
        visible = visible & (keys <= queries + causal_shift(count, key_count, settings))
    return tl.where(visible, x, -float("inf"))


@triton.jit
def predictions(resident, encoding, index, group, tiles, settings: tl.constexpr):
    """Predict the signed row sums of GROUP products ``resident · tileᵀ``, [rows, GROUP].

    The checksums of the tiles are stored in pieces of the operands' dtype, so that matrix units can
    multiply them by ``resident`` as it lies in shared memory.
    """
    lanes = tl.arange(0, settings.padded)
    block = index.to(tl.int64) * tiles + group
    width: tl.constexpr = settings.width
    terms: tl.constexpr = settings.terms
    pieces_ptr = encoding.pieces + block[None, :] * terms * width + lanes[:, None]
    known = group >= 0
    inside = known[None, :] & (lanes[:, None] < width)
    predicted = tl.zeros((resident.shape[0], GROUP), tl.float32)
    unit = tl.load(encoding.tile + block * TILE_VALUES + INVERSE, known, other=0.0)
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
def signed_rows(encoding, owner, rows):
    """Load ``problem.Encoding.rows`` for some rows, with zeros outside of ``owner``, their span."""
    return tl.load((encoding.rows + owner[2]) + rows, rows < owner[1], other=0.0)


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
def nan_rows(now, values):
    """Mark as not a number the suspect rows that hold NaN; INF squared and added is no NaN."""
    energy = tl.sum(values * values, 1)
    return tl.where((now > 0) & (energy != energy), now | NOT_A_NUMBER, now)


@triton.jit
def store_verdict(verdict, places, exists, now, ever):
    """Store the status and failed checks of rows, count them, and raise the ledger's slot."""
    status = status_of(now, ever)
    tl.store(verdict.status + places, status, exists)
    tl.store(verdict.parts + places, ever, exists)
    if tl.max(ever, 0) > 0:
        count_rows(verdict.counts, ever > 0, status)
        if verdict.slot is not None:
            bits = tl.where((now & NOT_A_NUMBER) > 0, INFINITE_BITS, SUSPECT_BITS)
            tl.atomic_max(verdict.slot, tl.max(tl.where(now > 0, bits, 0), 0))


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
