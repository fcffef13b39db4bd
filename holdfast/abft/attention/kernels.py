"""Triton attention, forward: encoding of a matrix, and the loop over the tiles of keys.

A program owns a tile of queries and checks it while it streams through the keys. If any row of it
fails a check, the whole tile is computed once more by the same instructions, and this result is
stored.

The checksums of K and V are computed by a kernel of their own, so that in the loop only the matrix
units read the tiles of K and V: for a block that both a matrix unit and other code read, Triton
allocates one buffer too few (triton issue 6691).
"""

import triton
import triton.language as tl

from holdfast.abft.attention.tiles import (
    AT_ACCUMULATOR,
    AT_MAXIMUM,
    AT_PROBABILITIES,
    AT_SCORES,
    AT_SUM,
    GROUP,
    INVERSE,
    LOG2_E,
    MEAN,
    OUTPUT,
    PIECE_STEP,
    PROBABILITIES,
    SCORES,
    SPREAD,
    STATE,
    TILE_VALUES,
    TOP,
    exponents,
    inject,
    inject_rows,
    listed_group,
    listed_tiles,
    load_operand,
    load_rows,
    most,
    nan_rows,
    of_tile,
    predictions,
    query_tile,
    row_suspect,
    signed_rows,
    signs_at,
    span,
    square_length,
    store_rows,
    store_verdict,
    tile_suspect,
)
from holdfast.abft.triton.rows import spread_of


