"""The newest state that all ranks of a run can load: from memory, or else from disk."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast import config, events
from holdfast.errors import SnapshotCorrupt, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.layout import flat_buffer, manifest
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.node.session import Offer, SmpSession
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.messages import ANY_STEP
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.restore import (
    assembly,
    choose_step,
    cluster_restore,
    elastic,
    former_ranks,
    local_parts,
)
from holdfast.snapshot.restore.disk_restore import DiskRestore
from holdfast.snapshot.restore.full_state import full_state
from holdfast.snapshot.restore.reader import Reader

# Epochs begin at 1, so every step is newer than this.
_NOTHING = Stamp(0, 0)


class Found(NamedTuple):
    """A step that was found.

    Attributes:
        tree: this rank's verified state of it.
        source: ``memory`` or ``disk``.
        notes: what was rebuilt, and why no newer step was taken.
        ranks: the local ranks that divided the state in memory, if this node had divided it.
    """

    step: int
    tree: Tree
    source: str
    notes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


def newest(
    session: SmpSession,
    training: Training,
    persist: PersistSettings | None,
    membership: Membership | None,
    before: int = ANY_STEP,
) -> Found | None:
    """Find the newest intact step in memory, or if there is none on disk.

    After that the SMPs hold nothing newer, so that a damaged step is not tried again. If no step
    can be rebuilt they keep what they have.

    Args:
        session: the connection to the SMP of this node.
        training: the live objects that are to load the state.
        persist: the directory of the checkpoints; None restores from memory only.
        membership: the ranks of all nodes, if the nodes protect each other.
        before: only older steps than this one.

    Returns:
        The step that all ranks load; None if there is none.

    Raises:
        SnapshotLost: steps were committed, but none is intact.
        SnapshotMismatch: they belong to another state, or cannot be dealt to these ranks.
        ConnectionError: the SMP is gone.
        SmpUnavailable: it or another rank did not answer in time.
    """
    lost: SnapshotLost | None = None
    notes: list[str] = []
    found: tuple[int, Tree] | tuple[int, Tree, tuple[int, ...]] | None
    try:
        if membership is not None:
            found = cluster_restore.agree(membership, session, training, before, notes.append)
        elif session.former:
            found = former_ranks.agree(session, training)
        else:
            found = agree(session, training, before, notes.append)
    except SnapshotLost as error:
        lost, found = error, None
        notes.append(str(error))
    if found is not None:
        return Found(*found[:2], "memory", tuple(notes), *found[2:])
    if persist is not None:
        propose = session.recall if membership is None else membership.recall
        found = DiskRestore(persist, training, session.rank, propose).agree()
        if found is None:
            _check_empty(persist, membership)
    if found is None and lost is not None:
        raise lost
    if membership is not None:
        session.resume(_NOTHING)
    return Found(*found, "disk", tuple(notes)) if found is not None else None


def _check_empty(persist: PersistSettings, membership: Membership | None) -> None:
    """Check that no rank's folder holds checkpoints that could not be loaded.

    Raises:
        SnapshotLost: one does; starting at step 0 would lose the run's work in silence.
    """
    there = Checkpoints(Path(persist.directory)).unloadable()
    told = [there] if membership is None else membership.gather(there)
    if found := next(filter(None, told), ""):
        raise SnapshotLost(
            f"memory holds no snapshot, and no checkpoint in {persist.directory} can be loaded by "
            f"all ranks, although there are some ({found}): see the snapshot_corrupt events for "
            "the reasons, and start again once the storage can be read; fresh=True begins at "
            "step 0 and sets them aside"
        )


def discard(session: SmpSession, membership: Membership | None) -> None:
    """Give up all snapshots in memory, on all ranks, which must all call this.

    Raises:
        ConnectionError: the SMP is gone.
        SmpUnavailable: it or another rank did not answer in time.
    """
    if membership is not None:
        membership.join(session)
        session.resume(_NOTHING)
        membership.gather(None)
        return
    answer = session.restore()
    while isinstance(answer, Offer):
        answer = session.answer(answer.step, "the run begins anew (fresh=True)")


def agree(
    session: SmpSession, training: Training, before: int, note: Callable[[str], None]
) -> tuple[int, Tree, tuple[int, ...]] | None:
    """Agree with the other local ranks on the newest step that all of them found intact.

    Steps from ``before`` on are not considered; ``note`` is told why a step is passed over.

    A damaged step is recorded as ``snapshot_corrupt`` and dropped on all ranks. Return the step,
    the verified state, in memory of its own, and the local ranks that divided it; None if no step
    was ever committed.
    """
    tree: Tree = {}
    ranks: tuple[int, ...] = ()
    step, damage = -1, ""
    answer = session.restore(before)
    while isinstance(answer, Offer):
        if step >= 0:
            note(f"step {step} was passed over: {damage or 'another rank found it damaged'}")
        step, damage = answer.step, ""
        try:
            tree, ranks = _verified(answer, training, session)
        except SnapshotCorrupt as error:
            damage = str(error)
            detail = {"step": step, "reason": damage}
            events.record(
                EventKind.SNAPSHOT_CORRUPT, detector="digest", rung="rollback", detail=detail
            )
        answer = session.answer(step, damage)
    if answer == "lost":
        if before < ANY_STEP:
            raise SnapshotLost(choose_step.none_before(before, session.settings.keep))
        raise SnapshotLost(
            f"no intact snapshot is left in the SMP of {session.settings.run_dir}: "
            "start from a checkpoint"
        )
    return (step, tree, ranks) if answer == "load" else None


def _verified(
    offer: Offer, training: Training, session: SmpSession
) -> tuple[Tree, tuple[int, ...]]:
    described = manifest.decode(offer.manifest, offer.digest)
    tree: Tree = {}
    if described.attachment is None:
        tree = training.tree(described, flat_buffer.read(described.entries, offer.buffer))
        alone = config.world_size() == config.local_world_size()
        if not (alone and elastic.is_needed(training, tree, config.world_size())):
            return tree, ()
    with Reader(session.settings.run_dir) as reader:
        leased = reader.lease(offer.step + 1)
        if leased is None or leased.step != offer.step:
            raise SnapshotCorrupt(f"step {offer.step} is not held any more")
        if tree:
            return former_ranks.dealt(full_state(leased, reader), training), ()
        own, stable = local_parts.assembled(leased.parts, session.rank)
        return training.tree(own.manifest, assembly.tensors(own, stable)), own.share.ranks
