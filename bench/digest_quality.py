"""How good are digests? Tests of hash functions on keys like tensors; ours, xxh3-128 and BLAKE3.

    python -m bench.digest_quality

Collisions: halves of digests of different keys, equal in their first or last 32, 40 or 64 bits.
Avalanche: 1 to 3 flipped bits change each bit of a digest in half of the cases, and any two of its
bits independently. p is the chance that a random function does no better; ``least_p`` is the worst
test's, times the number of tests.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, count, islice, product
from zlib import crc32

import blake3
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from bench.rows import record
from holdfast.digest import digest

Key = NDArray[np.uint8]
Digest = Callable[[Key], bytes]
DIGESTS: dict[str, Digest] = {
    "holdfast": digest,
    "xxh3-128": xxhash.xxh3_128_digest,
    "blake3": lambda key: blake3.blake3(key).digest(16),
    "crc32, four times": lambda key: 4 * crc32(key).to_bytes(4, "little"),  # has to fail
}
MOST = 200_000  # keys of each kind
rng = np.random.default_rng(0)


def drawn(nbytes: int) -> Key:
    return rng.integers(0, 256, nbytes, dtype=np.uint8)


def flipped(base: Key, bits: Iterable[int]) -> Key:
    key = base.copy()
    for bit in bits:
        key[bit // 8] ^= 1 << bit % 8
    return key


def sparse(nbytes: int, most: int) -> Iterator[Key]:
    for flips in range(most + 1):
        for bits in combinations(range(8 * nbytes), flips):
            yield flipped(np.zeros(nbytes, np.uint8), bits)


def near(values: int, dtype: torch.dtype) -> Iterator[Key]:
    """Yield weights with each bit flipped, in random order, then with two, and with three."""
    normal = torch.from_numpy(rng.standard_normal(values, np.float32) * 0.02)
    base = normal.to(dtype).view(torch.uint8).numpy()
    order = rng.permutation(8 * len(base)).tolist()
    for flips in (1, 2, 3):
        for place in range(len(order) - flips + 1):
            yield flipped(base, order[place : place + flips])


def swapped(pieces: int, nbytes: int) -> Iterator[Key]:
    """Yield pieces of random bytes, any two of which are in each other's place."""
    base = drawn(pieces * nbytes).reshape(pieces, nbytes)
    for pair in combinations(range(pieces), 2):
        key = base.copy()
        key[list(pair)] = key[list(pair[::-1])]
        yield key.reshape(-1)


def kinds() -> dict[str, Iterator[Key]]:
    return {
        "counters of 8 bytes": (np.array([n]).view(np.uint8) for n in count()),
        "up to 3 bits of 16 bytes": sparse(16, 3),
        "up to 2 bits of 64 bytes": sparse(64, 2),
        "1 bit of 4096 bytes": sparse(4096, 1),
        "zeros of every length": (np.zeros(n, np.uint8) for n in range(1 << 14)),
        "64 bytes, 32 times": (np.tile(drawn(64), 32) for _ in count()),
        "512 bytes, 32 times": (np.tile(drawn(512), 32) for _ in count()),
        **{
            f"swapped pieces of {n} bytes": swapped(min(256, 2**18 // n), n)
            for n in (4, 8, 64, 4096)
        },
        "flips of a bias, fp32": near(768, torch.float32),
        "flips of rows, bf16": near(6144, torch.bfloat16),
        "flips of a matrix, bf16": islice(near(768**2, torch.bfloat16), 2000),
    }


def collisions(found: NDArray[np.uint64]) -> dict[str, float]:
    ps = {}
    for bits, half, last in product((32, 40, 64), (0, 1), (0, 1)):
        cut = np.uint64(64 - bits)
        kept = found[:, half] << cut if last else found[:, half] >> cut
        equal = len(kept) - len(np.unique(kept))
        rate = torch.tensor(len(kept) * (len(kept) - 1) / 2.0 ** (bits + 1)).double()
        more, fewer = (torch.tensor(equal + extra).double() for extra in (0.0, 1.0))
        tails = torch.special.gammainc(more, rate) if equal else torch.ones(()).double()
        p = 2 * float(torch.minimum(tails, torch.special.gammaincc(fewer, rate)))
        ps[f"{bits} {'last' if last else 'first'} bits of half {half}: {equal}"] = min(1.0, p)
    return ps


def avalanche(of: Digest, nbytes: int, flips: int, cases: int) -> Iterator[float]:
    """Yield p of the most biased bit of the digest, and of the two bits that go together most."""
    changed = np.empty((cases, 128), np.float32)
    for row in changed:
        key, bits = drawn(nbytes), map(int, rng.choice(8 * nbytes, flips, replace=False))
        both = (np.frombuffer(of(each), np.uint8) for each in (key, flipped(key, bits)))
        row[:] = np.unpackbits(np.bitwise_xor(*both))
    signs = 2 * changed - 1
    for means in (signs.mean(0), (signs.T @ signs / cases)[np.triu_indices(128, 1)]):
        most = torch.tensor(np.abs(means).max() * (cases / 2) ** 0.5).double()
        yield float(-torch.expm1(len(means) * torch.log1p(-torch.special.erfc(most))))


def main() -> None:
    for name, of in DIGESTS.items():
        ps = {}
        for kind, keys in kinds().items():
            found = np.frombuffer(b"".join(map(of, islice(keys, MOST))), np.uint64).reshape(-1, 2)
            ps |= {f"{kind}, {len(found)}: {t}": p for t, p in collisions(found).items()}
        for flips, nbytes in product((1, 2, 3), (4, 64, 4096)):
            for number, p in enumerate(avalanche(of, nbytes, flips, MOST // 10), 1):
                ps[f"{flips} flips in {nbytes} bytes: {number} bits of the digest"] = p
        worst = min(ps, key=ps.__getitem__)
        told = {"tests": len(ps), "worst": worst, "least_p": min(1.0, len(ps) * ps[worst])}
        record("digest", {"what": "quality", "of": name, "keys": MOST} | told)


if __name__ == "__main__":
    main()
