"""What the manifests of a sharding group say of its fragments: where they lie, what they must be.

A data block has two witnesses: its owner, and whoever computed a parity from its own replica of it.
So the manifest of a node may be lost, too.
"""

from collections.abc import Mapping
from dataclasses import replace

from holdfast.errors import SnapshotLost, SnapshotMismatch
from holdfast.snapshot.shares import ShareManifest, digest_at, divergence, paths_at
from holdfast.snapshot.stripes import Fragment


class Witnesses:
    """The manifests of one step and one part, by node; those of lost nodes are mirrors.

    Raises:
        SnapshotLost: there is none.
        SnapshotMismatch: they are not of one state; names the nodes and what differs.
    """

    def __init__(self, shares: Mapping[int, ShareManifest]) -> None:
        if not shares:
            raise SnapshotLost("no manifest of the sharding group is left: reload a checkpoint")
        self._shares = dict(sorted(shares.items()))
        self.first = next(iter(self._shares))
        self.share = shares[self.first].share
        self.striping = self.share.striping
        for node in self._shares:
            self._check(node)

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes whose manifests are there."""
        return frozenset(self._shares)

    def expected(self, fragment: Fragment, bucket: int) -> bytes:
        """The digest that a bucket must have; empty if nobody is left who knows."""
        stripe, node = fragment.stripe, fragment.node
        owner = self._shares.get(node)
        if owner is not None:
            own, parity = owner.digests.data, owner.digests.parity
            kept = own if fragment.role < self.striping.data_blocks else parity
            return digest_at(kept.get(stripe, b""), bucket)
        readers = (other.digests.sources.get(stripe, {}) for other in self._shares.values())
        return next((digest_at(read[node], bucket) for read in readers if node in read), b"")

    def where(self, fragment: Fragment, bucket: int) -> str:
        """A bucket in words: its node, stripe, number, and the tensors that lie there."""
        number = fragment.role - self.striping.data_blocks
        if number >= 0:
            return f"node {fragment.node}'s parity of stripe {fragment.stripe}, bucket {bucket}"
        paths = self._paths(fragment, bucket)
        return f"node {fragment.node}'s block of stripe {fragment.stripe}, bucket {bucket}, {paths}"

    def diverged(self) -> str:
        """Where the replicas were not the same; empty: nowhere, as far as is known."""
        every = list(self._shares.values())
        found = (divergence(mine, every[at + 1 :]) for at, mine in enumerate(every))
        return next(filter(None, found), "")

    def _paths(self, fragment: Fragment, bucket: int) -> str:
        node = self.first if self.share.replicated else fragment.node
        if node not in self._shares:
            return "whose manifest is lost"
        span = self.share.place(fragment, bucket)
        return f"with {paths_at(self._shares[node].manifest.entries, span)}"

    def _check(self, node: int) -> None:
        ours, theirs = self._shares[self.first], self._shares[node]
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
    # Only private entries have digests of their own; devices may differ.
    entries = (entry for entry in described.manifest.entries if not entry.digest)
    return [(e.path, e.dtype, e.shape, e.offset) for e in entries]
