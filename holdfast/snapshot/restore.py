"""One rank's part in the agreement of all local ranks on the step to restore."""

from typing import Any

from holdfast import events
from holdfast.errors import SnapshotCorrupt, SnapshotLost
from holdfast.snapshot import manifest
from holdfast.snapshot.recall import Recall
from holdfast.snapshot.session import Offer, SmpSession
from holdfast.snapshot.state import Training
from holdfast.snapshot.supervisor import PersistSettings

Found = tuple[int, dict[str, Any], str]


def newest(
    session: SmpSession, training: Training, persist: PersistSettings | None
) -> Found | None:
    """The newest intact step in memory, or where there is none on disk, with its tree and source.

    ``persist`` says where on disk; without it only memory is looked at. None: there is no step.

    Raises:
        SnapshotLost: steps were committed, none is intact. Else as ``agree`` and ``Recall``.
    """
    lost: SnapshotLost | None = None
    try:
        found = agree(session, training)
    except SnapshotLost as error:
        lost, found = error, None
    if found is not None:
        return *found, "memory"
    if persist is not None:
        recalled = Recall(persist, training, session.rank, session.recall).agree()
        if recalled is not None:
            return *recalled, "disk"
    if lost is not None:
        raise lost
    return None


def agree(session: SmpSession, training: Training) -> tuple[int, dict[str, Any]] | None:
    """The newest step that every local rank found intact, with this rank's state tree.

    What is damaged is recorded as ``snapshot_corrupt`` and dropped on all ranks. The tree is in
    memory of its own and is what was verified. None: no step was ever committed.

    Raises:
        SnapshotLost: steps were committed, none is intact.
        ConnectionError: the SMP is gone. SmpUnavailable: it or another rank did not answer.
    """
    tree: dict[str, Any] = {}
    step = -1
    answer = session.restore()
    while isinstance(answer, Offer):
        step, damage = answer.step, ""
        try:
            tree = _verified(answer, training)
        except SnapshotCorrupt as error:
            damage = str(error)
            detail = {"step": step, "reason": damage}
            events.record("snapshot_corrupt", detector="digest", rung="rollback", detail=detail)
        answer = session.answer(step, damage)
    if answer == "lost":
        raise SnapshotLost(
            f"no intact snapshot is left in the SMP of {session.settings.run_dir}: "
            "start from a checkpoint"
        )
    return (step, tree) if answer == "load" else None


def _verified(offer: Offer, training: Training) -> dict[str, Any]:
    described = manifest.decode(offer.manifest, offer.digest)
    return training.read(described, offer.buffer)
