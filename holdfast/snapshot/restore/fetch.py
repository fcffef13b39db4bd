"""Fragments fetched from the memories of other nodes, bucket by bucket, and checked."""

from collections.abc import Collection
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from holdfast import digest
from holdfast.errors import SnapshotError
from holdfast.snapshot.layout.shares import span_of
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Fragment
from holdfast.snapshot.restore.expected_digests import ExpectedDigests

_NAMED = 16


class Source(Protocol):
    """The memories of a sharding group: of one part, one buffer a node."""

    def read(self, node: int, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes at ``offset`` of that node's buffer.

        Called by several threads at once, but for one node by one at a time.

        Raises:
            ConnectionError, TimeoutError, SnapshotError: the node cannot give them; it is not asked
                again.
        """


@dataclass
class Report:
    """An account of how a state came together.

    Attributes:
        lost: the nodes that could not be read, or not to the end, and why.
        damaged: buckets that did not match their digests and manifests that are missing, in words;
            the first sixteen. ``damaged_buckets`` counts all.
        rebuilt_nodes: whose data was decoded, in part or whole; ``rebuilt_buckets`` and
            ``rebuilt_bytes``: how much of it.
        fetched_bytes: read from the nodes.
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
    """Reads fragments, and keeps account of what is lost or damaged; for several threads."""

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
        """Fill ``out`` with a bucket; False if it cannot be had intact, which is accounted for."""
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
        """Whether these bytes are what the tensors held."""
        return digest.digest(data) == self.digests.expected(fragment, bucket)

    def rebuilt(self, fragment: Fragment, nbytes: int) -> None:
        """Count a bucket of that fragment as decoded."""
        with self._count:
            self.report.rebuilt_nodes.add(fragment.node)
            self.report.rebuilt_buckets += 1
            self.report.rebuilt_bytes += nbytes

    def faults(self, fragment: Fragment, bucket: int) -> list[str]:
        """Say why a bucket cannot be had intact, as far as is known; empty if it can."""
        lost = self.report.lost.get(fragment.node)
        reasons = [] if lost is None else [lost]
        if self.is_damaged(fragment, bucket):
            reasons.append("it does not match its digest")
        if not self.digests.expected(fragment, bucket):
            reasons.append("nobody is left who knows its digest")
        return reasons

    def is_damaged(self, fragment: Fragment, bucket: int) -> bool:
        """Whether it could be read and did not match its digest."""
        return (fragment.node, fragment.stripe, bucket) in self._bad
