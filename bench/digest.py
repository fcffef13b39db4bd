"""How fast are digests, beside reading memory; and digested copies, beside memcpy?

    python -m bench.digest [--mb 512] [--pairs 9] [--peers [--xxhash-avx2 FILE]]

One thread. Reading is NumPy's sum of 64-bit words; both sides of a pair go through the same memory.
Each kernel of this processor is a row; before it is timed, its digest is compared with that of the
reference. ``--peers``: xxh3-128 and BLAKE3, which choose their instruction set, against ours
(above 1: ours is faster), and copies with digests. FILE is xxhash's extension without AVX-512:

    CFLAGS="-O3 -DXXH_DISPATCH_AVX512=0" pip install --no-binary xxhash --target DIR xxhash
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.paired import paired, positive, several
from bench.rows import record
from holdfast import _digest
from holdfast.digest import reference

Bytes = NDArray[np.uint8]
PIECE = 2**18


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=positive, default=512, help="the memory gone through")
    parser.add_argument("--pairs", type=several, default=9)
    parser.add_argument("--peers", action="store_true", help="xxh3-128 and BLAKE3 against ours")
    parser.add_argument("--xxhash-avx2", metavar="FILE", help="_xxhash built without AVX-512")
    given = parser.parse_args()
    nbytes = given.mb * 2**20
    # Tensors begin at a multiple of 64 bytes, as those of a model do.
    data = torch.randint(1, 256, (nbytes,), dtype=torch.uint8).numpy()
    room = torch.ones(nbytes, dtype=torch.uint8).numpy()

    def add() -> None:
        data.view(np.uint64).sum()

    for kernels in _digest.kernels():
        _check(kernels, data[: 2**20 + 1])

        def digest(kernels: str = kernels) -> None:
            _digest.Hasher(kernels).update(data)

        def copy(kernels: str = kernels) -> None:
            _digest.Hasher(kernels).copy(data, room)

        what = {"kernels": kernels, "mb": given.mb}
        found = paired(add, digest, pairs=given.pairs)
        record("digest", {"what": "digest", "of": "read", **what} | found)
        found = paired(lambda: np.copyto(room, data), copy, pairs=given.pairs)
        record("digest", {"what": "copy", "of": "memcpy", **what} | found)
        for peer, of in (peers(given.xxhash_avx2) if given.peers else {}).items():
            turns, of_what = max(1, 64 // given.mb), {"what": f"{peer} / ours", **what}
            found = paired(digest, lambda of=of: of(data).digest(), pairs=given.pairs, turns=turns)
            record("digest", {"of": "digest", **of_what} | found)
            both = partial(_copied_in_pieces, of, data, room)
            found = paired(copy, both, pairs=given.pairs, turns=turns)
            record("digest", {"of": "copy with digest", **of_what} | found)


def peers(avx2: str | None) -> dict[str, Callable[..., Any]]:
    """Return the hashers of xxhash, of one that has no more than AVX2, and of blake3."""
    import blake3
    import xxhash

    found = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3.blake3}
    if avx2 is not None and (spec := spec_from_file_location("_xxhash", avx2)) and spec.loader:
        built = module_from_spec(spec)
        spec.loader.exec_module(built)
        found["xxh3-128, AVX2"] = built.xxh3_128
    return found


def _copied_in_pieces(of: Callable[..., Any], data: Bytes, room: Bytes) -> bytes:
    """Copy pieces that stay in the cache until they are digested."""
    hasher = of()
    for start in range(0, len(data), PIECE):
        np.copyto(room[start : start + PIECE], data[start : start + PIECE])
        hasher.update(room[start : start + PIECE])
    return hasher.digest()


def _check(kernels: str, data: Bytes) -> None:
    mine, plain = _digest.Hasher(kernels), reference.Hasher()
    mine.update(data)
    plain.update(data)
    if mine.digest() != plain.digest():
        raise SystemExit(f"{kernels}: not the digest of the reference")


if __name__ == "__main__":
    main()
