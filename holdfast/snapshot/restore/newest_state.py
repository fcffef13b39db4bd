"""The newest state that all ranks of a run can load: from memory, or else from disk."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from holdfast import config, events
from holdfast.errors import SnapshotCorrupt, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.layout import flat_buffer, manifest
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.node import addresses
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.node.session import Offer, SmpSession
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.exchange import Call, Exchange, Gather, carry_out
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
from holdfast.snapshot.restore.elastic import Former
from holdfast.snapshot.restore.full_state import full_state
from holdfast.snapshot.restore.reader import Leased, Reader

# A step, the state, and the local ranks that divided it if they did.
Held = tuple[int, Tree] | tuple[int, Tree, tuple[int, ...]]
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
    notes: list[str] = []
    together = membership is not None
    memory: Exchange[Held | None]
    if membership is None and session.former:
        memory = former_ranks.agreeing(session, training)
    elif membership is None:
        memory = _agreeing(training, session, before, notes.append)
    else:
        load = partial(
            cluster_restore.load, membership, training.tree, notes.append, training=training
        )
        about = membership, addresses.own_address(), load, before, session.settings.keep
        memory = cluster_restore.agreeing(*about, notes.append)
    disk = DiskRestore(persist, training, session.rank, together) if persist else None
    gather = membership.gather if membership is not None else _alone
    return carry_out(finding(memory, disk, together, notes), session, gather)


def _alone(value: object) -> list[object]:
    return [value]


def finding(
    memory: Exchange[Held | None],
    disk: DiskRestore | None,
    together: bool,
    notes: list[str],
) -> Exchange[Found | None]:
    """Exchange what ``newest`` needs: the steps in memory, then those on disk.

    ``together`` is true if several nodes protect each other.
    """
    lost: SnapshotLost | None = None
    found: Held | None
    try:
        found = yield from memory
    except SnapshotLost as error:
        lost, found = error, None
        notes.append(str(error))
    if found is not None:
        return Found(*found[:2], "memory", tuple(notes), *found[2:])
    if disk is not None:
        found = yield from disk.agreeing()
        if found is None:
            _check_empty(disk.directory, (yield Gather(disk.unloadable())))
    if found is None and lost is not None:
        raise lost
    if together:
        yield Call("resume", (_NOTHING,))
    return Found(*found, "disk", tuple(notes)) if found is not None else None


def _check_empty(directory: str, told: Sequence[str]) -> None:
    """Check that no rank's folder holds checkpoints that could not be loaded.

    Raises:
        SnapshotLost: one does; starting at step 0 would lose the run's work in silence.
    """
    if found := next(filter(None, told), ""):
        raise SnapshotLost(
            f"memory holds no snapshot, and no checkpoint in {directory} can be loaded by "
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


def _agreeing(
    training: Training, session: SmpSession, before: int, note: Callable[[str], None]
) -> Exchange[tuple[int, Tree, tuple[int, ...]] | None]:
    """Agree with the other local ranks on the newest step that all of them found intact.

    Steps from ``before`` on are not considered; ``note`` is told why a step is passed over.

    A damaged step is recorded as ``snapshot_corrupt`` and dropped on all ranks. Return the step,
    the verified state, in memory of its own, and the local ranks that divided it; None if no step
    was ever committed.
    """
    tree: Tree = {}
    ranks: tuple[int, ...] = ()
    step, damage = -1, ""
    answer = yield Call("restore", (before,))
    while isinstance(answer, Offer):
        if step >= 0:
            note(f"step {step} was passed over: {damage or 'another rank found it damaged'}")
        step, damage = answer.step, ""
        try:
            tree, ranks = _verified(answer, training, session)
        except (SnapshotCorrupt, SnapshotLost) as error:
            damage = str(error)
            detail = {"step": step, "reason": damage}
            events.record(
                EventKind.SNAPSHOT_CORRUPT, detector="digest", rung="rollback", detail=detail
            )
        answer = yield Call("answer", (step, damage))
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
    described, ranks = manifest.decode(offer.manifest, offer.digest), tuple[int, ...]()
    if described.attachment is None:
        tensors = flat_buffer.read(described.entries, offer.buffer)
    else:
        with _leased(offer, session) as (leased, _):
            own, stable = local_parts.assembled(leased.parts, session.rank)
            described, ranks, tensors = own.manifest, own.share.ranks, assembly.tensors(own, stable)
    tree = training.tree(described, list(tensors))
    if not elastic.is_needed(training, tree, tree.get("ranks", config.world_size())):
        return tree, ranks
    if config.world_size() == config.local_world_size():
        with _leased(offer, session) as (leased, reader):
            return former_ranks.dealt(full_state(leased, reader), training), ()
    # Of several nodes without parities each knows its own ranks only.
    former = Former(lambda: described, lambda: (described, tensors))
    return elastic.dealt(training, {config.rank(): former}), ()


@contextmanager
def _leased(offer: Offer, session: SmpSession) -> Iterator[tuple[Leased, Reader]]:
    with Reader(session.settings.run_dir) as reader:
        leased = reader.lease(offer.step + 1)
        if leased is None or leased.step != offer.step:
            raise SnapshotCorrupt(f"step {offer.step} is not held any more")
        yield leased, reader
