"""A state that another number of ranks has left in the memory of this node, dealt anew."""

from functools import partial

import torch

from holdfast import config, events
from holdfast.errors import SnapshotCorrupt, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout import flat_buffer, manifest
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.manifest import Manifest
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.node.session import SmpSession
from holdfast.snapshot.protocol.exchange import Call, Exchange
from holdfast.snapshot.restore import elastic
from holdfast.snapshot.restore.elastic import Former
from holdfast.snapshot.restore.full_state import full_state
from holdfast.snapshot.restore.reader import ANY_STEP, Leased, Reader


def agreeing(
    session: SmpSession, training: Training
) -> Exchange[tuple[int, Tree, tuple[int, ...]] | None]:
    """Agree with the other local ranks on the newest step of the former ranks that is intact.

    Damaged steps are recorded as ``snapshot_corrupt``. The SMP keeps what the former ranks held
    until the present ones have committed a step.

    Returns:
        The step, this rank's state, and no ranks; None if there is no step, or if the run has
        several nodes without parities, each of which knows its own ranks only.
    """
    if config.world_size() > config.local_world_size():
        return None
    verdict, limit, tree = "older", ANY_STEP - 1, Tree()
    with Reader(session.settings.run_dir) as reader:
        while verdict == "older":
            found = _newest(reader, limit, training)
            step, tree = found or (None, tree)
            verdict, limit = yield Call("recall", (step, 0))
    return (limit, tree, ()) if verdict == "load" else None


def _newest(reader: Reader, limit: int, training: Training) -> tuple[int, Tree] | None:
    leased = reader.lease(limit + 1)
    while leased is not None:
        try:
            return leased.step, dealt(full_state(leased, reader), training)
        except (SnapshotCorrupt, SnapshotLost) as error:
            detail = {"step": leased.step, "reason": str(error)}
            events.record(EventKind.SNAPSHOT_CORRUPT, detector="digest", detail=detail)
            leased = reader.lease(leased.step)
    return None


def dealt(leased: Leased, training: Training) -> Tree:
    """Return this rank's state from the full states of all ranks of a node.

    Raises:
        SnapshotLost, SnapshotCorrupt, SnapshotMismatch: as ``elastic.dealt``.
    """
    former = {
        leased.first_rank + part.rank: Former(
            partial(manifest.decode, part.manifest, part.digest, opaque=True), partial(_read, part)
        )
        for part in leased.parts
    }
    return elastic.dealt(training, former)


def _read(part: Part) -> tuple[Manifest, list[torch.Tensor]]:
    described = manifest.decode(part.manifest, part.digest)
    return described, flat_buffer.read(described.entries, part.buffer)
