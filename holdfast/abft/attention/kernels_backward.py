"""Triton attention, backward: dQ and δ by tiles of queries, dK and dV by tiles of keys.

As in the forward pass, a program owns a tile of rows and streams through the rows of the other
operands. S and dP are computed again and checked; the signed row sums of each gradient are compared
with sums that were accumulated in the same loop. A tile with a suspect row is computed once more.
"""

import triton
import triton.language as tl

from holdfast.abft.attention.tiles import (
    AT_ACCUMULATOR,
    AT_DELTA,
    AT_GRAD_PROBABILITIES,
    AT_GRAD_VALUE,
    AT_PROBABILITIES,
    AT_SCORES,
    GRAD_PROBABILITIES,
    GRAD_VALUE,
    GROUP,
    LEAST,
    LOG2_E,
    MEAN,
    OUTPUT,
    PROBABILITIES,
    SCORES,
    SPREAD,
    STATE,
    TOP,
    causal_shift,
    exponents,
    inject,
    inject_rows,
    list_length,
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


@triton.jit
def grad_query_kernel(
    operands, out, grad, grad_q, lse_ptr, delta_ptr, checks, faults_ptr, sizes, starts,
    order, scale, one, tolerances, settings: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one tile of queries, and δ = rowsum(dO ∘ O), which dK and dV need."""
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
        from_output = load_operand(grad, batch, head, rows, owner, settings)
        output = load_rows(out, batch, head, rows, owner, settings).to(tl.float32)
        incoming = from_output.to(tl.float32)
        delta = tl.sum(incoming * output, 1)
        lse = tl.load(lse_ptr + places, inside, other=0.0)
        acc = tl.zeros((block_rows, padded), tl.float32)
        zeros = tl.zeros((block_rows,), tl.float32)
        sums = (zeros, zeros, zeros, zeros)
        total, length, grad_length = zeros, zeros, zeros
        largest, mean = 0.0, 0.0
        now = tl.zeros((block_rows,), tl.int32)
        delta = inject_rows(delta, faults, AT_DELTA, 0, rows, settings)
        if settings.verify:
            delta_copy = tl.sum((incoming * one) * output, 1)
            limit = tolerances.state * tl.sum(tl.abs(incoming * output), 1)
            now |= tl.where(tl.abs(delta - delta_copy) <= limit, 0, STATE)
            length, grad_length = square_length(query), square_length(from_output)
        for first in range(0, seen, step):
            if settings.verify:
                group = listed_group(order, batch, head, row_tile, first, seen, settings)
                predicted = predictions(query, checks.first, kv_index, group, tiles, settings)
                predicted_grad = predictions(
                    from_output, checks.second, kv_index, group, tiles, settings
                )
            for place in range(first, tl.minimum(first + step, seen)):
                tile = listed_tiles(order, batch, head, row_tile, place, seen, settings)
                columns = tile * stream + tl.arange(0, stream)
                key = load_operand(operands.k, batch, kv_head, columns, keys, settings)
                value = load_operand(operands.v, batch, kv_head, columns, keys, settings)
                scores, grad_p = _products(
                    query, key, from_output, value, faults, tile, rows, columns, settings
                )
                x = exponents(
                    scores, operands.mask, batch, head, rows[:, None], columns[None, :],
                    owner[1], keys[1], scale * LOG2_E, settings,
                )  # fmt: skip
                p = tl.exp2(x - (lse * LOG2_E)[:, None])
                p = inject(p, faults, AT_PROBABILITIES, tile, rows, columns, settings)
                weights = (p * (grad_p - delta[:, None])).to(settings.operand)
                if settings.verify:
                    now |= _failed_products(
                        scores, grad_p, signs_at(checks.signs, columns, keys[1]), predicted,
                        predicted_grad, length, grad_length, checks, kv_index, tiles, tile,
                        place - first, tolerances.tile,
                    )  # fmt: skip
                    largest = tl.maximum(largest, of_tile(checks.first, kv_index, tiles, tile, TOP))
                    mean = tl.maximum(mean, of_tile(checks.first, kv_index, tiles, tile, MEAN))
                    now |= _failed_probabilities(
                        p, tl.abs(lse) + tl.abs(scale) * tl.sqrt(length * largest)
                    )
                    total += tl.sum(p, 1)
                    sums = _carry(sums, weights, checks.first, keys, columns)
                acc = tl.dot(weights, key, acc, input_precision=settings.precision)
                acc = inject(acc, faults, AT_ACCUMULATOR, tile, rows, lanes, settings)
        acc = acc * scale
        if settings.verify:
            reach = tl.abs(lse) + tl.abs(scale) * tl.sqrt(length * largest)
            whole = tl.abs(total - 1) <= _unit_slack(reach)
            empty = (total == 0) & (lse == 0)
            now |= tl.where(whole | empty, 0, PROBABILITIES)
            off = _gradient_suspect(
                acc, checks, lanes, sums, scale, largest, mean, tolerances, settings
            )
            now |= tl.where(off, OUTPUT, 0)
            now = tl.where(inside, nan_rows(now, acc), 0)
            ever |= now
        store_rows(grad_q, acc, batch, head, rows, owner, settings)
        tl.store(delta_ptr + places, delta, inside)
        attempt = tl.where(tl.max(now, 0) > 0, attempt + 1, settings.attempts)
    if settings.verify:
        store_verdict(checks.verdict, places, inside, now, ever)


@triton.jit
def grad_key_value_kernel(
    operands, grad, grad_k, grad_v, lse_ptr, delta_ptr, checks, faults_ptr, sizes, starts,
    order, scale, tolerances, settings: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one tile of keys, from the queries of all heads that attend to it.

    S, P, dP and dS are transposed: each of their rows belongs to a key.
    """
    block_rows: tl.constexpr = settings.rows
    stream: tl.constexpr = settings.stream
    padded: tl.constexpr = settings.padded
    key_tiles, tiles = tl.cdiv(sizes.keys, block_rows), tl.cdiv(sizes.queries, stream)
    kv_index = tl.program_id(0) // key_tiles
    key_tile = tl.program_id(0) % key_tiles  # of a causal head the longest first
    kv_heads = sizes.heads // sizes.group
    batch, kv_head = kv_index // kv_heads, kv_index % kv_heads
    rows = key_tile * block_rows + tl.arange(0, block_rows)
    lanes = tl.arange(0, padded)
    owner = span(starts.keys, batch, kv_head, kv_heads, sizes.keys, settings)
    inside = rows < owner[1]
    step = GROUP if settings.verify else tiles
    ever = tl.zeros((block_rows,), tl.int32)
    now = tl.zeros((block_rows,), tl.int32)
    attempt = 0
    while attempt < settings.attempts:
        faults = (faults_ptr, kv_index, attempt)
        key = load_operand(operands.k, batch, kv_head, rows, owner, settings)
        value = load_operand(operands.v, batch, kv_head, rows, owner, settings)
        of_key = tl.zeros((block_rows, padded), tl.float32)
        of_value = tl.zeros((block_rows, padded), tl.float32)
        zeros = tl.zeros((block_rows,), tl.float32)
        key_sums, value_sums = (zeros, zeros, zeros, zeros), (zeros, zeros, zeros, zeros)
        length, value_length = zeros, zeros
        largest, mean, largest_grad, mean_grad = 0.0, 0.0, 0.0, 0.0
        now = tl.zeros((block_rows,), tl.int32)
        if settings.verify:
            length, value_length = square_length(key), square_length(value)
        for member in range(sizes.group):
            head = kv_head * sizes.group + member
            index = batch * sizes.heads + head
            queries = span(starts.queries, batch, head, sizes.heads, sizes.queries, settings)
            begin, end = 0, tl.cdiv(queries[1], stream)
            if settings.causal:
                shift = causal_shift(queries[1], owner[1], settings)
                begin = tl.minimum(tl.maximum(key_tile * block_rows - shift, 0) // stream, end)
            if settings.mask > 0:
                begin, end = 0, list_length(order, batch, head, key_tile)
            end = tl.where(key_tile * block_rows < owner[1], end, begin)
            for first in range(begin, end, step):
                if settings.verify:
                    group = listed_group(order, batch, head, key_tile, first, end, settings)
                    predicted = predictions(key, checks.first, index, group, tiles, settings)
                    predicted_grad = predictions(
                        value, checks.second, index, group, tiles, settings
                    )
                for place in range(first, tl.minimum(first + step, end)):
                    tile = listed_tiles(order, batch, head, key_tile, place, end, settings)
                    columns = tile * stream + tl.arange(0, stream)
                    number = member * tiles + tile
                    line = queries[2] + columns
                    query = load_operand(operands.q, batch, head, columns, queries, settings)
                    from_output = load_operand(grad, batch, head, columns, queries, settings)
                    lse = tl.load(lse_ptr + line, columns < queries[1], other=0.0)
                    delta = tl.load(delta_ptr + line, columns < queries[1], other=0.0)
                    scores, grad_p = _products(
                        key, query, value, from_output, faults, number, rows, columns, settings
                    )
                    x = exponents(
                        scores, operands.mask, batch, head, columns[None, :], rows[:, None],
                        queries[1], owner[1], scale * LOG2_E, settings,
                    )  # fmt: skip
                    p = tl.exp2(x - (lse * LOG2_E)[None, :])
                    p = inject(p, faults, AT_PROBABILITIES, number, rows, columns, settings)
                    probabilities = p.to(settings.operand)
                    weights = (p * (grad_p - delta[None, :])).to(settings.operand)
                    if settings.verify:
                        now |= _failed_products(
                            scores, grad_p, signs_at(checks.signs, columns, queries[1]),
                            predicted, predicted_grad, length, value_length, checks, index, tiles,
                            tile, place - first, tolerances.tile,
                        )  # fmt: skip
                        largest = tl.maximum(
                            largest, of_tile(checks.first, index, tiles, tile, TOP)
                        )
                        mean = tl.maximum(mean, of_tile(checks.first, index, tiles, tile, MEAN))
                        top = of_tile(checks.second, index, tiles, tile, TOP)
                        largest_grad = tl.maximum(largest_grad, top)
                        mean_grad = tl.maximum(
                            mean_grad, of_tile(checks.second, index, tiles, tile, MEAN)
                        )
                        reach = tl.max(tl.abs(lse), 0)
                        reach += tl.abs(scale) * tl.sqrt(length * largest)
                        now |= _failed_probabilities(p, reach)
                        key_sums = _carry(key_sums, weights, checks.first, queries, columns)
                        value_sums = _carry(
                            value_sums, probabilities, checks.second, queries, columns
                        )
                    of_value = tl.dot(
                        probabilities, from_output, of_value, input_precision=settings.precision
                    )
                    of_key = tl.dot(weights, query, of_key, input_precision=settings.precision)
                    of_value = inject(
                        of_value, faults, AT_GRAD_VALUE, number, rows, lanes, settings
                    )
                    of_key = inject(of_key, faults, AT_ACCUMULATOR, number, rows, lanes, settings)
        of_key = of_key * scale
        if settings.verify:
            off = _gradient_suspect(
                of_key, checks, lanes, key_sums, scale, largest, mean, tolerances, settings
            )
            now |= tl.where(off, OUTPUT, 0)
            off = _gradient_suspect(
                of_value, checks, lanes, value_sums, 1.0, largest_grad, mean_grad, tolerances,
                settings,
            )  # fmt: skip
            now |= tl.where(off, GRAD_VALUE, 0)
            now = tl.where(inside, nan_rows(nan_rows(now, of_key), of_value), 0)
            ever |= now
        store_rows(grad_k, of_key, batch, kv_head, rows, owner, settings)
        store_rows(grad_v, of_value, batch, kv_head, rows, owner, settings)
        attempt = tl.where(tl.max(now, 0) > 0, attempt + 1, settings.attempts)
    if settings.verify:
        store_verdict(checks.verdict, owner[2] + rows, inside, now, ever)


@triton.jit
def _products(
    first, first_streamed, second, second_streamed, faults, tile, rows, columns,
    settings: tl.constexpr,
):  # fmt: skip
    """Compute S and dP of one tile, or their transposes."""
    scores = tl.dot(first, tl.trans(first_streamed), input_precision=settings.precision)
    grad_p = tl.dot(second, tl.trans(second_streamed), input_precision=settings.precision)
    scores = inject(scores, faults, AT_SCORES, tile, rows, columns, settings)
    grad_p = inject(grad_p, faults, AT_GRAD_PROBABILITIES, tile, rows, columns, settings)
    return scores, grad_p


@triton.jit
def _failed_products(
    scores, grad_p, signs, predicted, predicted_grad, length, grad_length, checks, index, tiles,
    tile, column, tolerance,
):  # fmt: skip
    """Return the checks that rows of S and dP fail in tile number ``column`` of its group."""
    walk = length * of_tile(checks.first, index, tiles, tile, SPREAD)
    off = tile_suspect(scores, signs, predicted, column, walk, tolerance)
    failed = tl.where(off, SCORES, 0)
    walk = grad_length * of_tile(checks.second, index, tiles, tile, SPREAD)
    off = tile_suspect(grad_p, signs, predicted_grad, column, walk, tolerance)
    return failed | tl.where(off, GRAD_PROBABILITIES, 0)


@triton.jit
def _failed_probabilities(p, reach):
    """Check that no probability is negative, NaN, or above 1 by more than rounding explains."""
    greatest = most(p)
    sound = (greatest >= 0) & (greatest <= tl.exp(_unit_slack(reach)))
    return tl.where(sound, 0, PROBABILITIES)


@triton.jit
def _unit_slack(reach):
    """Bound the distance from 1 of a sum of probabilities with scores of magnitude up to ``reach``.

    The bound is 2⁻¹² plus the largest effect of rounding the exponents.
    """
    return 2.0**-12 + 2.0**-18 * (1 + reach)


@triton.jit
def _carry(sums, weights, encoding, owner, columns):
    """Add a tile of the left operand to the sums with which an accumulator's rows are checked.

    The sums are ``Σ_k a_ik (B r)_k``, ``Σ_k a_ik²``, ``Σ_k a_ik``, and the largest magnitude that
    the third one had so far.
    """
    carried, squares, drift, swing = sums
    signed = signed_rows(encoding, owner, columns)
    a = weights.to(tl.float32)
    carried += tl.sum(a * signed[None, :], 1)
    squares += tl.sum(a * a, 1) + a.shape[1] * LEAST
    drift += tl.sum(a, 1)
    return carried, squares, drift, tl.maximum(swing, tl.abs(drift))


@triton.jit
def _gradient_suspect(
    gradient, checks, lanes, sums, scale, largest, mean, tolerances, settings: tl.constexpr
):
    """Mark the rows of a gradient that contradict the sums of ``_carry``."""
    carried, squares, _, swing = sums
    return row_suspect(
        gradient, signs_at(checks.signs, lanes, settings.width), carried * scale,
        scale * scale * squares * largest, scale * scale * swing * swing * mean, tolerances.total,
    )  # fmt: skip
