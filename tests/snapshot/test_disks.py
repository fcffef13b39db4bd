"""Checkpoints of several nodes: they write the same steps, and never lose the newest common one."""

import random
from collections.abc import Sequence

import pytest
from snapshot_nodes import Nodes

from holdfast.snapshot.protocol import checkpoint_schedule
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import (
    ALONE,
    UNKNOWN,
    Agreement,
    Disk,
    Needed,
    agreed,
    combined,
)
from holdfast.snapshot.protocol.cluster_steps import Held
from holdfast.snapshot.protocol.leases import Leases
from holdfast.snapshot.protocol.roster import fitted

READER = 1
EVERY, KEEP = 10, 2


class Storage:
    """A node's persister and its disk, in steps instead of seconds; the disk outlives the node.

    ``keep`` as ``persist_keep``; without ``heeding`` it removes what is old as if it was alone.
    """

    def __init__(self, keep: int, *, heeding: bool = True) -> None:
        self.steps: list[int] = []
        self.written: list[int] = []
        self.writing: int | None = None
        self.waits = False
        self.left, self.needed = 0, ALONE
        self._keep, self._heeding = keep, heeding

    def lent(self, step: int, takes: int, needed: Needed) -> None:
        self.waits, self.writing, self.left, self.needed = False, step, takes, needed

    def end(self, *, well: bool = True) -> None:
        """What is being written is there, or has failed."""
        step, self.writing = self.writing, None
        assert step is not None
        if not well or (self.steps and self.steps[-1] >= step):
            return
        self.written.append(step)
        self.steps.append(step)
        needed = self.needed if self._heeding else ALONE
        for old in needed.removable(self.steps, self._keep):
            self.steps.remove(old)


class Disks(Nodes):
    """Nodes with persisters, each of which takes as many steps for a checkpoint as is given."""

    def __init__(self, pace: Sequence[int], *, heeding: bool = True) -> None:
        self.pace = list(pace)
        self.storages = [Storage(KEEP, heeding=heeding) for _ in pace]
        super().__init__(len(pace))

    def carry_out(self, node: int, out: m.Instruction) -> None:
        if isinstance(out, m.Answer) and out.verb == "leased":
            fields = out.fields
            self.storages[node].lent(fields["step"], self.pace[node], fields["needed"])
        super().carry_out(node, out)

    def turn(self, node: int, *, well: bool = True) -> None:
        """A persister goes on: it waits for a step, or is a step's time further with it."""
        storage = self.storages[node]
        if storage.writing is not None:
            storage.left -= 1
            if storage.left > 0:
                return
            after = storage.writing
            self.do(node, m.Release(READER))
            storage.end(well=well)
        elif storage.waits:
            return
        else:
            after = max(storage.steps, default=0)
        storage.waits = True
        self.do(node, m.Due(READER, EVERY, after, list(storage.steps)))

    def common(self) -> int:
        """The newest step that all nodes have on disk; 0: there is none."""
        return max(set.intersection(*(set(each.steps) for each in self.storages)), default=0)

    def die(self, lost: Sequence[int]) -> None:
        """These nodes lose what they were writing; if too many, all go back to the disks."""
        for node in lost:
            self.storages[node].writing, self.storages[node].waits = None, False
        common = self.common()
        found = self.lose(tuple(lost))
        self.newest = found if found is not None else common
        for storage in self.storages:
            storage.steps = [step for step in storage.steps if step <= self.newest]


def run(disks: Disks, steps: int) -> None:
    for step in range(1, 1 + steps):
        for node in range(disks.count):
            disks.turn(node)
        disks.take(step)


PACES = [(1, 1, 1), (25, 1, 1), (1, 25, 25), (15, 25, 1), (33, 17, 9), (1, 1)]


@pytest.mark.parametrize("pace", PACES)
def test_storages_of_any_pace_write_the_same_steps(pace: tuple[int, ...]) -> None:
    disks = Disks(pace)
    run(disks, 300)
    written = [storage.written for storage in disks.storages]
    finished = min(map(len, written))
    assert len({tuple(steps[:finished]) for steps in written}) == 1
    # As often as the slowest can, in whole intervals: one more, when it just missed the first step.
    rounds = 300 // (EVERY * (-(-(max(pace) + 1) // EVERY)))
    assert rounds - 1 <= finished <= 300 // EVERY
    assert all(len(storage.steps) <= KEEP + 1 for storage in disks.storages)
    assert disks.newest - disks.common() <= 2 * (max(pace) + EVERY)


