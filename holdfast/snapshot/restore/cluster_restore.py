"""Restoring a state that several nodes divide (rung 4), from the memories that are left.

All ranks of all nodes take part: they learn what every node holds, put the newest step together
that survives, and load it if each of them found all of its own intact; else the next older one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from holdfast import events
from holdfast.errors import SnapshotCorrupt, SnapshotError, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.client.membership import Membership
from holdfast.snapshot.client.session import SmpSession
from holdfast.snapshot.client.training_state import Training
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.shares import ShareManifest
from holdfast.snapshot.protocol.roster import Roster
from holdfast.snapshot.restore import assembly, choose_step
from holdfast.snapshot.restore.assembly import Part
from holdfast.snapshot.restore.choose_step import Candidate, StripeSet
from holdfast.snapshot.restore.fetch import Report
from holdfast.snapshot.transport.remote import Remote


def agree(
    membership: Membership, session: SmpSession, training: Training
) -> tuple[int, Tree] | None:
    """Agree with the ranks of all nodes on the newest step that survives.

    A state that was rebuilt is recorded as ``snapshot_rebuilt``, one that could not be as
    ``snapshot_corrupt``.

    Returns:
        The step, which the SMPs go on from, and this rank's state; None: no step is held.

    Raises:
        SnapshotLost: steps were committed, none can be put together.
        SnapshotMismatch: they belong to another number of nodes, or to another state.
        SmpUnavailable: an SMP or a rank did not answer in time.
        ConnectionError: this node's SMP is gone.
    """
    roster = membership.join(session)
    inventories = membership.of_nodes(membership.gather(session.inventory()))
    sets, world_size = membership.sets, membership.world_size
    for candidate in choose_step.candidates(inventories, sets, membership.parities, world_size):
        tree = _tried(candidate, membership, roster, training)
        if tree is not None:
            session.resume(candidate.stamp)
            return candidate.stamp.step, tree
    held = max((held["step"] for said in inventories for held in said["slots"]), default=None)
    if held is not None:
        raise SnapshotLost(
            f"step {held} was held by too few of {len(inventories)} nodes to be put together, and "
            f"parities make up for {membership.parities}: bring a node back whose SMP still runs, "
            "or start from a checkpoint in another run_dir"
        )
    return None


def _tried(
    candidate: Candidate, membership: Membership, roster: Roster, training: Training
) -> Tree | None:
    """Return the state of this rank, if every rank has found its own intact."""
    damage = ""
    tree: Tree = {}
    try:
        started_s = time.monotonic()
        sets, reach = choose_step.stripe_sets([membership.seat.group]), partial(Remote, roster)
        own, memory, report = Rebuild(candidate, membership.rank, sets, reach).run()
        stable = memory[: own.share.sizes[own.share.node]]
        tree = training.tree(own.manifest, assembly.tensors(own, stable))
        _record_rebuilt(candidate, report, time.monotonic() - started_s)
    except (SnapshotCorrupt, SnapshotLost) as error:
        damage = str(error)
    damages = membership.gather(damage)
    if not any(damages):
        return tree
    if damage:
        detail = {"step": candidate.stamp.step, "reason": damage}
        events.record(EventKind.SNAPSHOT_CORRUPT, detector="digest", rung="rebuild", detail=detail)
    return None


def _record_rebuilt(candidate: Candidate, report: Report, seconds: float) -> None:
    if not report.rebuilt_buckets:
        return
    detail = {
        "step": candidate.stamp.step,
        "nodes": sorted(report.rebuilt_nodes),
        "bytes": report.rebuilt_bytes,
        "buckets": report.rebuilt_buckets,
        "fetched_bytes": report.fetched_bytes,
        "damaged": report.damaged,
    }
    events.record(
        EventKind.SNAPSHOT_REBUILT,
        detector="digest",
        rung="rebuild",
        duration_s=seconds,
        detail=detail,
    )


class _Memories:
    """The buffers of one stripe set, by the index of their node in the group."""

    def __init__(
        self, candidate: Candidate, ranks: StripeSet, remotes: Mapping[int, Remote]
    ) -> None:
        self._stamp, self._ranks = candidate.stamp, ranks
        self._remotes = remotes
        self.alive = [index for index, rank in enumerate(ranks) if rank in candidate.slots]

    def read(self, node: int, offset: int, out: memoryview) -> None:
        """Read bytes of a node's buffer (``fetch.Source``)."""
        self._remotes[self._ranks[node]].read(self._ranks[node], self._stamp, offset, out)


