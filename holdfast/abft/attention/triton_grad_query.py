"""Triton attention, backward: dQ and δ by tiles of queries.

The kernel has the form of the forward pass: a program owns a tile of rows and streams through K and
V. S and dP are computed again and checked; dQ is compared with the sum that was carried along. A
tile with a suspect row is computed once more.
"""

import triton
import triton.language as tl

from holdfast.abft.attention.triton_tiles import (
    AT_ACCUMULATOR,
    AT_DELTA,
    AT_GRAD_PROBABILITIES,
    AT_PROBABILITIES,
    AT_SCORES,
    GRAD_PROBABILITIES,
    GROUP,
    LOG2_E,
    MEAN,
    OUTPUT,
    PROBABILITIES,
    SCORES,
    SPREAD,
    STATE,
    TOP,
    carry,
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
    unit_slack,
)


@triton.jit
def grad_query_kernel(
    q,
    k,
    v,
    mask,
    out,
    grad,
    grad_q,
    lse_ptr,
    delta_ptr,
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
    scale,
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
    """dQ of one tile of queries, and δ = rowsum(dO ∘ O), which dK and dV need."""
    query_tiles, tiles = tl.cdiv(Lq, BLOCK_M), tl.cdiv(Lk, STREAM)
    index = tl.program_id(0) // query_tiles
    query_tile = query_tiles - 1 - tl.program_id(0) % query_tiles
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
        from_output = load_rows(grad, batch, head, rows, Lq, D, BLOCK_D).to(OPERAND)
        output = load_rows(out, batch, head, rows, Lq, D, BLOCK_D).to(tl.float32)
        incoming = from_output.to(tl.float32)
        delta = tl.sum(incoming * output, 1)
        lse = tl.load(lse_ptr + places, rows < Lq, other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        zeros = tl.zeros((BLOCK_M,), tl.float32)
        sums = (zeros, zeros, zeros, zeros)
        total = tl.zeros((BLOCK_M,), tl.float32)
        length, grad_length = total, total
        largest, mean = 0.0, 0.0
        now = tl.zeros((BLOCK_M,), tl.int32)
        if FAULTS > 0:
            delta = inject_rows(delta, faults_ptr, AT_DELTA, index, 0, rows, attempt, FAULTS)
        if VERIFY:
            delta_copy = tl.sum((incoming * one) * output, 1)
            limit = tolerances.state * tl.sum(tl.abs(incoming * output), 1)
            now |= tl.where(tl.abs(delta - delta_copy) <= limit, 0, STATE)
            length, grad_length = square_length(query), square_length(from_output)
        for first in range(0, seen, step):
            if VERIFY:
                predicted = predictions(
                    query, keys, kv_index, first, tiles, TERMS, PREDICTION, D, BLOCK_D
                )
                predicted_grad = predictions(
                    from_output, values, kv_index, first, tiles, TERMS, PREDICTION, D, BLOCK_D
                )
            for tile in range(first, tl.minimum(first + step, seen)):
                columns = tile * STREAM + tl.arange(0, STREAM)
                key = load_rows(k, batch, head // group, columns, Lk, D, BLOCK_D).to(OPERAND)
                value = load_rows(v, batch, head // group, columns, Lk, D, BLOCK_D).to(OPERAND)
                scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                grad_p = tl.dot(from_output, tl.trans(value), input_precision=PRECISION)
                if FAULTS > 0:
                    scores = inject(
                        scores, faults_ptr, AT_SCORES, index, tile, rows, columns, attempt, FAULTS
                    )
                    grad_p = inject(
                        grad_p, faults_ptr, AT_GRAD_PROBABILITIES, index, tile, rows, columns,
                        attempt, FAULTS,
                    )  # fmt: skip
                x = exponents(
                    scores, mask, batch, head, rows[:, None], columns[None, :], Lq, Lk,
                    scale * LOG2_E, CAUSAL, MASK,
                )  # fmt: skip
                p = tl.exp2(x - (lse * LOG2_E)[:, None])
                if FAULTS > 0:
                    p = inject(
                        p, faults_ptr, AT_PROBABILITIES, index, tile, rows, columns, attempt, FAULTS
                    )
                weights = (p * (grad_p - delta[:, None])).to(OPERAND)
                if VERIFY:
                    signs = signs_at(signs_ptr, columns, Lk)
                    walk = length * of_tile(keys, kv_index, tiles, tile, SPREAD)
                    off = tile_suspect(
                        scores, signs, predicted, tile - first, walk, tolerances.tile
                    )
                    now |= tl.where(off, SCORES, 0)
                    walk = grad_length * of_tile(values, kv_index, tiles, tile, SPREAD)
                    off = tile_suspect(
                        grad_p, signs, predicted_grad, tile - first, walk, tolerances.tile
                    )
                    now |= tl.where(off, GRAD_PROBABILITIES, 0)
                    largest = tl.maximum(largest, of_tile(keys, kv_index, tiles, tile, TOP))
                    mean = tl.maximum(mean, of_tile(keys, kv_index, tiles, tile, MEAN))
                    greatest = most(p)
                    reach = tl.abs(lse) + tl.abs(scale) * tl.sqrt(length * largest)
                    sound = (greatest >= 0) & (greatest <= tl.exp(unit_slack(reach)))
                    now |= tl.where(sound, 0, PROBABILITIES)
                    total += tl.sum(p, 1)
                    sums = carry(sums, weights, signed_rows(keys, kv_index, Lk, columns))
                acc = tl.dot(weights, key, acc, input_precision=PRECISION)
                if FAULTS > 0:
                    acc = inject(
                        acc, faults_ptr, AT_ACCUMULATOR, index, tile, rows, lanes, attempt, FAULTS
                    )
        acc = acc * scale
        if VERIFY:
            carried, squares, _, swing = sums
            reach = tl.abs(lse) + tl.abs(scale) * tl.sqrt(length * largest)
            whole = tl.abs(total - 1) <= unit_slack(reach)
            empty = (total == 0) & (lse == 0)
            now |= tl.where(whole | empty, 0, PROBABILITIES)
            off = row_suspect(
                acc, signs_at(signs_ptr, lanes, D), carried * scale,
                scale * scale * squares * largest, scale * scale * swing * swing * mean,
                tolerances.total,
            )  # fmt: skip
            now |= tl.where(off, OUTPUT, 0)
            now = tl.where(rows < Lq, now, 0)
            ever |= now
        store_rows(grad_q, acc, batch, head, rows, Lq, D, BLOCK_D)
        tl.store(delta_ptr + places, delta, rows < Lq)
        attempt = tl.where(tl.max(now, 0) > 0, attempt + 1, ATTEMPTS)
    if VERIFY:
        store_verdict(status_ptr, parts_ptr, counts_ptr, places, rows < Lq, now, ever)
