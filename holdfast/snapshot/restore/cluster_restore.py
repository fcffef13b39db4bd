"""Restoring a state that several nodes divide (rung 4), from the memories that are left.

All ranks of all nodes take part: they exchange what every node holds, rebuild the newest step that
survives, and load it if each of them found all of its own part intact. Otherwise they try the next
older step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch

from holdfast import events
from holdfast.errors import SmpUnavailable, SnapshotCorrupt, SnapshotError, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.groups import StripeSet
from holdfast.snapshot.layout.manifest import Manifest
from holdfast.snapshot.layout.shares import ShareManifest
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.node import addresses
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.protocol.exchange import Call, Exchange, Gather
from holdfast.snapshot.protocol.roster import Roster, Stamp
from holdfast.snapshot.restore import assembly, choose_step, elastic
from holdfast.snapshot.restore.assembly import Part
from holdfast.snapshot.restore.choose_step import Candidate
from holdfast.snapshot.restore.elastic import Former
from holdfast.snapshot.restore.stripe_decode import Report
from holdfast.snapshot.transport.remote import Remote

# How often a rank tries to reach a node that has just said what it holds: for about three seconds.
_ATTEMPTS = 6


class Tried(NamedTuple):
    """What came of one rank's attempt to load a step: the state, or why there is none.

    It is damaged or lost, or a node that holds it could not be read.
    """

    tree: Tree
    damage: str = ""
    unreachable: str = ""


# Loads this rank's state of a step, from the nodes of the roster.
Load = Callable[[Candidate, Roster], Tried]


def agreeing(
    membership: Membership,
    address: str,
    load: Load,
    before: int,
    keep: int,
    note: Callable[[str], None],
    place_of: Callable[[str], addresses.Place] = addresses.own_place,
) -> Exchange[tuple[int, Tree] | None]:
    """Agree with the ranks of all nodes on the newest step before ``before`` that survives.

    ``address`` is this node's, ``keep`` the number of steps that are kept; ``note`` is told what
    was rebuilt (``snapshot_rebuilt``) or passed over (``snapshot_corrupt``). Return the step, from
    which the SMPs continue, and this rank's state; None if no step is held.

    Raises:
        SnapshotLost: steps were committed, but none can be rebuilt.
        SnapshotMismatch: they belong to another state, or cannot be dealt to these ranks.
        SmpUnavailable: an SMP or a rank did not answer in time, or a node that holds the newest
            step could not be reached.
        ConnectionError: this node's SMP is gone.
    """
    # A rank's memory may be on a node of another group, if nodes were numbered anew.
    roster = yield from membership.joining(address, place_of)
    roster = replace(roster, addresses=membership.addresses)
    inventories = yield from membership.gathering((yield Call("inventory")))
    about = membership.sets, membership.parities, membership.ranks_of_group()
    found = choose_step.candidates(inventories, *about, membership.world_size)
    if len(membership.cut) > 1:
        told = yield Gather({each.stamp for each in found})
        found = [each for each in found if all(each.stamp in stamps for stamps in told)]
    for candidate in (each for each in found if each.stamp.step < before):
        tried = load(candidate, roster)
        told = yield Gather((tried.damage, tried.unreachable))
        if _all_loaded(candidate.stamp.step, tried, told, note):
            yield Call("resume", (candidate.stamp,))
            return candidate.stamp.step, tried.tree
    slots = [held for said in inventories for held in said["slots"]]
    held = max((held["step"] for held in slots), default=None)
    if held is not None and held >= before:
        raise SnapshotLost(choose_step.none_before(before, keep))
    # A step that no node left has seen committed is nothing that the run relied on.
    if any(held["committed"] for held in slots):
        raise SnapshotLost(
            f"step {held} was held by too few of {len(inventories)} nodes to be rebuilt, because "
            f"parities replace {membership.parities} of each group: restart a node whose SMP still "
            "runs, or start from a checkpoint in another run_dir"
        )
    return None


def _all_loaded(
    step: int, tried: Tried, told: Sequence[tuple[str, str]], note: Callable[[str], None]
) -> bool:
    """Return true if every rank has found its own state intact.

    Raise SmpUnavailable if none found damage, and one could not reach the nodes that hold the step.
    """
    if damages := [damaged for damaged, _ in told if damaged]:
        note(f"step {step} was passed over: {tried.damage or damages[0]}")
        if tried.damage:
            detail, rung = {"step": step, "reason": tried.damage}, "rebuild"
            events.record(EventKind.SNAPSHOT_CORRUPT, detector="digest", rung=rung, detail=detail)
        return False
    if cut_off := next((reason for _, reason in told if reason), ""):
        raise SmpUnavailable(
            f"step {step} is held, and could not be read: {cut_off}. Nothing was given up for "
            "that: restart all ranks once the node can be reached, or without it"
        )
    return True


def load(
    membership: Membership,
    tree_of: Callable[[Manifest, list[torch.Tensor]], Tree],
    note: Callable[[str], None],
    candidate: Candidate,
    roster: Roster,
    remote: Callable[..., Remote] = Remote,
    training: Training | None = None,
) -> Tried:
    """Rebuild this rank's state of a step; ``tree_of`` makes it from manifest and tensors.

    ``remote`` returns a connection to a node's memory, with the arguments of ``Remote``. A state
    that other ranks wrote is dealt to those of ``training``.
    """
    remotes: list[Remote] = []

    def reach(node: int) -> Remote:
        remotes.append(remote(roster, node, attempts=_ATTEMPTS))
        return remotes[-1]

    try:
        started_s = time.monotonic()
        report, rebuilt = Report(), set[int]()

        def tensors(rank: int) -> tuple[Manifest, list[torch.Tensor]]:
            is_known = rank in candidate.sets
            known = candidate.sets[rank] if is_known else membership.sets_of(rank)
            own, memory, part = rebuild(candidate, rank, known, reach)
            report.add(part)
            rebuilt.update(known[0][index] // candidate.local_ranks for index in part.rebuilt_nodes)
            return own.manifest, assembly.tensors(own, memory)

        if not candidate.former:
            tree = tree_of(*tensors(membership.rank))
        world_size = membership.world_size
        if training and (candidate.former or elastic.is_needed(training, tree, world_size)):
            ranks, local = sorted(candidate.manifests), candidate.local_ranks
            first = membership.rank // local * local
            # Node by node, and not all begin at the same one.
            turned = sorted(ranks, key=lambda n: (n - first) % (ranks[-1] + 1))
            with closing(_Manifests(candidate, reach)) as manifests:
                read = partial(partial, manifests.of)
                everyone = {n: Former(read(n), partial(tensors, n)) for n in turned}
                tree = elastic.dealt(training, everyone)
        if report.rebuilt_buckets:
            nbytes, nodes = report.rebuilt_bytes, sorted(rebuilt)
            detail = {"step": candidate.stamp.step, "nodes": nodes, "damaged": report.damaged}
            detail |= {"bytes": nbytes, "buckets": report.rebuilt_buckets}
            detail |= {"fetched_bytes": report.fetched_bytes}
            kind, took_s = EventKind.SNAPSHOT_REBUILT, time.monotonic() - started_s
            events.record(kind, detector="digest", rung="rebuild", duration_s=took_s, detail=detail)
            named = ", ".join(map(str, nodes))
            note(f"{nbytes} bytes of node {named} rebuilt by the parities of others")
        return Tried(tree)
    except (SnapshotCorrupt, SnapshotLost) as error:
        if failures := [remote.failure for remote in remotes if remote.failure]:
            return Tried({}, unreachable=f"rank {membership.rank}: {failures[0]}")
        return Tried({}, damage=str(error))


class _Memories:
    """The buffers of one stripe set, by the index of their node in the group."""

    def __init__(
        self, candidate: Candidate, ranks: StripeSet, remotes: Mapping[int, Remote]
    ) -> None:
        self._stamp, self._ranks = candidate.stamp, ranks
        self._remotes = remotes
        self.alive = [index for index, rank in enumerate(ranks) if rank in candidate.slots]

    def read(self, node: int, offset: int, out: memoryview) -> None:
        """Read bytes of a node's buffer (``stripe_decode.Source``)."""
        self._remotes[self._ranks[node]].read(self._ranks[node], self._stamp, offset, out)