class Rebuild:
    """One rank's state of one step, out of the memories of its sharding group.

    Args:
        candidate: the step, and where its pieces are.
        rank: whose state.
        sets: the stripe sets of its sharding group.
        reach: a node's memory, for each connection that is needed.
        opaque: as in ``manifest.decode``.
    """

    def __init__(
        self,
        candidate: Candidate,
        rank: int,
        sets: Sequence[StripeSet],
        reach: Callable[[int], Remote],
        *,
        opaque: bool = False,
    ) -> None:
        self._candidate, self._rank, self._sets, self._opaque = candidate, rank, sets, opaque
        # One connection a rank's buffer, as several are read at once.
        ranks = {rank for ranks in sets for rank in ranks} | {rank}
        slots, described = candidate.slots, (candidate.manifests, candidate.mirrors)
        self._slots = {rank: reach(slots[rank]) for rank in ranks if rank in slots}
        self._manifests = {
            rank: [reach(nodes[rank]) for nodes in described if rank in nodes] for rank in ranks
        }

    def run(self, extra_nbytes: int = 0) -> tuple[ShareManifest, torch.Tensor, Report]:
        """Return the rank's manifest, and its stable tensors, verified, at the start of new memory.

        After them, from ``private_start`` on, there are ``extra_nbytes`` bytes for the caller.

        Raises:
            SnapshotCorrupt, SnapshotLost: it cannot be; says what is missing.
            SnapshotMismatch: the pieces are not of one state.
        """
        try:
            described = {rank: self._described(rank) for rank in self._manifests}
            own = described[self._rank]
            if own is None:
                raise SnapshotCorrupt(f"the manifest of rank {self._rank} is nowhere intact")
            memories = [_Memories(self._candidate, ranks, self._slots) for ranks in self._sets]
            parts = [
                Part({i: found for i, r in enumerate(ranks) if (found := described[r])}, memory)
                for ranks, memory in zip(self._sets, memories, strict=True)
            ]
            alive = [memory.alive for memory in memories]
            node = None if own.share.replicated else own.share.node
            memory = torch.empty(own.private_start + extra_nbytes, dtype=torch.uint8)
            into = memory[: own.share.sizes[own.share.node]]
            assembled = assembly.assemble_parts(parts, alive, node=node, into=into)
            return own, memory, assembled.report
        finally:
            for remote in (*self._slots.values(), *chain(*self._manifests.values())):
                remote.close()

    def _described(self, rank: int) -> ShareManifest | None:
        """Return a rank's manifest, if it can be had intact."""
        found = (self._manifest(remote, rank) for remote in self._manifests[rank])
        described = next(filter(None, found), None)
        if described is None or described.share.replicated or rank not in self._slots:
            return described
        digests = replace(described.digests, parity=self._parities(rank))
        return replace(described, digests=digests)

    def _manifest(self, remote: Remote, rank: int) -> ShareManifest | None:
        """Return a rank's manifest as one node has it, if that is intact."""
        try:
            found = remote.manifest(rank, self._candidate.stamp)
            return ShareManifest.decode(*found, opaque=self._opaque) if found else None
        except (ConnectionError, SnapshotError):
            return None

    def _parities(self, rank: int) -> dict[int, bytes]:
        """Return the digests of the parities in a rank's slot; none without an answer."""
        try:
            return self._slots[rank].parities(rank, self._candidate.stamp)
        except ConnectionError:
            return {}
