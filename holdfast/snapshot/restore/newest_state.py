"""The newest state that all ranks of a run can load: from memory, or else from disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from holdfast import config, events
from holdfast.errors import SnapshotCorrupt, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout import flat_buffer, manifest
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.manifest import Manifest
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.node import addresses
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.node.session import Offer, SmpSession
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.exchange import Call, Exchange, Gather, carry_out
from holdfast.snapshot.protocol.messages import ANY_STEP
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.restore import assembly, choose_step, cluster_restore, elastic
from holdfast.snapshot.restore.disk_restore import DiskRestore
from holdfast.snapshot.restore.elastic import Former
from holdfast.snapshot.restore.full_state import full_state, of_local_ranks
from holdfast.snapshot.restore.reader import Leased, Reader

# A step, the state, and the local ranks that divided it if they did.
Held = tuple[int, Tree] | tuple[int, Tree, tuple[int, ...]]
# Epochs begin at 1, so every step is newer than this.
_NOTHING = Stamp(0, 0)


class Found(NamedTuple):
    """A step that was found, with this rank's verified state of it.

    ``source`` is ``memory`` or ``disk``; ``notes`` say what was rebuilt and why no newer step was
    taken; ``ranks`` are the local ones that divided the state in memory, if they did.
    """

    step: int
    tree: Tree
    source: str
    notes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def record(self, found_s: float, duration_s: float) -> None:
        """Record that the state is restored, and how long it took to find it and in all."""
        detail = {"step": self.step, "source": self.source}
        detail |= {"found_s": found_s, "load_s": duration_s - found_s}
        rung = "rollback" if self.source == "memory" else "reload"
        events.record(EventKind.RESTORED, rung=rung, duration_s=duration_s, detail=detail)


def newest(
    session: SmpSession,
    training: Training,
    persist: PersistSettings | None,
    membership: Membership | None,
    before: int = ANY_STEP,
) -> Found | None:
    """Return the newest step before ``before`` that all ranks load: from memory, or else from disk.

    After that the SMPs hold nothing newer, so that a damaged step is not tried again. If no step
    can be rebuilt they keep what they have. Without ``persist`` only memory is asked.

    Raises:
        SnapshotLost: steps were committed, but none is intact.
        SnapshotMismatch: they belong to another state, or cannot be dealt to these ranks.
        ConnectionError: the SMP is gone.
        SmpUnavailable: it or another rank did not answer in time.
    """
    notes: list[str] = []
    together = membership is not None
    memory: Exchange[Held | None]
    if membership is not None:
        tell = notes.append
        load = partial(cluster_restore.load, membership, training.tree, tell, training=training)
        about = membership, addresses.own_address(), load, before, session.settings.keep
        memory = cluster_restore.agreeing(*about, tell)
    elif session.former:
        memory = _former_agreeing(session, training)
    else:
        memory = _agreeing(training, session, before, notes.append)
    disk = DiskRestore(persist, training, session.rank, together) if persist else None
    gather = membership.gather if membership is not None else lambda value: [value]
    return carry_out(finding(memory, disk, together, notes), session, gather)


def finding(
    memory: Exchange[Held | None], disk: DiskRestore | None, together: bool, notes: list[str]
) -> Exchange[Found | None]:
    """Exchange what ``newest`` needs; ``together`` is true if several nodes protect each other."""
    lost: SnapshotLost | None = None
    try:
        found = yield from memory
    except SnapshotLost as error:
        lost, found = error, None
        notes.append(str(error))
    if found is not None:
        return Found(*found[:2], "memory", tuple(notes), *found[2:])
    if disk is not None:
        found = yield from disk.agreeing()
        told = [] if found else (yield Gather(disk.unloadable()))
        # To start at step 0 would lose the run's work in silence.
        if there := next(filter(None, told), ""):
            raise SnapshotLost(
                f"memory holds no snapshot, and no checkpoint in {disk.directory} can be loaded by "
                f"all ranks, although there are some ({there}): see the snapshot_corrupt events "
                "for the reasons, and start again once the storage can be read; fresh=True begins "
                "at step 0 and sets them aside"
            )
    if found is None and lost is not None:
        raise lost
    if together:
        yield Call("resume", (_NOTHING,))
    return Found(*found, "disk", tuple(notes)) if found is not None else None


def discard(session: SmpSession, membership: Membership | None) -> None:
    """Give up all snapshots in memory, on all ranks, which must all call this."""
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

    A damaged step is recorded as ``snapshot_corrupt`` and dropped on all ranks; ``note`` is told. A
    step that lacks shards of these ranks, which other nodes held, is passed over and kept. Return
    the step, the verified state, in memory of its own, and the local ranks that divided it; None if
    no step was ever committed.
    """
    tree, ranks, step, damage = Tree(), tuple[int, ...](), -1, ""
    answer = yield Call("restore", (before,))
    while isinstance(answer, Offer):
        if step >= 0:
            note(f"step {step} was passed over: {damage or 'another rank cannot load it'}")
        step, damage, kept = answer.step, "", False
        try:
            tree, ranks = _verified(answer, training, session)
        except SnapshotLost as error:
            damage, kept = str(error), True
        except SnapshotCorrupt as error:
            damage = str(error)
            detail, rung = {"step": step, "reason": damage}, "rollback"
            events.record(EventKind.SNAPSHOT_CORRUPT, detector="digest", rung=rung, detail=detail)
        answer = yield Call("answer", (step, damage, kept))
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
            own, memory = of_local_ranks(leased.parts, session.rank)
            described, ranks, tensors = own.manifest, own.share.ranks, assembly.tensors(own, memory)
    tree = training.tree(described, list(tensors))
    if not elastic.is_needed(training, tree, tree.get("ranks", config.world_size())):
        return tree, ranks
    if config.world_size() == config.local_world_size():
        with _leased(offer, session) as (leased, reader):
            return _dealt(full_state(leased, reader), training), ()
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


def _former_agreeing(session: SmpSession, training: Training) -> Exchange[tuple[int, Tree] | None]:
    """Agree with the other local ranks on the newest intact step of another number of them.

    Damaged steps are recorded as ``snapshot_corrupt``. The SMP keeps what the former ranks held
    until the present ones have committed a step. Return None if there is no step, or if the run has
    several nodes without parities, each of which knows its own ranks only.
    """
    if config.world_size() > config.local_world_size():
        return None
    verdict, limit, tree = "older", ANY_STEP - 1, Tree()
    with Reader(session.settings.run_dir) as reader:
        while verdict == "older":
            step, leased = None, reader.lease(limit + 1)
            while leased is not None and step is None:
                try:
                    step, tree = leased.step, _dealt(full_state(leased, reader), training)
                except (SnapshotCorrupt, SnapshotLost) as error:
                    detail = {"step": leased.step, "reason": str(error)}
                    events.record(EventKind.SNAPSHOT_CORRUPT, detector="digest", detail=detail)
                    leased = reader.lease(leased.step)
            verdict, limit = yield Call("recall", (step, 0))
    return (limit, tree) if verdict == "load" else None


def _dealt(leased: Leased, training: Training) -> Tree:
    """Return this rank's state from the full states of all ranks of a node."""

    def read(part: Part) -> tuple[Manifest, list[torch.Tensor]]:
        described = manifest.decode(part.manifest, part.digest)
        return described, flat_buffer.read(described.entries, part.buffer)

    former = {}
    for part in leased.parts:
        described = partial(manifest.decode, part.manifest, part.digest, opaque=True)
        former[leased.first_rank + part.rank] = Former(described, partial(read, part))
    return elastic.dealt(training, former)
