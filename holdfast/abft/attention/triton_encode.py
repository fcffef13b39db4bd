"""Triton kernel that encodes Q, K, V or dO along both dimensions, in one pass over it."""

import triton
import triton.language as tl

from holdfast.abft.attention.triton_tiles import (
    INVERSE,
    MEAN,
    PIECE_STEP,
    SPREAD,
    TILE_VALUES,
    TOP,
    load_rows,
)
from holdfast.abft.gemm.triton_encode import spread_of


@triton.jit
def attention_encode_kernel(
    matrix,
    signs_ptr,
    encoding,
    heads,
    length,
    drifting,
    repeating,
    TERMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STREAM: tl.constexpr,
):
    """One tile of STREAM rows; see ``triton_types.Encoding``."""
    tiles = tl.cdiv(length, STREAM)
    tile = tl.program_id(0) % tiles
    index = tl.program_id(0) // tiles
    rows = tile * STREAM + tl.arange(0, STREAM)
    lanes = tl.arange(0, BLOCK_D)
    x = load_rows(matrix, index // heads, index % heads, rows, length, D, BLOCK_D).to(tl.float32)
    of_rows = tl.load(signs_ptr + rows, rows < length, other=0).to(tl.float32)
    of_lanes = tl.load(signs_ptr + lanes, lanes < D, other=0).to(tl.float32)
    count = (tl.minimum(length, (tile + 1) * STREAM) - tile * STREAM).to(tl.float32)
    block = index.to(tl.int64) * tiles + tile

    signed = tl.sum(x * of_rows[:, None], 0)
    inverse = _store_pieces(encoding.pieces + block * TERMS * D, signed, lanes, TERMS, D)
    along = tl.sum(x * of_lanes[None, :], 1)
    tl.store(encoding.rows + index.to(tl.int64) * length + rows, along, rows < length)

    squares, plain = x * x, tl.sum(x, 0)
    spread = spread_of(tl.sum(squares, 0), plain, count, drifting, repeating, BLOCK_D)
    mean = plain / count
    of_tile = encoding.tile + block * TILE_VALUES
    tl.store(of_tile + INVERSE, inverse)
    tl.store(of_tile + SPREAD, tl.max(spread, 0))
    tl.store(of_tile + TOP, tl.max(tl.sum(squares, 1), 0))
    tl.store(of_tile + MEAN, tl.sum(mean * mean, 0))


@triton.jit
def _store_pieces(pieces_ptr, values, lanes, TERMS: tl.constexpr, D: tl.constexpr):
    """Values as a scaled sum of numbers of few bits; returns what undoes the scale."""
    dtype = pieces_ptr.dtype.element_ty
    inverse = 1.0
    rest = values
    if TERMS > 1:
        exponent = tl.max(tl.abs(values).to(tl.int32, bitcast=True) >> 23, 0)
        exponent = tl.minimum(tl.maximum(exponent, 2), 252)
        inverse = (exponent << 23).to(tl.float32, bitcast=True)
        rest = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for term in tl.static_range(TERMS):
        piece = rest.to(dtype)
        tl.store(pieces_ptr + term * D + lanes, piece, lanes < D)
        rest = (rest - piece.to(tl.float32)) * PIECE_STEP
    return inverse
