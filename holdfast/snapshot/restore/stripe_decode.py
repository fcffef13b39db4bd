"""Shards put in place column by column: fetched, or decoded from what is left of their stripe.

A column is one bucket of every fragment of a stripe. What it lacks is decoded from the rest of it,
with each choice of parities in turn until the result matches its digests.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from threading import Event, Lock
from typing import Protocol, TypeVar

import numpy as np

from holdfast import digest
from holdfast.errors import SnapshotCorrupt, SnapshotError, SnapshotLost
from holdfast.snapshot.layout.shares import buckets_of, span_of
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Fragment
from holdfast.snapshot.restore.expected_digests import ExpectedDigests, divergence

# The number of damaged buckets that a report describes.
_NAMED = 16
# The number of threads that decode; each holds at most a column of a stripe.
_DECODERS = 4

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Blocks = dict[int, Bytes]  # by role


class Source(Protocol):
    """The memories of a sharding group: one buffer for each node, of one part."""

    def read(self, node: int, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes at ``offset`` of that node's buffer.

        Several threads call it at once, but never for the same node.

        Raises:
            ConnectionError, TimeoutError, SnapshotError: the node cannot provide them and is not
                asked again.
        """


@dataclass
class Report:
    """An account of how a state was rebuilt.

    Attributes:
        lost: the nodes that could not be read, or not to the end, with the reason.
        damaged: descriptions of the first sixteen buckets that did not match their digests, and of
            missing manifests.
        damaged_buckets: the number of buckets that did not match their digests.
        rebuilt_nodes: the nodes whose data was decoded, completely or in part.
        rebuilt_buckets, rebuilt_bytes: the amount of data that was decoded.
        fetched_bytes: the number of bytes read from the nodes.
    """

    lost: dict[int, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    damaged_buckets: int = 0
    rebuilt_nodes: set[int] = field(default_factory=set)
    rebuilt_buckets: int = 0
    rebuilt_bytes: int = 0
    fetched_bytes: int = 0

    def add(self, other: "Report") -> None:
        """Add the account of another part of the state."""
        self.lost = other.lost | self.lost
        self.damaged = [*self.damaged, *other.damaged][:_NAMED]
        self.rebuilt_nodes |= other.rebuilt_nodes
        for name in ("damaged_buckets", "rebuilt_buckets", "rebuilt_bytes", "fetched_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Fetcher:
    """Reads fragments and records what is lost or damaged; safe for several threads."""

    def __init__(self, digests: ExpectedDigests, alive: Collection[int], source: Source) -> None:
        nodes = range(digests.striping.nodes)
        self.digests, self.report = digests, Report()
        self.report.lost = {node: "it is gone" for node in nodes if node not in alive}
        missing = [node for node in nodes if node not in digests.nodes]
        self.report.damaged = [f"the manifest of node {node} is missing" for node in missing]
        self._source = source
        self._locks = [Lock() for _ in nodes]
        self._count = Lock()
        self._bad: set[tuple[int, int, int]] = set()

    def fetch(self, fragment: Fragment, bucket: int, out: Bytes) -> bool:
        """Fill ``out`` with a bucket; return false and record why if it is not available intact."""
        if not self.digests.expected(fragment, bucket):
            return False
        with self._locks[fragment.node]:
            if fragment.node in self.report.lost or not self._read(fragment, bucket, out):
                return False
        if self.intact(fragment, bucket, out):
            return True
        with self._count:
            self._bad.add((fragment.node, fragment.stripe, bucket))
            self.report.damaged_buckets += 1
            if len(self.report.damaged) < _NAMED:
                self.report.damaged.append(self.digests.where(fragment, bucket))
        return False

    def _read(self, fragment: Fragment, bucket: int, out: Bytes) -> bool:
        offset = span_of(fragment.offset, fragment.nbytes, bucket).start
        try:
            self._source.read(fragment.node, offset, out.data)
        except (ConnectionError, TimeoutError, SnapshotError) as error:
            self.report.lost[fragment.node] = f"it could not be read: {error}"
            return False
        with self._count:
            self.report.fetched_bytes += len(out)
        return True

    def intact(self, fragment: Fragment, bucket: int, data: Bytes) -> bool:
        """Return true if these bytes match the digest of the bucket."""
        return digest.digest(data) == self.digests.expected(fragment, bucket)

    def rebuilt(self, fragment: Fragment, nbytes: int) -> None:
        """Count a bucket of that fragment as decoded."""
        with self._count:
            self.report.rebuilt_nodes.add(fragment.node)
            self.report.rebuilt_buckets += 1
            self.report.rebuilt_bytes += nbytes

    def faults(self, fragment: Fragment, bucket: int) -> list[str]:
        """Return the known reasons why a bucket is not available intact; empty if it is."""
        lost = self.report.lost.get(fragment.node)
        reasons = [] if lost is None else [lost]
        if self.is_damaged(fragment, bucket):
            reasons.append("it does not match its digest")
        if not self.digests.expected(fragment, bucket):
            reasons.append("no manifest that has its digest is left")
        return reasons

    def is_damaged(self, fragment: Fragment, bucket: int) -> bool:
        """Return true if the bucket was read and did not match its digest."""
        return (fragment.node, fragment.stripe, bucket) in self._bad


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
        """Fetch or decode all of the shards, and verify them."""
        columns: dict[tuple[int, int], set[int]] = defaultdict(set)
        # One thread for each node, so that all links are used at once.
        for missing in self._each(self._fetch_shard, list(self._shards), len(self._shards)):
            for block, bucket in missing:
                columns[bucket, block.stripe].add(block.node)
        # Columns that are neighbours in this order have their parities on different nodes.
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
            reason = (
                divergence(fetcher.digests.shares.values())
                or "the parities were computed from other data"
            )
            faults.append(f"the decoded bytes do not match their digest: {reason}")
        damaged = mismatch or any(fetcher.is_damaged(f, bucket) for f in faulty)
        kind = SnapshotCorrupt if damaged else SnapshotLost
        return kind(
            f"stripe {stripe}, bucket {bucket} cannot be rebuilt with {self._striping.parities} "
            f"parities: {'; '.join(faults)}; reload a persisted checkpoint"
        )
