"""Shards put in place column by column: fetched, or decoded from what is left of their stripe.

A column is one bucket of every fragment of a stripe. What it lacks is decoded from the rest of it,
with each choice of parities in turn until the result matches its digests.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from threading import Event
from typing import TypeVar

import numpy as np

from holdfast.errors import SnapshotCorrupt, SnapshotError, SnapshotLost
from holdfast.snapshot.layout.shares import buckets_of, span_of
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Fragment
from holdfast.snapshot.restore.fetch import Fetcher

# Each holds at most a column of a stripe.
_DECODERS = 4

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Blocks = dict[int, Bytes]  # by role


class Columns:
    """The shards of the ``wanted`` nodes, which lie in ``state`` one after another."""

    def __init__(self, fetcher: Fetcher, wanted: Collection[int], state: Bytes) -> None:
        self._fetcher, self._striping = fetcher, fetcher.digests.striping
        self._shards: dict[int, Bytes] = {}
        start = 0
        for node in sorted(wanted):
            stop = start + self._striping.shard_nbytes[node]
            self._shards[node] = state[start:stop]
            start = stop
        self._stopped = Event()

    def fill(self) -> None:
        """Put all of it in place, verified.

        Raises:
            SnapshotLost: too much of a column cannot be read. SnapshotCorrupt: or is damaged.
        """
        columns: dict[tuple[int, int], set[int]] = defaultdict(set)
        # One thread a node, so that all links carry at once.
        for missing in self._each(self._fetch_shard, list(self._shards), len(self._shards)):
            for block, bucket in missing:
                columns[bucket, block.stripe].add(block.node)
        # Neighbours in this order have their parities on different nodes.
        self._each(self._rebuild, sorted(columns.items()), _DECODERS)

    def _each(
        self, work: Callable[[Item], Answer], items: list[Item], threads: int
    ) -> list[Answer]:
        with ThreadPoolExecutor(threads, "holdfast-assembly") as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stopped.set()
                raise

    def _fetch_shard(self, node: int) -> list[tuple[Fragment, int]]:
        fragments = (self._striping.fragment(s, node) for s in range(self._striping.nodes))
        blocks = [block for block in fragments if block.role < self._striping.data_blocks]
        cells = ((block, bucket) for block in blocks for bucket in range(buckets_of(block.nbytes)))
        return [cell for cell in cells if self._stopped.is_set() or not self._fetch(*cell)]

    def _fetch(self, block: Fragment, bucket: int) -> bool:
        return self._fetcher.fetch(block, bucket, self._room(block, bucket))

    def _room(self, block: Fragment, bucket: int) -> Bytes:
        columns = span_of(0, block.nbytes, bucket)
        if block.node not in self._shards or block.role >= self._striping.data_blocks:
            return np.empty(columns.nbytes, np.uint8)
        first = block.offset + columns.start
        return self._shards[block.node][first : first + columns.nbytes]

    def _rebuild(self, column: tuple[tuple[int, int], set[int]]) -> None:
        (bucket, stripe), missing = column
        if self._stopped.is_set():
            return
        known: Blocks = {}
        lacking: list[Fragment] = []
        for block in self._fragments(stripe)[: self._striping.data_blocks]:
            out = self._room(block, bucket)
            wanted = block.node in self._shards
            held = block.node not in missing if wanted else self._fetcher.fetch(block, bucket, out)
            if held or not len(out):
                known[block.role] = out
            else:
                lacking.append(block)
        self._solve(bucket, stripe, known, lacking)

    def _solve(self, bucket: int, stripe: int, known: Blocks, lacking: list[Fragment]) -> None:
        rooms = [(b, self._room(b, bucket)) for b in lacking if b.node in self._shards]
        told = all(self._fetcher.digests.expected(block, bucket) for block, _ in rooms)
        mismatch = False
        for parities in self._choices(bucket, stripe, len(lacking)) if told else ():
            targets = {block.role: out for block, out in rooms}
            erasure_code.decode(targets, known | parities, self._striping.data_blocks)
            if all(self._fetcher.intact(block, bucket, out) for block, out in rooms):
                for block, out in rooms:
                    self._fetcher.rebuilt(block, len(out))
                return
            mismatch = True
        raise self._unsolved(bucket, stripe, lacking, mismatch)

    def _choices(self, bucket: int, stripe: int, count: int) -> Iterator[Blocks]:
        fragments = self._fragments(stripe)[self._striping.data_blocks :]
        fetched: dict[int, Bytes | None] = {}
        for choice in combinations(fragments, count):
            for fragment in choice:
                if fragment.role not in fetched:
                    out = self._room(fragment, bucket)
                    intact = self._fetcher.fetch(fragment, bucket, out)
                    fetched[fragment.role] = out if intact else None
            blocks = {f.role: held for f in choice if (held := fetched[f.role]) is not None}
            if len(blocks) == count:
                yield blocks

    def _fragments(self, stripe: int) -> list[Fragment]:
        found = [self._striping.fragment(stripe, node) for node in range(self._striping.nodes)]
        return sorted(found, key=lambda fragment: fragment.role)

    def _unsolved(
        self, bucket: int, stripe: int, lacking: list[Fragment], mismatch: bool
    ) -> SnapshotError:
        fetcher, parities = self._fetcher, self._fragments(stripe)[self._striping.data_blocks :]
        faulty = [*lacking, *(f for f in parities if fetcher.faults(f, bucket))]
        faults = [
            f"{fetcher.digests.where(f, bucket)}: {', '.join(fetcher.faults(f, bucket))}"
            for f in faulty
        ]
        if mismatch:
            reason = fetcher.digests.divergence() or "parities of other data"
            faults.append(f"what was decoded does not match its digest: {reason}")
        damaged = mismatch or any(fetcher.is_damaged(f, bucket) for f in faulty)
        kind = SnapshotCorrupt if damaged else SnapshotLost
        return kind(
            f"stripe {stripe}, bucket {bucket} cannot be rebuilt with {self._striping.parities} "
            f"parities: {'; '.join(faults)}; reload a persisted checkpoint"
        )
