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
def digest_kernel(
    words_ptr,
    keys_ptr,
    sums_ptr,
    stripes,
    first_block,
    FIRST_STEP: tl.constexpr,
    SECOND_STEP: tl.constexpr,
    STRIPES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Add one block to the sums; a last block has only ``stripes`` stripes."""
    block = tl.program_id(0).to(tl.int64)
    stripe = tl.arange(0, STRIPES)
    lane = tl.arange(0, LANES)
    places = stripe[:, None] * LANES + lane[None, :]
    inside = (stripe < stripes)[:, None] & (lane >= 0)[None, :]
    words = tl.load(words_ptr + block * (STRIPES * LANES) + places, inside, other=0)
    keys = tl.load(keys_ptr + places)
    later = tl.load(keys_ptr + places + LANES)
    first = tl.sum(tl.where(inside, products(words, keys), 0), axis=0)
    second = tl.sum(tl.where(inside, products(words, later), 0), axis=0)
    at = (first_block + block) * LANES + lane + 1
    tl.atomic_add(sums_ptr, tl.sum(mixed(first + at * FIRST_STEP), axis=0))
    tl.atomic_add(sums_ptr + 1, tl.sum(mixed(second + at * SECOND_STEP), axis=0))
