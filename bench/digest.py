"""How fast are digests, beside reading memory; and digested copies, beside memcpy?

    python -m bench.digest [--mb 512] [--pairs 9]

One thread. Reading is NumPy's sum of 64-bit words; both sides of a pair go through the same memory.
Each kernel of this processor is a row; before it is timed, its digest is compared with that of the
reference.
"""

import argparse

import numpy as np
import torch
from numpy.typing import NDArray

from bench.paired import paired
from bench.rows import record
from holdfast import _digest
from holdfast.digest import reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=512, help="the memory gone through")
    parser.add_argument("--pairs", type=int, default=9)
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


def _check(kernels: str, data: NDArray[np.uint8]) -> None:
    mine, plain = _digest.Hasher(kernels), reference.Hasher()
    mine.update(data)
    plain.update(data)
    if mine.digest() != plain.digest():
        raise SystemExit(f"{kernels}: not the digest of the reference")


if __name__ == "__main__":
    main()
