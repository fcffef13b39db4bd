"""Triton attention, forward: the loop over the tiles of keys, checked as it goes.

A program owns a tile of queries. A row that fails any check is wrong from there on and is not used:
the whole tile is computed once more, by the same instructions, and stored as it is then.

Q is in the registers of the prediction and in a matrix unit; tiles of K and V are read by the
matrix units alone, their checksums having been made before (triton issue 6691, see
``ops.gemm.triton_online``).
"""

import triton
import triton.language as tl

from holdfast.abft.attention.triton_tiles import (
    AT_ACCUMULATOR,
    AT_MAXIMUM,
    AT_PROBABILITIES,
    AT_SCORES,
    AT_SUM,
    GROUP,
    LOG2_E,
    OUTPUT,
    PROBABILITIES,
    SCORES,
    SPREAD,
    STATE,
    TOP,
    exponents,
    inject,
    inject_rows,
    load_rows,
    most,
    of_tile,
    predictions,
    row_suspect,
    signed_rows,
    signs_at,
    square_length,
    store_rows,
    store_verdict,
    tile_suspect,
)


@triton.jit
def attention_forward_kernel(
    q,
    k,
    v,
    mask,
    out,
    lse_ptr,
    signs_ptr,
    keys,
    values,
    status_ptr,
    parts_ptr,
    counts_ptr,
    faults_ptr,
    heads,
    group,
    Lq,
    Lk,
    factor,
    one,
    tolerances,
    VERIFY: tl.constexpr,
    ATTEMPTS: tl.constexpr,
    FAULTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
    PREDICTION: tl.constexpr,
    OPERAND: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Output and logarithm of one tile of queries; factor is ``scale · log₂ e``, and one is 1.

    The compiler does not know that ``one`` is 1, nor that the two copies of the running maximum
    and sum are the same: what is computed twice stays computed twice.
    """
    query_tiles, tiles = tl.cdiv(Lq, BLOCK_M), tl.cdiv(Lk, STREAM)
    index = tl.program_id(0) // query_tiles
    query_tile = query_tiles - 1 - tl.program_id(0) % query_tiles  # the longest of a causal head
    batch, head = index // heads, index % heads
    kv_index = batch * (heads // group) + head // group
    rows = query_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_D)
    places = index.to(tl.int64) * Lq + rows
    seen = tiles
    if CAUSAL:
        seen = tl.minimum(tiles, tl.cdiv((query_tile + 1) * BLOCK_M, STREAM))
    step = GROUP if VERIFY else seen
    ever = tl.zeros((BLOCK_M,), tl.int32)
    now = tl.zeros((BLOCK_M,), tl.int32)
    attempt = 0
    while attempt < ATTEMPTS:
        query = load_rows(q, batch, head, rows, Lq, D, BLOCK_D).to(OPERAND)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        maximum_copy = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        total_copy = tl.zeros((BLOCK_M,), tl.float32)
        carried = tl.zeros((BLOCK_M,), tl.float32)
        length = square_length(query) if VERIFY else total
        largest = 0.0
        now = tl.zeros((BLOCK_M,), tl.int32)
        for first in range(0, seen, step):
            if VERIFY:
                predicted = predictions(
                    query, keys, kv_index, first, tiles, TERMS, PREDICTION, D, BLOCK_D
                )
            for tile in range(first, tl.minimum(first + step, seen)):
                columns = tile * STREAM + tl.arange(0, STREAM)
                key = load_rows(k, batch, head // group, columns, Lk, D, BLOCK_D).to(OPERAND)
                scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                if FAULTS > 0:
                    scores = inject(
                        scores, faults_ptr, AT_SCORES, index, tile, rows, columns, attempt, FAULTS
                    )
                if VERIFY:
                    walk = length * of_tile(keys, kv_index, tiles, tile, SPREAD)
                    off = tile_suspect(
                        scores, signs_at(signs_ptr, columns, Lk), predicted, tile - first, walk,
                        tolerances.tile,
                    )  # fmt: skip
                    now |= tl.where(off, SCORES, 0)
                x = exponents(
                    scores, mask, batch, head, rows[:, None], columns[None, :], Lq, Lk, factor,
                    CAUSAL, MASK,
                )  # fmt: skip
                top = tl.max(x, 1)
                above = tl.maximum(maximum, top)
                base = tl.where(above == -float("inf"), 0.0, above)
                rescale = tl.exp2(maximum - base)
                p = tl.exp2(x - base[:, None])
                if FAULTS > 0:
                    p = inject(
                        p, faults_ptr, AT_PROBABILITIES, index, tile, rows, columns, attempt, FAULTS
                    )
                weights = p.to(OPERAND)
                if VERIFY:
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
                    signed = signed_rows(values, kv_index, Lk, columns)
                    carried = carried * rescale_copy
                    carried += tl.sum(weights.to(tl.float32) * signed[None, :], 1)
                    largest = tl.maximum(largest, of_tile(values, kv_index, tiles, tile, TOP))
                maximum = above
                total = total * rescale + tl.sum(p, 1)
                value = load_rows(v, batch, head // group, columns, Lk, D, BLOCK_D).to(OPERAND)
                acc = acc * rescale[:, None]
                acc = tl.dot(weights, value, acc, input_precision=PRECISION)
                if FAULTS > 0:
                    acc = inject(
                        acc, faults_ptr, AT_ACCUMULATOR, index, tile, rows, lanes, attempt, FAULTS
                    )
                    maximum = inject_rows(
                        maximum, faults_ptr, AT_MAXIMUM, index, tile, rows, attempt, FAULTS
                    )
                    total = inject_rows(
                        total, faults_ptr, AT_SUM, index, tile, rows, attempt, FAULTS
                    )
        empty = total == 0
        share = 1 / tl.where(empty, 1.0, total)
        acc = acc * share[:, None]
        if VERIFY:
            most_keys = Lk * (1 + tolerances.state)
            bounded = (total >= 1 - tolerances.state) & (total <= most_keys)
            finite = tl.abs(maximum) < float("inf")
            nothing = empty & (maximum == -float("inf"))
            agrees = tl.abs(total - total_copy) <= tolerances.state * total_copy
            agrees &= maximum == maximum_copy
            sound = agrees & (nothing | (bounded & finite))
            now |= tl.where(sound, 0, STATE)
            share_copy = 1 / tl.where(total_copy == 0, 1.0, total_copy)
            off = row_suspect(
                acc, signs_at(signs_ptr, lanes, D), carried * share_copy, largest * share_copy, 0,
                tolerances.total,
            )  # fmt: skip
            now |= tl.where(off, OUTPUT, 0)
            now = tl.where(rows < Lq, now, 0)
            ever |= now
        store_rows(out, acc, batch, head, rows, Lq, D, BLOCK_D)
        logarithm = maximum / LOG2_E + tl.log(tl.where(empty, 1.0, total))
        tl.store(lse_ptr + places, tl.where(empty, 0.0, logarithm), rows < Lq)
        attempt = tl.where(tl.max(now, 0) > 0, attempt + 1, ATTEMPTS)
    if VERIFY:
        store_verdict(status_ptr, parts_ptr, counts_ptr, places, rows < Lq, now, ever)
