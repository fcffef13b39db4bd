"""The Triton kernel of the digest."""

import triton
import triton.language as tl


@triton.jit
def mixed(x):
    """Apply the 64-bit finalizer of MurmurHash3 to int64 values, with logical shifts."""
    x = x.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return (x ^ (x >> 33)).to(tl.int64, bitcast=True)


@triton.jit
def products(words, key):
    """Multiply pairs of 32 bits, each with its key added."""
    low = ((words & 0xFFFFFFFF) + (key & 0xFFFFFFFF)) & 0xFFFFFFFF
    high = (((words >> 32) & 0xFFFFFFFF) + ((key >> 32) & 0xFFFFFFFF)) & 0xFFFFFFFF
    return low * high


@triton.jit
def last_words(source, nbytes, places):
    """Load a block of ``nbytes`` bytes, fewer than a whole one, with zeros behind them."""
    whole = nbytes // 8
    words = tl.load(source + places, places < whole, other=0)
    byte = tl.arange(0, 8)
    bytes_ptr = (source + whole).to(tl.pointer_type(tl.uint8))
    left = tl.load(bytes_ptr + byte, byte < nbytes % 8, other=0).to(tl.int64)
    return tl.where(places == whole, tl.sum(left << (8 * byte), axis=0), words)


@triton.jit
def digest_kernel(
    pieces_ptr,
    keys_ptr,
    sums_ptr,
    FIRST_STEP: tl.constexpr,
    SECOND_STEP: tl.constexpr,
    STRIPES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add the blocks of a piece of a tensor to the tensor's two sums.

    ``pieces`` is int64 [programs, 4]: the address of the piece, a multiple of 16; its bytes; the
    number of blocks before it in its tensor; the tensor's place in ``sums``, int64 [tensors, 2].
    """
    piece = pieces_ptr + tl.program_id(0) * 4
    source = tl.multiple_of(tl.load(piece).to(tl.pointer_type(tl.int64)), 16)
    nbytes = tl.load(piece + 1)
    lane = tl.arange(0, LANES)
    at = tl.load(piece + 2) * LANES + lane + 1
    stripe = tl.arange(0, STRIPES)
    places = stripe[:, None] * LANES + lane[None, :]
    keys = tl.load(keys_ptr + places)
    later = tl.load(keys_ptr + places + LANES)
    first_sum = tl.zeros((LANES,), tl.int64)
    second_sum = tl.zeros((LANES,), tl.int64)
    for _ in range(nbytes // (STRIPES * LANES * 8)):
        # Without a mask, so that 16 bytes are loaded at a time.
        words = tl.load(source + places)
        first_sum += mixed(tl.sum(products(words, keys), axis=0) + at * FIRST_STEP)
        second_sum += mixed(tl.sum(products(words, later), axis=0) + at * SECOND_STEP)
        source += STRIPES * LANES
        at += LANES
    left = nbytes % (STRIPES * LANES * 8)
    if left > 0:
        words = last_words(source, left, places)
        inside = (stripe * (LANES * 8) < left)[:, None] & (lane >= 0)[None, :]
        first = tl.sum(tl.where(inside, products(words, keys), 0), axis=0)
        second = tl.sum(tl.where(inside, products(words, later), 0), axis=0)
        first_sum += mixed(first + at * FIRST_STEP)
        second_sum += mixed(second + at * SECOND_STEP)
    sums = sums_ptr + 2 * tl.load(piece + 3)
    tl.atomic_add(sums, tl.sum(first_sum, axis=0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(second_sum, axis=0), sem="relaxed")