def rebuild(
    candidate: Candidate,
    rank: int,
    sets: Sequence[StripeSet],
    reach: Callable[[int], Remote],
    *,
    opaque: bool = False,
    extra_nbytes: int = 0,
) -> tuple[ShareManifest, torch.Tensor, Report]:
    """Rebuild one rank's state of one step from the memories of its sharding group.

    ``sets`` are the stripe sets of the group, and ``reach`` returns a new connection to a node's
    memory. Return the rank's manifest (``opaque`` as in ``manifest.decode``), memory that begins
    with its verified stable tensors and has ``extra_nbytes`` more for the caller, and a report.

    Raises:
        SnapshotCorrupt, SnapshotLost: the state cannot be rebuilt; says what is missing.
        SnapshotMismatch: the pieces are not of one state.
    """
    with ExitStack() as stack:

        @cache
        def connected(node: int) -> Remote:
            return stack.enter_context(closing(reach(node)))

        ranks = {member for members in sets for member in members} | {rank}
        # One connection to each node: of its ranks only one at a time is read (``Fetcher``).
        slots = {each: connected(node) for each, node in candidate.slots.items() if each in ranks}
        described = {each: _described(candidate, each, slots, connected, opaque) for each in ranks}
        own = _intact(described[rank], rank)
        memories = [_Memories(candidate, members, slots) for members in sets]
        parts = [
            Part({i: found for i, each in enumerate(members) if (found := described[each])}, memory)
            for members, memory in zip(sets, memories, strict=True)
        ]
        alive = [memory.alive for memory in memories]
        node = None if own.share.replicated else own.share.node
        memory = torch.empty(own.private_start + extra_nbytes, dtype=torch.uint8)
        into = memory[: own.share.own_nbytes]
        return own, memory, assembly.assemble_parts(parts, alive, node=node, into=into).report


