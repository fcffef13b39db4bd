"""The manifests of a sharding group: the places of its fragments, and the digests they must have.

Two ranks know the digest of a data block: its owner, and the rank that computed a parity from its
own replica of the block. So the manifest of one of them may be lost.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations

from holdfast.errors import SnapshotLost, SnapshotMismatch
from holdfast.snapshot.layout.shares import ShareManifest, buckets_of, digest_at, paths_at
from holdfast.snapshot.parity.stripes import Fragment


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

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes whose manifests are available."""
        return frozenset(self.shares)

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
    The result names the nodes, stripe, bucket and paths of the first difference, and how many there
    are.
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
