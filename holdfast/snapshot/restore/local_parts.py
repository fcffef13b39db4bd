"""A state that the ranks of one node divided without parities, put together from their parts."""

from collections.abc import Sequence

import torch

from holdfast.errors import SnapshotCorrupt, SnapshotError, SnapshotMismatch
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout.shares import ShareManifest
from holdfast.snapshot.restore import assembly


class _Buffers:
    """The mapped buffers of the ranks (``stripe_decode.Source``)."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers

    def read(self, node: int, offset: int, out: memoryview) -> None:
        out[:] = self._buffers[node][offset : offset + len(out)].numpy().data


def assembled(
    parts: Sequence[Part], rank: int, *, opaque: bool = False, extra_nbytes: int = 0
) -> tuple[ShareManifest, torch.Tensor]:
    """Put the state of a local rank together.

    Args:
        parts: those of all local ranks, mapped, of one step.
        rank: the local rank.
        opaque: as in ``manifest.decode``.
        extra_nbytes: as in ``cluster_restore.rebuild``.

    Returns:
        The rank's manifest, and memory that begins with its verified stable tensors.

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
    remains = assembly.Part(dict(enumerate(found)), _Buffers([each.buffer for each in members]))
    memory = torch.empty(own.private_start + extra_nbytes, dtype=torch.uint8)
    stable = memory[: own.share.sizes[own.share.node]]
    try:
        assembly.assemble_parts([remains], [range(len(members))], into=stable)
    except SnapshotError as error:
        raise SnapshotCorrupt(str(error)) from error
    return own, memory if extra_nbytes else stable
