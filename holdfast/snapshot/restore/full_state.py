"""The full states of a node's ranks, from its memory or rebuilt from all nodes of its group.

The step is pinned on every node of the group meanwhile, and snapshots go on. As many nodes may be
missing as there are parities. A node that does not answer soon counts as missing, so that reading
an old step of lost nodes does not delay a run that has restarted without them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import torch

from holdfast import config
from holdfast.digest.tensors import tensor_digest
from holdfast.errors import SnapshotLost
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout import manifest
from holdfast.snapshot.layout.flat_buffer import aligned
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.layout.shares import ShareManifest
from holdfast.snapshot.protocol.roster import Roster, Stamp
from holdfast.snapshot.restore import local_parts
from holdfast.snapshot.restore.choose_step import Candidate
from holdfast.snapshot.restore.cluster_restore import rebuild
from holdfast.snapshot.restore.reader import Leased, Reader
from holdfast.snapshot.transport.remote import Remote

Reach = Callable[[int], Remote]

# The share of the timeout for each answer of a node.
_SHARE_OF_PATIENCE = 0.1


def full_state(leased: Leased, reader: Reader) -> Leased:
    """Return a pinned step with the full state of every local rank; damaged parts are rebuilt.

    Raises:
        SnapshotLost: more nodes than there are parities do not hold the step any more, or cannot be
            reached.
        SnapshotCorrupt: more is damaged than can be rebuilt.
    """
    divided = [part for part in leased.parts if _is_divided(part)]
    roster = reader.roster()
    if roster is None or not divided:
        return replace(leased, parts=_of_one_node(leased, divided)) if divided else leased
    reach = partial(Remote, roster, patience_s=_SHARE_OF_PATIENCE * config.timeout_s())
    with ExitStack() as stack:
        left = _pinned(stack, roster, reach, Stamp(leased.epoch, leased.step))
        candidate = _candidate(roster, Stamp(leased.epoch, leased.step), left)

        def holders(rank: int, own: ShareManifest) -> object:
            # Replicas on one node share one copy of their stable tensors here.
            return roster.sets[rank] if own.share.replicated else rank

        def build(rank: int, extra_nbytes: int) -> torch.Tensor:
            number, sets = roster.first_rank + rank, roster.sets[rank]
            return rebuild(candidate, number, sets, reach, opaque=True, extra_nbytes=extra_nbytes)[
                1
            ]

        parts = _put_together(leased.parts, holders, build)
        return replace(leased, parts=parts, first_rank=roster.first_rank, nodes=roster.run_nodes)


def _is_divided(part: Part) -> bool:
    return manifest.decode(part.manifest, part.digest, opaque=True).attachment is not None


def _of_one_node(leased: Leased, divided: Sequence[Part]) -> list[Part]:
    """Return the full states of ranks, some of which divided theirs without parities."""

    def build(rank: int, extra_nbytes: int) -> torch.Tensor:
        return local_parts.assembled(leased.parts, rank, opaque=True, extra_nbytes=extra_nbytes)[1]

    complete = [part for part in leased.parts if not _is_divided(part)]
    found = [*complete, *_put_together(divided, lambda _, own: own.share.ranks, build)]
    return sorted(found, key=lambda part: part.rank)


def _pinned(stack: ExitStack, roster: Roster, reach: Reach, stamp: Stamp) -> dict[int, Remote]:
    """Return the nodes that hold the step; they keep it until ``stack`` is closed."""
    left, missing = {}, []
    for node in roster.group:
        remote = stack.enter_context(closing(reach(node)))
        try:
            if remote.pin(stamp):
                left[node] = remote
            else:
                missing.append(f"node {node} does not hold it")
        except ConnectionError as error:
            missing.append(str(error))
        if len(missing) > roster.parities:
            raise SnapshotLost(f"step {stamp.step} cannot be read whole: {'; '.join(missing)}")
    return left


def _candidate(roster: Roster, stamp: Stamp, left: Mapping[int, Remote]) -> Candidate:
    local = len(roster.mirror_nodes)
    everyone = [node * local + rank for node in roster.group for rank in range(local)]
    slots = {rank: node for rank in everyone if (node := roster.node_of(rank)) in left}
    # The manifest of a rank on a missing node is mirrored on another node.
    away = (rank for rank in everyone if rank not in slots)
    mirrors = {rank: node for rank in away for node in left if _has(left[node], rank, stamp)}
    return Candidate(stamp, slots, mirrors | slots)


def _has(remote: Remote, rank: int, stamp: Stamp) -> bool:
    try:
        return remote.manifest(rank, stamp) is not None
    except ConnectionError:
        return False


def _put_together(
    divided: Sequence[Part],
    holders: Callable[[int, ShareManifest], object],
    build: Callable[[int, int], torch.Tensor],
) -> list[Part]:
    """Return the full state of every local rank.

    Args:
        divided: the ranks' shares.
        holders: returns what is the same for local ranks that hold the same stable tensors.
        build: returns memory that begins with the stable tensors of a local rank, and has room for
            so many bytes of private ones.
    """
    together: dict[object, list[tuple[int, ShareManifest]]] = {}
    for part in divided:
        own = ShareManifest.decode(part.manifest, part.digest, opaque=True)
        together.setdefault(holders(part.rank, own), []).append((part.rank, own))
    parts = []
    for rows in together.values():
        extra = sum(aligned(len(own.private)) for _, own in rows)
        parts += _parts(rows, build(rows[0][0], extra))
    return sorted(parts, key=lambda part: part.rank)


def _parts(rows: Sequence[tuple[int, ShareManifest]], memory: torch.Tensor) -> list[Part]:
    """Return full states, whose stable tensors are in memory already."""
    found, start = [], rows[0][1].private_start
    for rank, own in rows:
        memory[start : start + len(own.private)].numpy()[:] = memoryview(own.private)
        moved = start - own.private_start
        entries = [_placed(entry, moved, memory) for entry in own.manifest.entries]
        blob = manifest.encode(own.manifest.skeleton, entries)
        found.append(Part(rank, memory, blob, manifest.digest_of(blob)))
        start += aligned(len(own.private))
    return found


def _placed(entry: Entry, moved: int, memory: torch.Tensor) -> Entry:
    # Private tensors have digests already; stable ones were verified bucket by bucket.
    if entry.digest:
        return entry._replace(offset=entry.offset + moved)
    return entry._replace(digest=tensor_digest(memory[entry.offset : entry.offset + entry.nbytes]))
