"""Triton attention, backward: dK and dV by tiles of keys.

The form of ``triton_grad_query`` with the roles exchanged: a program owns keys and streams through
the queries and the incoming gradients of all heads that read them.
"""

import triton
import triton.language as tl

from holdfast.abft.attention.triton_tiles import (
    AT_ACCUMULATOR,
    AT_GRAD_PROBABILITIES,
    AT_GRAD_VALUE,
    AT_PROBABILITIES,
    AT_SCORES,
    GRAD_PROBABILITIES,
    GRAD_VALUE,
    GROUP,
    LOG2_E,
    MEAN,
    OUTPUT,
    PROBABILITIES,
    SCORES,
    SPREAD,
    TOP,
    carry,
    exponents,
    inject,
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
    unit_slack,
)


@triton.jit
def grad_key_value_kernel(
    q,
    k,
    v,
    mask,
    grad,
    grad_k,
    grad_v,
    lse_ptr,
    delta_ptr,
    signs_ptr,
    queries,
    grads,
    status_ptr,
    parts_ptr,
    counts_ptr,
    faults_ptr,
    heads,
    group,
    Lq,
    Lk,
    scale,
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
    """dK and dV of one tile of keys, from all queries of all heads that read it.

    S, P, dP and dS are transposed here: a row is a key.
    """
    key_tiles, tiles = tl.cdiv(Lk, BLOCK_M), tl.cdiv(Lq, STREAM)
    kv_index = tl.program_id(0) // key_tiles
    key_tile = tl.program_id(0) % key_tiles  # the longest of a causal head comes first
    kv_heads = heads // group
    batch, kv_head = kv_index // kv_heads, kv_index % kv_heads
    rows = key_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, BLOCK_D)
    begin = 0
    if CAUSAL:
        begin = tl.minimum(key_tile * BLOCK_M // STREAM, tiles)
    step = GROUP if VERIFY else tiles
    ever = tl.zeros((BLOCK_M,), tl.int32)
    now = tl.zeros((BLOCK_M,), tl.int32)
    attempt = 0
    while attempt < ATTEMPTS:
        key = load_rows(k, batch, kv_head, rows, Lk, D, BLOCK_D).to(OPERAND)
        value = load_rows(v, batch, kv_head, rows, Lk, D, BLOCK_D).to(OPERAND)
        of_key = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        of_value = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        zeros = tl.zeros((BLOCK_M,), tl.float32)
        key_sums, value_sums = (zeros, zeros, zeros, zeros), (zeros, zeros, zeros, zeros)
        length, value_length = zeros, zeros
        largest, mean, largest_grad, mean_grad = 0.0, 0.0, 0.0, 0.0
        now = tl.zeros((BLOCK_M,), tl.int32)
        if VERIFY:
            length, value_length = square_length(key), square_length(value)
        for member in range(group):
            head = kv_head * group + member
            index = batch * heads + head
            for first in range(begin, tiles, step):
                if VERIFY:
                    predicted = predictions(
                        key, queries, index, first, tiles, TERMS, PREDICTION, D, BLOCK_D
                    )
                    predicted_grad = predictions(
                        value, grads, index, first, tiles, TERMS, PREDICTION, D, BLOCK_D
                    )
                for tile in range(first, tl.minimum(first + step, tiles)):
                    columns = tile * STREAM + tl.arange(0, STREAM)
                    place = member * tiles + tile
                    line = index.to(tl.int64) * Lq + columns
                    query = load_rows(q, batch, head, columns, Lq, D, BLOCK_D).to(OPERAND)
                    from_output = load_rows(grad, batch, head, columns, Lq, D, BLOCK_D).to(OPERAND)
                    lse = tl.load(lse_ptr + line, columns < Lq, other=0.0)
                    delta = tl.load(delta_ptr + line, columns < Lq, other=0.0)
                    scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
                    grad_p = tl.dot(value, tl.trans(from_output), input_precision=PRECISION)
                    if FAULTS > 0:
                        scores = inject(
                            scores, faults_ptr, AT_SCORES, kv_index, place, rows, columns, attempt,
                            FAULTS,
                        )  # fmt: skip
                        grad_p = inject(
                            grad_p, faults_ptr, AT_GRAD_PROBABILITIES, kv_index, place, rows,
                            columns, attempt, FAULTS,
                        )  # fmt: skip
                    x = exponents(
                        scores, mask, batch, head, columns[None, :], rows[:, None], Lq, Lk,
                        scale * LOG2_E, CAUSAL, MASK,
                    )  # fmt: skip
                    p = tl.exp2(x - (lse * LOG2_E)[None, :])
                    if FAULTS > 0:
                        p = inject(
                            p, faults_ptr, AT_PROBABILITIES, kv_index, place, rows, columns,
                            attempt, FAULTS,
                        )  # fmt: skip
                    probabilities = p.to(OPERAND)
                    weights = (p * (grad_p - delta[None, :])).to(OPERAND)
                    if VERIFY:
                        signs = signs_at(signs_ptr, columns, Lq)
                        walk = length * of_tile(queries, index, tiles, tile, SPREAD)
                        off = tile_suspect(
                            scores, signs, predicted, tile - first, walk, tolerances.tile
                        )
                        now |= tl.where(off, SCORES, 0)
                        walk = value_length * of_tile(grads, index, tiles, tile, SPREAD)
                        off = tile_suspect(
                            grad_p, signs, predicted_grad, tile - first, walk, tolerances.tile
                        )
                        now |= tl.where(off, GRAD_PROBABILITIES, 0)
                        largest = tl.maximum(largest, of_tile(queries, index, tiles, tile, TOP))
                        mean = tl.maximum(mean, of_tile(queries, index, tiles, tile, MEAN))
                        top = of_tile(grads, index, tiles, tile, TOP)
                        largest_grad = tl.maximum(largest_grad, top)
                        mean_grad = tl.maximum(mean_grad, of_tile(grads, index, tiles, tile, MEAN))
                        greatest = most(p)
                        reach = tl.max(tl.abs(lse), 0)
                        reach += tl.abs(scale) * tl.sqrt(length * largest)
                        sound = (greatest >= 0) & (greatest <= tl.exp(unit_slack(reach)))
                        now |= tl.where(sound, 0, PROBABILITIES)
                        signed = signed_rows(queries, index, Lq, columns)
                        key_sums = carry(key_sums, weights, signed)
                        signed = signed_rows(grads, index, Lq, columns)
                        value_sums = carry(value_sums, probabilities, signed)
                    of_value = tl.dot(
                        probabilities, from_output, of_value, input_precision=PRECISION
                    )
                    of_key = tl.dot(weights, query, of_key, input_precision=PRECISION)
                    if FAULTS > 0:
                        of_value = inject(
                            of_value, faults_ptr, AT_GRAD_VALUE, kv_index, place, rows, lanes,
                            attempt, FAULTS,
                        )  # fmt: skip
                        of_key = inject(
                            of_key, faults_ptr, AT_ACCUMULATOR, kv_index, place, rows, lanes,
                            attempt, FAULTS,
                        )  # fmt: skip
        of_key = of_key * scale
        if VERIFY:
            of_lanes = signs_at(signs_ptr, lanes, D)
            carried, squares, _, swing = key_sums
            off = row_suspect(
                of_key, of_lanes, carried * scale, scale * scale * squares * largest,
                scale * scale * swing * swing * mean, tolerances.total,
            )  # fmt: skip
            now |= tl.where(off, OUTPUT, 0)
            carried, squares, _, swing = value_sums
            off = row_suspect(
                of_value, of_lanes, carried, squares * largest_grad, swing * swing * mean_grad,
                tolerances.total,
            )  # fmt: skip
            now |= tl.where(off, GRAD_VALUE, 0)
            now = tl.where(rows < Lk, now, 0)
            ever |= now
        store_rows(grad_k, of_key, batch, kv_head, rows, Lk, D, BLOCK_D)
        store_rows(grad_v, of_value, batch, kv_head, rows, Lk, D, BLOCK_D)
        attempt = tl.where(tl.max(now, 0) > 0, attempt + 1, ATTEMPTS)
    if VERIFY:
        places = kv_index.to(tl.int64) * Lk + rows
        store_verdict(status_ptr, parts_ptr, counts_ptr, places, rows < Lk, now, ever)
