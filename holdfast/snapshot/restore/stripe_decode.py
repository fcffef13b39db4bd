"""Shards put in place column by column: fetched, or decoded from what is left of their stripe.

A column is one bucket of every fragment of a stripe. What it lacks is decoded from the rest of it,
with each choice of parities in turn until the result matches its digests. Two ranks know the digest
of a data block: its owner, and the rank that computed a parity from its own replica of the block.
So the manifest of one of them may be lost.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from threading import Event, Lock
from typing import Protocol, TypeVar

import numpy as np

from holdfast import digest
from holdfast.errors import SnapshotCorrupt, SnapshotError, SnapshotLost, SnapshotMismatch
from holdfast.snapshot.layout.shares import ShareManifest, buckets_of, digest_at, paths_at, span_of
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Fragment

# The number of damaged buckets that a report describes.
_NAMED = 16
# The number of threads that decode; each holds at most a column of a stripe.
_DECODERS = 4
_DAMAGED = "it does not match its digest"

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Blocks = dict[int, Bytes]  # by role


class ExpectedDigests:
    """The manifests of one step and one part, by node; mirrors replace those of lost nodes.

    Raises:
        SnapshotLost: no manifest is left.
        SnapshotMismatch: they are not of one state; names the nodes and what differs.
    """

    def __init__(self, shares: Mapping[int, ShareManifest]) -> None:
        if not shares:
            raise SnapshotLost("no manifest of the sharding group is left: reload a checkpoint")
        self.shares = dict(sorted(shares.items()))
        self.first = next(iter(self.shares))
        self.share = shares[self.first].share
        self.striping = self.share.striping
        for node in self.shares:
            self._check(node)

    def expected(self, fragment: Fragment, bucket: int) -> bytes:
        """Return the digest that a bucket must have; empty if no manifest left has it."""
        stripe, node = fragment.stripe, fragment.node
        owner = self.shares.get(node)
        if owner is not None:
            own, parity = owner.digests.data, owner.digests.parity
            kept = own if fragment.role < self.striping.data_blocks else parity
            return digest_at(kept.get(stripe, b""), bucket)
        readers = (other.digests.sources.get(stripe, {}) for other in self.shares.values())
        return next((digest_at(read[node], bucket) for read in readers if node in read), b"")

    def where(self, fragment: Fragment, bucket: int) -> str:
        """Describe a bucket: its node, stripe, number, and the tensors in it."""
        number = fragment.role - self.striping.data_blocks
        if number >= 0:
            return f"node {fragment.node}'s parity of stripe {fragment.stripe}, bucket {bucket}"
        paths = "whose manifest is lost"
        node = self.first if self.share.replicated else fragment.node
        if node in self.shares:
            span = self.share.place(fragment, bucket)
            paths = f"with {paths_at(self.shares[node].manifest.entries, span)}"
        return f"node {fragment.node}'s block of stripe {fragment.stripe}, bucket {bucket}, {paths}"

    def _check(self, node: int) -> None:
        ours, theirs = self.shares[self.first], self.shares[node]
        if theirs.share.node != node or replace(theirs.share, node=self.first) != self.share:
            raise SnapshotMismatch(
                f"the manifests of nodes {self.first} and {node} are not of one part of one state: "
                f"{self.share} and {theirs.share}"
            )
        if self.share.replicated and _striped(ours) != _striped(theirs):
            pairs = zip(_striped(ours), _striped(theirs), strict=False)
            counts = len(_striped(ours)), len(_striped(theirs))
            left, right = next((pair for pair in pairs if pair[0] != pair[1]), counts)
            raise SnapshotMismatch(
                f"nodes {self.first} and {node} hold no replicas of one state: {left} and {right}"
            )


def _striped(described: ShareManifest) -> list[tuple[object, ...]]:
    # Striped entries have no digests of their own. Devices may differ between replicas.
    entries = (entry for entry in described.manifest.entries if not entry.digest)
    return [(e.path, e.dtype, e.shape, e.offset) for e in entries]


def divergence(shares: Iterable[ShareManifest]) -> str:
    """Describe where replicas of a state differed when they were copied; empty if they did not.

    The bytes that a node read to compute a parity are compared with those that their owner read.
    """
    pairs = permutations(shares, 2)
    found = [text for reader, owner in pairs for text in _differences(reader, owner)]
    more = f", and {len(found) - 1} more buckets" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


def _differences(reader: ShareManifest, owner: ShareManifest) -> Iterator[str]:
    node = owner.share.node
    for stripe, sources in reader.digests.sources.items():
        seen, kept = sources.get(node, b""), owner.digests.data.get(stripe, b"")
        if seen == kept:
            continue
        fragment = owner.share.striping.fragment(stripe, node)
        for bucket in range(buckets_of(fragment.nbytes)):
            if digest_at(seen, bucket) != digest_at(kept, bucket):
                where = paths_at(owner.manifest.entries, owner.share.place(fragment, bucket))
                yield (
                    f"nodes {reader.share.node} and {node} hold different bytes of {where} "
                    f"(stripe {stripe}, bucket {bucket})"
                )


class Source(Protocol):
    """The memories of a sharding group: one buffer for each node, of one part."""

    def read(self, node: int, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes at ``offset`` of that node's buffer.

        Several threads call it at once, but never for the same node. After a ConnectionError,
        TimeoutError or SnapshotError the node is not asked again.
        """