def test_without_the_agreement_they_have_nothing_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "join", lambda self: None)
    monkeypatch.setattr(checkpoint_schedule, "agreed", lambda *_: None)
    disks = Disks((15, 25, 1))
    run(disks, 300)
    assert disks.common() == 0


def campaign(seed: int, *, heeding: bool) -> tuple[int, int]:
    """Storages that are slow and fail, nodes that die: how often the common step was lost, how
    often it grew."""
    draw = random.Random(seed)
    disks = Disks([draw.randint(1, 40) for _ in range(draw.randint(2, 4))], heeding=heeding)
    before = lost = grown = 0
    for _ in range(400):
        for node in range(disks.count):
            disks.turn(node, well=draw.random() < 0.8)
            if draw.random() < 0.02:
                disks.do(node, m.PersistRequested())
            if draw.random() < 0.05:
                disks.pace[node] = draw.randint(1, 40)
            after = disks.common()
            lost += after < before
            grown += after > before
            before = after
        disks.take(disks.newest + 1)
        if draw.random() < 0.03:
            disks.die(draw.sample(range(disks.count), draw.randint(1, disks.count)))
            lost += disks.common() < before
    return lost, grown


def test_the_newest_common_checkpoint_is_never_lost() -> None:
    found = [campaign(seed, heeding=True) for seed in range(8)]
    assert sum(lost for lost, _ in found) == 0
    assert sum(grown for _, grown in found) > 8


def test_a_node_that_heeds_only_its_own_disk_loses_it() -> None:
    assert sum(campaign(seed, heeding=False)[0] for seed in range(4)) > 0


@pytest.mark.parametrize(("back_to", "intact"), [(12, True), (10, True), (9, False), (0, False)])
def test_what_all_went_back_behind_is_void_on_its_way_to_disk_and_there(
    back_to: int, intact: bool
) -> None:
    disks = Disks((40, 40))
    run(disks, 12)
    assert disks.storages[0].writing == 10
    disks.do(0, m.Persisted(2, 10, ""))
    disks.do(0, m.Resume(0, disks.epoch, back_to))
    leases = disks.protocols[0].leases
    assert leases.persisted == (10 if intact else None)
    (released,) = disks.protocols[0].handle(m.Release(READER), disks.now)
    assert released.fields["intact"] is intact
    if not intact:  # what is said of it too late holds until the disk is listed again
        disks.do(0, m.Persisted(2, 10, ""))
        disks.do(0, m.Due(READER, EVERY, 10, [5]))
        assert leases.persisted == 5


def test_an_announcement_that_cannot_be_read_is_a_violation_and_no_crash() -> None:
    for disk in ([1, 2, [3], True, 5], [1, float("inf"), [], True], [1, 2, "34", True], 7, [1, 2]):
        with pytest.raises(m.ProtocolViolation, match="Disk cannot be read"):
            fitted(disk, Disk)
    for frame in (b'[{"0":[[],[[Infinity,0,"x"]]]},null]', b"[" * 100_000, b"[{},[1,2]]"):
        with pytest.raises(m.ProtocolViolation, match="node 1 announced"):
            Held.parse(m.PeerHolds(1, 1, 10, frame))


def test_nothing_is_agreed_before_all_have_spoken_and_wait() -> None:
    disk = Disk(10, 20, (10, 20), waiting=True)
    assert agreed(30, combined([disk, disk])) == Agreement(True, Needed(20, 30))
    assert agreed(29, combined([disk, disk])) == Agreement(False, Needed(20, 29))
    assert agreed(30, combined([disk, None])) is None
    assert agreed(30, combined([disk, disk._replace(waiting=False)])) is None
    assert agreed(30, combined([disk, disk._replace(steps=(5, 10))])) == Agreement(
        True, Needed(10, 30)
    )
    assert agreed(30, combined([disk, disk._replace(steps=())])) == Agreement(True, Needed(-1, 30))


@pytest.mark.parametrize(
    ("needed", "gone"),
    [
        (ALONE, [1, 2, 3, 4]),
        (UNKNOWN, []),
        (Needed(2, 6), [1, 3, 4]),
        (Needed(2, 4), [1, 3]),
        (Needed(-1, 9), [1, 2, 3, 4]),
        (Needed(7, 9), []),
    ],
)
def test_what_may_be_removed(needed: Needed, gone: list[int]) -> None:
    assert needed.removable([1, 2, 3, 4, 5, 6], 2) == gone
