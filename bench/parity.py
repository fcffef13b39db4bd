"""How fast are parities computed and lost blocks decoded, beside memcpy, torch and pyeclib?

    python -m bench.parity [--nodes 2 3 4] [--mb 256]

One stripe of k = nodes - parities data blocks, 256 MB of data in all, coded by one thread; figures
are bytes of data a second. Two parities are both computed here, which in a group two nodes share.
The peers are memcpy of as many bytes; for one parity ``torch.bitwise_xor`` block by block, and
numpy, which holdfast uses where there is no ISA-L; and pyeclib (``isa_l_rs_vand``) in pieces
of 1 MiB with an allocator told to keep what is freed: in one piece, or with pages that come and go,
it is ten times slower. What is decoded is compared with what was encoded before anything is timed.
"""

import argparse
import ctypes
from collections.abc import Callable

import numpy as np
import torch
from pyeclib.ec_iface import ECDriver

from bench.paired import paired
from bench.rows import record
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes

PIECE_BYTES = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
Run = Callable[[], None]


class Stripe:
    """Data, its parities, and room for what is decoded; all of it touched."""

    def __init__(self, data_blocks: int, parities: int, nbytes: int) -> None:
        self.k, self.m = data_blocks, parities
        block = nbytes // data_blocks // 64 * 64
        self.whole = np.random.default_rng(0).integers(0, 256, block * data_blocks, dtype=np.uint8)
        self.data = np.split(self.whole, data_blocks)
        self.coded = [np.full(block, 1, np.uint8) for _ in range(parities)]
        self.lost = tuple(range(min(parities, data_blocks)))
        self.decoded = {role: np.full(block, 1, np.uint8) for role in self.lost}
        self.copy = np.full(len(self.whole), 1, np.uint8)

    def encode(self) -> None:
        """All parities of the stripe."""
        for number, target in enumerate(self.coded):
            erasure_code.encode(number, target, self.data)

    def decode(self) -> None:
        """As many data blocks as there are parities, from the rest."""
        fragments = dict(enumerate([*self.data, *self.coded]))
        alive = [role for role in fragments if role not in self.lost][: self.k]
        erasure_code.decode(self.decoded, {role: fragments[role] for role in alive}, self.k)

    def check(self) -> None:
        """Encode, decode, and stop the bench if a bit differs."""
        self.encode()
        self.decode()
        for role, block in self.decoded.items():
            if not np.array_equal(block, self.data[role]):
                raise SystemExit(f"block {role} of {self.k} + {self.m} was decoded wrong")

    def memcpy(self) -> None:
        """The limit: the data read and written once."""
        np.copyto(self.copy, self.whole)


def torch_xor(blocks: list[Bytes], target: Bytes) -> Run:
    """XOR of whole blocks, one after the other."""
    tensors = [torch.from_numpy(block).view(torch.int64) for block in blocks]
    out = torch.from_numpy(target).view(torch.int64)

    def run() -> None:
        torch.bitwise_xor(tensors[0], tensors[1], out=out)
        for tensor in tensors[2:]:
            torch.bitwise_xor(out, tensor, out=out)

    return run


def keep_freed_memory() -> None:
    """Have malloc hold on to its pages; without it pyeclib pays a page fault every 4 KiB."""
    libc = ctypes.CDLL(None)
    for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        if not libc.mallopt(setting, 2**30):
            raise SystemExit(
                "this libc's malloc cannot be tuned: pyeclib's figures would be unfair"
            )


def pyeclib_runs(stripe: Stripe) -> tuple[Run, Run]:
    """pyeclib's encode, and its reconstruct of the same losses; its fragments are its own."""
    driver = ECDriver(k=stripe.k, m=stripe.m, ec_type="isa_l_rs_vand")
    raw = stripe.whole.tobytes()
    pieces = [raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)]
    lost = list(stripe.lost)
    alive = [driver.encode(piece)[len(lost) :] for piece in pieces]

    def encode() -> None:
        for piece in pieces:
            driver.encode(piece)

    def decode() -> None:
        for fragments in alive:
            driver.reconstruct(fragments, lost)

    return encode, decode


def peers_of(stripe: Stripe, operation: str) -> dict[str, Run]:
    """What an operation is compared with."""
    encode, decode = pyeclib_runs(stripe)
    peers = {"memcpy": stripe.memcpy, "pyeclib": encode if operation == "encode" else decode}
    if stripe.m == 1 and stripe.k > 1 and operation == "encode":
        peers["torch"] = torch_xor(stripe.data, stripe.coded[0])
        peers["numpy"] = lambda: erasure_code._xor(stripe.coded[0], stripe.data)
    return peers


def main() -> None:
    """Check, time, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(range(2, 9)))
    parser.add_argument("--mb", type=int, default=256, help="data of a stripe, in 10⁶ bytes")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for nodes in args.nodes:
        for parities in range(1, min(2, nodes - 1) + 1):
            measure(nodes, parities, args.mb * 10**6, args.pairs)


def measure(nodes: int, parities: int, nbytes: int, pairs: int) -> None:
    """All operations on one stripe, against all peers."""
    stripe = Stripe(nodes - parities, parities, nbytes)
    stripe.check()
    size = len(stripe.whole)
    for operation, run in {"encode": stripe.encode, "decode": stripe.decode}.items():
        for peer, baseline in peers_of(stripe, operation).items():
            timed = paired(baseline, run, pairs=pairs, warmup=1)
            row = {
                "operation": operation,
                "nodes": nodes,
                "parities": parities,
                "lost": len(stripe.lost) if operation == "decode" else 0,
                "data_bytes": size,
                "peer": peer,
                "gb_s": round(size / timed["candidate_s"] / 1e9, 2),
                "peer_gb_s": round(size / timed["baseline_s"] / 1e9, 2),
            }
            record("parity", row | timed)


if __name__ == "__main__":
    main()
