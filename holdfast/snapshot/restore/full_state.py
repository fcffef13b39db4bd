"""The full states of a node's ranks, from its memory or rebuilt from all nodes of its group.

The step is pinned on every node of the group meanwhile, and snapshots go on. As many nodes may be
missing as there are parities. A node that does not answer soon counts as missing, so that reading
an old step of lost nodes does not delay a run that has restarted without them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import torch

from holdfast import config
from holdfast.digest.tensors import tensor_digest
from holdfast.errors import SnapshotCorrupt, SnapshotError, SnapshotLost, SnapshotMismatch
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout import manifest
from holdfast.snapshot.layout.flat_buffer import aligned
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.layout.shares import ShareManifest
from holdfast.snapshot.protocol.roster import Roster, Stamp
from holdfast.snapshot.restore import assembly
from holdfast.snapshot.restore.choose_step import Candidate
from holdfast.snapshot.restore.cluster_restore import rebuild
from holdfast.snapshot.restore.reader import Leased, Reader
from holdfast.snapshot.transport.remote import Remote

# The share of the timeout for each answer of a node.
_SHARE_OF_PATIENCE = 0.1


def full_state(leased: Leased, reader: Reader) -> Leased:
    """Return a pinned step with the full state of every local rank; damaged parts are rebuilt.

    Raises:
        SnapshotLost: more nodes than there are parities do not hold the step any more, or cannot be
            reached.
        SnapshotCorrupt: more is damaged than can be rebuilt.
    """
    told = ((p, manifest.decode(p.manifest, p.digest, opaque=True)) for p in leased.parts)
    divided = {part.rank: part for part, described in told if described.attachment is not None}
    if not divided:
        return leased
    roster = reader.roster()
    if roster is None:
        build = partial(of_local_ranks, leased.parts, opaque=True)
        found = _put_together(divided.values(), lambda _, own: own.share.ranks, build)
        complete = [part for part in leased.parts if part.rank not in divided]
        return replace(leased, parts=sorted([*complete, *found], key=lambda part: part.rank))
    stamp = Stamp(leased.epoch, leased.step)
    reach = partial(Remote, roster, patience_s=_SHARE_OF_PATIENCE * config.timeout_s())
    with ExitStack() as stack:
        left, local = _pinned(stack, roster, reach, stamp), len(roster.mirror_nodes)
        group = [node * local + rank for node in roster.group for rank in range(local)]
        slots = {rank: node for rank in group if (node := roster.node_of(rank)) in left}
        # The manifest of a rank on a missing node is mirrored on another node.
        manifests = {rank: [slots[rank]] if rank in slots else left for rank in group}
        candidate = Candidate(stamp, slots, manifests)

        def holders(rank: int, own: ShareManifest) -> object:
            # Replicas on one node share one copy of their stable tensors here.
            return roster.sets[rank] if own.share.replicated else rank

        def rebuilt(rank: int, *, extra_nbytes: int) -> tuple[ShareManifest, torch.Tensor]:
            about = candidate, roster.first_rank + rank, roster.sets[rank], reach
            return rebuild(*about, opaque=True, extra_nbytes=extra_nbytes)[:2]

        parts = _put_together(leased.parts, holders, rebuilt)
    return replace(leased, parts=parts, first_rank=roster.first_rank, nodes=roster.run_nodes)


def _pinned(
    stack: ExitStack, roster: Roster, reach: Callable[[int], Remote], stamp: Stamp
) -> list[int]:
    """Return the nodes that hold the step; they keep it until ``stack`` is closed."""
    left, missing = list[int](), list[str]()
    for node in roster.group:
        remote = stack.enter_context(closing(reach(node)))
        try:
            if remote.pin(stamp):
                left.append(node)
            else:
                missing.append(f"node {node} does not hold it")
        except ConnectionError as error:
            missing.append(str(error))
        if len(missing) > roster.parities:
            raise SnapshotLost(f"step {stamp.step} cannot be read whole: {'; '.join(missing)}")
    return left


class _Buffers:
    """The mapped buffers of the local ranks (``stripe_decode.Source``)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def read(self, node: int, offset: int, out: memoryview) -> None:
        out[:] = self._parts[node].buffer[offset : offset + len(out)].numpy().data


def of_local_ranks(
    parts: Sequence[Part], rank: int, *, opaque: bool = False, extra_nbytes: int = 0
) -> tuple[ShareManifest, torch.Tensor]:
    """Put the state of a local rank together that the ranks of one node divided without parities.

    ``parts`` are those of all local ranks, of one step. The rest, and the result, are as in
    ``cluster_restore.rebuild``, without a report.

    Raises:
        SnapshotCorrupt: a part does not match its digests; says which.
        SnapshotMismatch: several nodes divided the state.
    """
    own = ShareManifest.decode(parts[rank].manifest, parts[rank].digest, opaque=opaque)
    if not own.share.ranks:
        raise SnapshotMismatch(
            "memory holds this node's share of a state that several nodes divided: start as many "
            "nodes again, or give a persist_dir with a checkpoint"
        )
    members = [parts[each] for each in own.share.ranks]
    found = [ShareManifest.decode(each.manifest, each.digest, opaque=True) for each in members]
    remains = assembly.Part(dict(enumerate(found)), _Buffers(members))
    memory = torch.empty(own.private_start + extra_nbytes, dtype=torch.uint8)
    try:
        into = memory[: own.share.own_nbytes]
        assembly.assemble_parts([remains], [range(len(members))], into=into)
    except SnapshotError as error:
        raise SnapshotCorrupt(str(error)) from error
    return own, memory


def _put_together(
    divided: Iterable[Part],
    holders: Callable[[int, ShareManifest], object],
    build: Callable[..., tuple[ShareManifest, torch.Tensor]],
) -> list[Part]:
    """Return the full state of every local rank of ``divided``.

    ``holders`` returns what is the same for local ranks that hold the same stable tensors, and
    ``build`` memory that begins with those of a rank and has room for private ones.
    """
    together: dict[object, list[tuple[int, ShareManifest]]] = {}
    for part in divided:
        own = ShareManifest.decode(part.manifest, part.digest, opaque=True)
        together.setdefault(holders(part.rank, own), []).append((part.rank, own))
    parts = []
    for rows in together.values():
        extra = sum(aligned(len(own.private)) for _, own in rows)
        _, memory = build(rows[0][0], extra_nbytes=extra)
        start = rows[0][1].private_start
        for rank, own in rows:
            memory[start : start + len(own.private)].numpy()[:] = memoryview(own.private)
            moved = start - own.private_start
            entries = [_placed(entry, moved, memory) for entry in own.manifest.entries]
            blob = manifest.encode(own.manifest.skeleton, entries)
            parts.append(Part(rank, memory, blob, manifest.digest_of(blob)))
            start += aligned(len(own.private))
    return sorted(parts, key=lambda part: part.rank)


def _placed(entry: Entry, moved: int, memory: torch.Tensor) -> Entry:
    # Private tensors have digests already; stable ones were verified bucket by bucket.
    if entry.digest:
        return entry._replace(offset=entry.offset + moved)
    return entry._replace(digest=tensor_digest(memory[entry.offset : entry.offset + entry.nbytes]))