@dataclass
class Report:
    """An account of how a state was rebuilt.

    ``lost`` has the nodes that could not be read, or not to the end, with the reason; ``damaged``
    describes the first sixteen buckets that did not match their digests, and missing manifests;
    ``rebuilt_nodes`` are those whose data was decoded, completely or in part.
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
        missing = [node for node in nodes if node not in digests.shares]
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
        if (fragment.node, fragment.stripe, bucket) in self._bad:
            reasons.append(_DAMAGED)
        if not self.digests.expected(fragment, bucket):
            reasons.append("no manifest that has its digest is left")
        return reasons


class Columns:
    """The shards of the ``wanted`` nodes, which lie in ``state`` one after another."""

    def __init__(self, fetcher: Fetcher, wanted: Collection[int], state: Bytes) -> None:
        self._fetcher, self._striping = fetcher, fetcher.digests.striping
        self._data = self._striping.data_blocks
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
            try:
                return list(pool.map(work, items))
            except BaseException:
                self._stopped.set()
                raise

    def _fetch_shard(self, node: int) -> list[tuple[Fragment, int]]:
        fragments = (self._striping.fragment(s, node) for s in range(self._striping.nodes))
        blocks = [block for block in fragments if block.role < self._data]
        cells = ((block, bucket) for block in blocks for bucket in range(buckets_of(block.nbytes)))
        fetch, room = self._fetcher.fetch, self._room
        return [each for each in cells if self._stopped.is_set() or not fetch(*each, room(*each))]

    def _room(self, block: Fragment, bucket: int) -> Bytes:
        columns = span_of(0, block.nbytes, bucket)
        if block.node not in self._shards or block.role >= self._data:
            return np.empty(columns.nbytes, np.uint8)
        first = block.offset + columns.start
        return self._shards[block.node][first : first + columns.nbytes]

    def _rebuild(self, column: tuple[tuple[int, int], set[int]]) -> None:
        (bucket, stripe), missing = column
        if self._stopped.is_set():
            return
        known: Blocks = {}
        lacking: list[Fragment] = []
        for block in self._striping.stripe(stripe)[: self._data]:
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
            erasure_code.decode(targets, known | parities, self._data)
            if all(self._fetcher.intact(block, bucket, out) for block, out in rooms):
                for block, out in rooms:
                    self._fetcher.rebuilt(block, len(out))
                return
            mismatch = True
        raise self._unsolved(bucket, stripe, lacking, mismatch)

    def _choices(self, bucket: int, stripe: int, count: int) -> Iterator[Blocks]:
        fragments = self._striping.stripe(stripe)[self._data :]
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

    def _unsolved(
        self, bucket: int, stripe: int, lacking: list[Fragment], mismatch: bool
    ) -> SnapshotError:
        digests, fragments = self._fetcher.digests, self._striping.stripe(stripe)
        found = [(f, self._fetcher.faults(f, bucket)) for f in fragments]
        known = [(f, why) for f, why in found if f in lacking or (f.role >= self._data and why)]
        faults = [f"{digests.where(f, bucket)}: {', '.join(why)}" for f, why in known]
        if mismatch:
            reason = divergence(digests.shares.values())
            reason = reason or "the parities were computed from other data"
            faults.append(f"the decoded bytes do not match their digest: {reason}")
        damaged = mismatch or any(_DAMAGED in why for _, why in known)
        kind = SnapshotCorrupt if damaged else SnapshotLost
        return kind(
            f"stripe {stripe}, bucket {bucket} cannot be rebuilt with {self._striping.parities} "
            f"parities: {'; '.join(faults)}; reload a persisted checkpoint"
        )
