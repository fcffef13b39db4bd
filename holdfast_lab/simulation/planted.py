"""Deliberate bugs of the library and one of its caller, one at a time: the simulator finds each.

The later ones of the table were real: the simulator found them, and they were mended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from holdfast.errors import ConfigError
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.protocol import messages
from holdfast.snapshot.protocol.checkpoint_schedule import Needed
from holdfast.snapshot.protocol.cluster import Cluster
from holdfast.snapshot.protocol.cluster_commit import ClusterCommit
from holdfast.snapshot.protocol.cluster_steps import StepRecords
from holdfast.snapshot.protocol.commit_tree import CommitTree
from holdfast.snapshot.protocol.exchange import Call
from holdfast.snapshot.protocol.leases import Leases
from holdfast.snapshot.protocol.parity_stream import ParityReceiver
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.protocol.slots import Rank, SlotState
from holdfast.snapshot.protocol.steps import SlotGrants, Steps
from holdfast.snapshot.restore import choose_step
from holdfast.snapshot.restore.elastic import _Target
from holdfast.snapshot.restore.stripe_decode import Fetcher
from holdfast_lab.simulation import rank_work, states, trainers
from holdfast_lab.simulation.world import Size

GROUPS = Size(6, group_nodes=3)


class Bug(NamedTuple):
    """A bug: what is wrong, and the function that takes the place of a right one.

    Attributes:
        seed: the first one that finds it, when it was last looked for; tests begin their search
            there.
        size: of the cluster that finds it.
    """

    text: str
    owner: Any
    name: str
    wrong: Callable[..., Any]
    seed: int = 1
    size: Size = Size()


_announce, _hear = Cluster.announce, Cluster.hear
_held, _take, _take_slot = Rank.held, ParityReceiver.take, Steps._take_slot
_refused, _roster = Steps.allocation_refused, Membership._roster
_settle = CommitTree.settle
_row, _steps, _put_shard = erasure_code.encoding_row, choose_step.held_steps, _Target.take


def _all_but_one_announced(self: StepRecords, step: int) -> bool:
    return len(self.announced[step]) >= len(self._nodes) - 1


def _announce_without_mirrors(self: Cluster, step: int, disk: Any) -> None:
    with mock.patch.object(self, "roster", replace(self.roster, mirrored_ranks=())):
        _announce(self, step, disk)


def _newest_first(self: Rank, *states: SlotState) -> Any:
    found = _held(self, *states)
    return found[::-1] if states == (SlotState.CLEAN,) else found


def _same_epoch(self: Membership, places: Any, secret: str) -> Any:
    roster = _roster(self, places, secret)
    return replace(roster, epoch=max(1, roster.epoch - 1))


def _give_up_early(self: Steps, event: Any) -> None:
    rank = self._ranks[event.rank]
    if rank.in_use() > self._node.keep and self._cluster.pending() and rank.held(SlotState.CLEAN):
        rank.held(SlotState.CLEAN)[0].clear()
    _take_slot(self, event)


def _resend_nothing(self: Cluster, node: int) -> None:
    self._linked.add(node)
    self._met.add(node)


def _any_epoch(self: Cluster, event: Any) -> None:
    _hear(self, msgspec.structs.replace(event, epoch=self.roster.epoch))


def _wrong_row(parity: int, data_blocks: int) -> Any:
    row = list(_row(parity, data_blocks))
    return [row[0] ^ 2, *row[1:]]


def _keep_newer(self: ClusterCommit, event: Any) -> None:
    self.resumed = True
    for slot in self._node.held(SlotState.SEALING):
        slot.state = SlotState.CLEAN


def _count_twice(self: ParityReceiver, rank: int, start: int, nbytes: int) -> bool:
    taken = _take(self, rank, start, nbytes)
    return taken or bool(self.due_nbytes)


def _announce_again(self: Cluster, event: Any) -> None:
    _hear(self, event)
    if isinstance(event, messages.PeerHolds) and self.steps.is_held_here(event.step):
        self._announce(self.roster.members, event.step)


def _drop_mirrors(self: Cluster, oldest: Stamp) -> None:
    for key in [key for key in self.mirrors if key[1] <= oldest]:
        del self.mirrors[key]


def _keep_revoked(self: SlotGrants, index: int) -> None:
    self._node.ranks[index].lent = None


def _pin_nothing(self: Leases, holder: int, step: int, slots: Any) -> None:
    reader = self._reader(holder)
    reader.step, reader.slots = step, ()


def _drop_twice_joined(self: ClusterCommit, slot: Any) -> bool:
    return self.cluster is not None and self.cluster.has_announced(slot.stamp)


def _refuse_in_silence(self: Steps, event: Any) -> None:
    with mock.patch.object(self, "note_skipped"):
        _refused(self, event)


def _say_nothing_of_the_past(membership: Any) -> Any:
    yield Call("reconnect")
    yield from membership.rejoining()


def _allocate_more(self: Rank) -> int:
    return 0 if any(slot.state is SlotState.EMPTY for slot in self.slots) else len(self.slots)


def _oldest_first(inventories: Any, world_size: int) -> Any:
    found = list(_steps(inventories, world_size))
    return found[::-1] if any(step.former for step in found) else found


def _as_if_equal(self: Any, part: Any, offsets: Any) -> None:
    _put_shard(self, part, (len(self.taken) * part.shape[0],))


def _commit_alone(self: CommitTree, *, passed: bool = False) -> None:
    with mock.patch.object(self, "_branches", {}):
        _settle(self, passed=passed)


def _nothing(*_: object) -> None:
    pass


BUGS = {
    "commit-without-one": Bug(
        "a step counts as held by all once all nodes but one hold it",
        StepRecords,
        "is_sealed",
        _all_but_one_announced,
    ),
    "announce-without-mirrors": Bug(
        "a node announces a step before it holds the manifests of others",
        Cluster,
        "announce",
        _announce_without_mirrors,
        seed=2,
    ),
    "retire-newest": Bug(
        "the newest clean step is retired in the place of the oldest", Rank, "held", _newest_first
    ),
    "same-epoch": Bug("a restore goes on in the former epoch", Membership, "_roster", _same_epoch),
    "give-up-early": Bug(
        "an older step is given up before all nodes hold the newer one",
        Steps,
        "_take_slot",
        _give_up_early,
    ),
    "no-resending": Bug(
        "nothing is said again over a new link",
        Cluster,
        "linked",
        _resend_nothing,
        seed=3,
    ),
    "replacement-ignored": Bug(
        "what an SMP said counts for the one that took its place",
        Cluster,
        "replaced",
        _nothing,
        seed=20,
    ),
    "announcements-forgotten": Bug(
        "a new epoch drops steps that were announced",
        ClusterCommit,
        "_has_announced",
        lambda self, slot: False,
    ),
    "any-epoch": Bug(
        "messages of a former epoch count in the present one",
        Cluster,
        "hear",
        _any_epoch,
        seed=99,
    ),
    "wrong-coefficient": Bug(
        "a parity is computed with a wrong coefficient",
        erasure_code,
        "encoding_row",
        _wrong_row,
        seed=3,
    ),
    "unverified": Bug(
        "bytes are restored without a look at their digests",
        Fetcher,
        "intact",
        lambda self, fragment, bucket, data: True,
        seed=193,
    ),
    "newer-kept": Bug(
        "steps newer than the one that was restored are not void",
        ClusterCommit,
        "resume",
        _keep_newer,
        seed=3,
    ),
    "chunk-twice": Bug(
        "a chunk of a parity that comes twice is added twice",
        ParityReceiver,
        "take",
        _count_twice,
        seed=13,
    ),
    "message-flood": Bug(
        "a node answers each announcement with its own", Cluster, "hear", _announce_again
    ),
    "mirrors-dropped": Bug(
        "the mirrors of the oldest clean step are dropped with older ones",
        Cluster,
        "forget_mirrors_before",
        _drop_mirrors,
    ),
    "revoked-memory": Bug(
        "memory that a dead process may still write to is granted again",
        SlotGrants,
        "revoke",
        _keep_revoked,
        seed=62,
    ),
    "not-pinned": Bug(
        "a step that is being written to disk is overwritten",
        Leases,
        "_pin",
        _pin_nothing,
        seed=15,
    ),
    "checkpoint-removed": Bug(
        "the newest checkpoint that all disks have is removed as soon as two newer ones are there",
        Needed,
        "removable",
        lambda self, steps, keep: list(steps[:-keep]),
        seed=15,
    ),
    "second-epoch": Bug(
        "the second restore in a row drops steps that were announced before the first (was real)",
        ClusterCommit,
        "_has_announced",
        _drop_twice_joined,
        seed=39,
    ),
    "refused-in-silence": Bug(
        "nobody is told that a rank got no memory for a step (was real)",
        Steps,
        "allocation_refused",
        _refuse_in_silence,
        seed=12,
    ),
    "replaced-in-silence": Bug(
        "an SMP that replaced another does not say what it lacks (was real in part)",
        rank_work,
        "replacing",
        _say_nothing_of_the_past,
        seed=25,
    ),
    "replaced-late": Bug(
        "a lost SMP is replaced only when its rank needs it (was real)",
        trainers.Rank,
        "watch",
        _nothing,
        seed=9,
    ),
    "oldest-dealt": Bug(
        "a run with other nodes goes on from the oldest step that is held",
        choose_step,
        "held_steps",
        _oldest_first,
        seed=11,
    ),
    "equal-shards": Bug(
        "shards are put together for other nodes as if all had one length",
        _Target,
        "take",
        _as_if_equal,
        seed=11,
    ),
    "memory-grows": Bug(
        "once a step was in doubt each rank takes a slot more (was real)",
        Rank,
        "in_use",
        _allocate_more,
        seed=18,
    ),
    "commit-alone": Bug(
        "a step is committed once the root's own group has sealed it",
        CommitTree,
        "settle",
        _commit_alone,
        size=GROUPS,
    ),
    "commit-untold": Bug(
        "neighbours of other groups are not told over a new link what is sealed and committed",
        CommitTree,
        "linked",
        _nothing,
        seed=66,
        size=GROUPS,
    ),
}


def size_for(name: str, size: Size) -> Size:
    """Return the size of the cluster in which a bug is sought: its own, or else the given one."""
    planted = BUGS.get(name)
    return size if planted is None or planted.size == Size() else planted.size


@contextmanager
def bug(name: str) -> Iterator[None]:
    """Put in a bug of the table; ``""`` is none."""
    if name and name not in BUGS:
        raise ConfigError(f"planted bug {name!r} is unknown: choose one of {', '.join(BUGS)}")
    with ExitStack() as stack:
        if name:
            planted = BUGS[name]
            stack.enter_context(mock.patch.object(planted.owner, planted.name, planted.wrong))
            stack.callback(states.forget)
            states.forget()
        yield