@triton.jit
def attention_encode_kernel(
    matrix, signs_ptr, encoding, heads, length, starts, drifting, repeating,
    settings: tl.constexpr,
):  # fmt: skip
    """Encode one tile of ``settings.stream`` rows as ``problem.Encoding`` describes."""
    stream: tl.constexpr = settings.stream
    width: tl.constexpr = settings.width
    tiles = tl.cdiv(length, stream)
    tile = tl.program_id(0) % tiles
    index = tl.program_id(0) // tiles
    rows = tile * stream + tl.arange(0, stream)
    lanes = tl.arange(0, settings.padded)
    owner = span(starts, index // heads, index % heads, heads, length, settings)
    x = load_rows(matrix, index // heads, index % heads, rows, owner, settings).to(tl.float32)
    of_rows = signs_at(signs_ptr, rows, owner[1])
    of_lanes = signs_at(signs_ptr, lanes, width)
    count = tl.maximum(tl.minimum(owner[1], (tile + 1) * stream) - tile * stream, 1)
    count = count.to(tl.float32)
    block = index.to(tl.int64) * tiles + tile

    signed = tl.sum(x * of_rows[:, None], 0)
    pieces_ptr = encoding.pieces + block * settings.terms * width
    inverse = _store_pieces(pieces_ptr, signed, lanes, settings)
    along = tl.sum(x * of_lanes[None, :], 1)
    tl.store(encoding.rows + owner[2] + rows, along, rows < owner[1])

    squares, plain = x * x, tl.sum(x, 0)
    spread = spread_of(tl.sum(squares, 0), plain, count, drifting, repeating, settings.padded)
    mean = plain / count
    of_block = encoding.tile + block * TILE_VALUES
    tl.store(of_block + INVERSE, inverse)
    tl.store(of_block + SPREAD, tl.max(spread, 0))
    tl.store(of_block + TOP, tl.max(tl.sum(squares, 1), 0))
    tl.store(of_block + MEAN, tl.sum(mean * mean, 0))


@triton.jit
def _store_pieces(pieces_ptr, values, lanes, settings: tl.constexpr):
    """Store values as pieces (see ``problem.Encoding``); return the reciprocal of their scale."""
    dtype = pieces_ptr.dtype.element_ty
    terms: tl.constexpr = settings.terms
    inverse = 1.0
    rest = values
    if terms > 1:
        exponent = tl.max(tl.abs(values).to(tl.int32, bitcast=True) >> 23, 0)
        exponent = tl.minimum(tl.maximum(exponent, 2), 252)
        inverse = (exponent << 23).to(tl.float32, bitcast=True)
        rest = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for term in tl.static_range(terms):
        piece = rest.to(dtype)
        tl.store(pieces_ptr + term * settings.width + lanes, piece, lanes < settings.width)
        rest = (rest - piece.to(tl.float32)) * PIECE_STEP
    return inverse


@triton.jit
def attention_forward_kernel(
    operands, out, lse_ptr, checks, faults_ptr, sizes, starts, order, factor, one, tolerances,
    settings: tl.constexpr,
):  # fmt: skip
    """Compute output and logarithm of a tile of queries; ``factor`` is ``scale · log₂ e``.

    Running maximum and sum are computed twice and compared. ``one`` is 1, which the compiler does
    not know, so that it cannot merge the two computations.
    """
    block_rows: tl.constexpr = settings.rows
    stream: tl.constexpr = settings.stream
    padded: tl.constexpr = settings.padded
    batch, head, row_tile, kv_head, kv_index, rows, owner, keys, tiles, seen = query_tile(
        sizes, starts, order, settings
    )
    lanes = tl.arange(0, padded)
    inside, places = rows < owner[1], owner[2] + rows
    step = GROUP if settings.verify else tl.maximum(seen, 1)
    ever = tl.zeros((block_rows,), tl.int32)
    now = tl.zeros((block_rows,), tl.int32)
    attempt = 0
    while attempt < settings.attempts:
        faults = (faults_ptr, batch * sizes.heads + head, attempt)
        query = load_operand(operands.q, batch, head, rows, owner, settings)
        acc = tl.zeros((block_rows, padded), tl.float32)
        maximum = tl.full((block_rows,), -float("inf"), tl.float32)
        maximum_copy = tl.full((block_rows,), -float("inf"), tl.float32)
        total = tl.zeros((block_rows,), tl.float32)
        total_copy = tl.zeros((block_rows,), tl.float32)
        carried = tl.zeros((block_rows,), tl.float32)
        length = square_length(query) if settings.verify else total
        largest = 0.0
        now = tl.zeros((block_rows,), tl.int32)
        for first in range(0, seen, step):
            if settings.verify:
                group = listed_group(order, batch, head, row_tile, first, seen, settings)
                predicted = predictions(query, checks.first, kv_index, group, tiles, settings)
            for place in range(first, tl.minimum(first + step, seen)):
                tile = listed_tiles(order, batch, head, row_tile, place, seen, settings)
                columns = tile * stream + tl.arange(0, stream)
                key = load_operand(operands.k, batch, kv_head, columns, keys, settings)
                scores = tl.dot(query, tl.trans(key), input_precision=settings.precision)
                scores = inject(scores, faults, AT_SCORES, tile, rows, columns, settings)
                if settings.verify:
                    walk = length * of_tile(checks.first, kv_index, tiles, tile, SPREAD)
                    off = tile_suspect(
                        scores, signs_at(checks.signs, columns, keys[1]), predicted,
                        place - first, walk, tolerances.tile,
                    )  # fmt: skip
                    now |= tl.where(off, SCORES, 0)
                x = exponents(
                    scores, operands.mask, batch, head, rows[:, None], columns[None, :],
                    owner[1], keys[1], factor, settings,
                )  # fmt: skip
                top = tl.max(x, 1)
                above = tl.maximum(maximum, top)
                base = tl.where(above == -float("inf"), 0.0, above)
                rescale = tl.exp2(maximum - base)
                p = tl.exp2(x - base[:, None])
                p = inject(p, faults, AT_PROBABILITIES, tile, rows, columns, settings)
                weights = p.to(settings.operand)
                if settings.verify:
                    greatest, slack = most(p), tolerances.exponential * (2 + tl.abs(base))
                    attained = (top < above) | (top == -float("inf")) | (greatest >= 1 - slack)
                    sound = (greatest >= 0) & (greatest <= 1 + slack) & attained
                    now |= tl.where(sound, 0, PROBABILITIES)
                    above_copy = tl.maximum(maximum_copy, top)
                    base_copy = tl.where(above_copy == -float("inf"), 0.0, above_copy)
                    rescale_copy = tl.exp2(maximum_copy - base_copy)
                    falls = (rescale_copy >= 0) & (rescale_copy <= 1 + slack)
                    now |= tl.where(falls, 0, STATE)
                    maximum_copy = above_copy
                    total_copy = total_copy * rescale_copy + tl.sum(p * one, 1)
                    signed = signed_rows(checks.second, keys, columns)
                    carried = carried * rescale_copy
                    carried += tl.sum(weights.to(tl.float32) * signed[None, :], 1)
                    largest = tl.maximum(
                        largest, of_tile(checks.second, kv_index, tiles, tile, TOP)
                    )
                maximum = above
                total = total * rescale + tl.sum(p, 1)
                value = load_operand(operands.v, batch, kv_head, columns, keys, settings)
                acc = acc * rescale[:, None]
                acc = tl.dot(weights, value, acc, input_precision=settings.precision)
                acc = inject(acc, faults, AT_ACCUMULATOR, tile, rows, lanes, settings)
                maximum = inject_rows(maximum, faults, AT_MAXIMUM, tile, rows, settings)
                total = inject_rows(total, faults, AT_SUM, tile, rows, settings)
        empty = total == 0
        share = 1 / tl.where(empty, 1.0, total)
        acc = acc * share[:, None]
        if settings.verify:
            most_keys = sizes.keys * (1 + tolerances.state)
            bounded = (total >= 1 - tolerances.state) & (total <= most_keys)
            finite = tl.abs(maximum) < float("inf")
            nothing = empty & (maximum == -float("inf"))
            agrees = tl.abs(total - total_copy) <= tolerances.state * total_copy
            agrees &= maximum == maximum_copy
            sound = agrees & (nothing | (bounded & finite))
            now |= tl.where(sound, 0, STATE)
            share_copy = 1 / tl.where(total_copy == 0, 1.0, total_copy)
            off = row_suspect(
                acc, signs_at(checks.signs, lanes, settings.width), carried * share_copy,
                largest * share_copy, 0, tolerances.total,
            )  # fmt: skip
            now |= tl.where(off, OUTPUT, 0)
            now = tl.where(inside, nan_rows(now, acc), 0)
            ever |= now
        store_rows(out, acc, batch, head, rows, owner, settings)
        logarithm = maximum / LOG2_E + tl.log(tl.where(empty, 1.0, total))
        tl.store(lse_ptr + places, tl.where(empty, 0.0, logarithm), inside)
        attempt = tl.where(tl.max(now, 0) > 0, attempt + 1, settings.attempts)
    if settings.verify:
        store_verdict(checks.verdict, places, inside, now, ever)