class _Manifests:
    """The manifests of former ranks, read once; the connection to the node asked last is kept."""

    def __init__(self, candidate: Candidate, reach: Callable[[int], Remote]) -> None:
        self._candidate, self._reach = candidate, reach
        self._node, self._kept = -1, ExitStack()
        self.of = cache(self._read)

    def close(self) -> None:
        """End the connection."""
        self._kept.close()

    def _read(self, rank: int) -> Manifest:
        return _intact(_described(self._candidate, rank, {}, self._connected, True), rank).manifest

    def _connected(self, node: int) -> Remote:
        if node != self._node:
            self._kept.close()
            self._node, self._remote = node, self._kept.enter_context(closing(self._reach(node)))
        return self._remote


def _intact(found: ShareManifest | None, rank: int) -> ShareManifest:
    if found is None:
        raise SnapshotCorrupt(f"the manifest of rank {rank} is intact on no node")
    return found


def _described(
    candidate: Candidate,
    rank: int,
    slots: Mapping[int, Remote],
    connected: Callable[[int], Remote],
    opaque: bool,
) -> ShareManifest | None:
    """Return a rank's manifest, or None if no node has it intact."""
    nodes, stamp = candidate.manifests.get(rank, ()), candidate.stamp
    found = (_manifest(connected(node), rank, stamp, opaque) for node in nodes)
    described = next(filter(None, found), None)
    if described is None or described.share.replicated or rank not in slots:
        return described
    parities: dict[int, bytes] = {}
    with suppress(ConnectionError):
        parities = slots[rank].parities(rank, stamp)
    return replace(described, digests=replace(described.digests, parity=parities))


def _manifest(remote: Remote, rank: int, stamp: Stamp, opaque: bool) -> ShareManifest | None:
    """Return a rank's manifest from one node, or None if it is not intact there."""
    try:
        found = remote.manifest(rank, stamp)
        return ShareManifest.decode(*found, opaque=opaque) if found else None
    except (ConnectionError, SnapshotError):
        return None
