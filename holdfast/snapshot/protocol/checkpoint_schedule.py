"""The checkpoints that the nodes of a run write and keep, agreed on without I/O or a leader.

A checkpoint of several nodes can be loaded only if all of them wrote the same step. Therefore each
node, with every step that it announces (``cluster``), states the condition of its persister. With
the commit of the step (``commit_tree``) every node learns what all statements say together, and
reaches the same decision: the step is due if all persisters are waiting and it is in another
interval than the last one. Slow storage makes all nodes write less often, but never makes them
write different steps. If a node's persister never returns (it hangs in its storage, which it
reports) no node writes a checkpoint, because none would be complete without its part.

**Guarantee**: the newest step that all nodes have on disk stays there, whatever node is late or
dies, until all have a newer one (``Needed``).
"""

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.snapshot.protocol.roster import Count


class Disk(NamedTuple):
    """The state of a node's persister.

    Attributes:
        every, after: as in ``messages.Due``.
        steps: the steps that were on its disk when it began to wait.
        waiting: true if it still waits for a step to write.
    """

    every: Count
    after: Count
    steps: tuple[Count, ...]
    waiting: bool


class Needed(NamedTuple):
    """Checkpoints that must stay, however old: the step ``common``, and all steps from ``since``.

    At the time when all persisters were seen waiting, ``common`` was the newest step on all disks.
    An older step that some disk lacked then will never be on all of them. Newer steps may be.
    """

    common: int
    since: int

    def removable(self, steps: Sequence[int], keep: int) -> list[int]:
        """Return the steps on a disk, oldest first, that may go if the newest ``keep`` stay."""
        if self.common >= 0 and self.common not in steps:
            return []  # this agreement is older than a rollback of the run
        return [step for step in steps[:-keep] if step != self.common and step < self.since]


# A node that is alone needs only its newest step; of other nodes nothing is known at first.
ALONE, UNKNOWN = Needed(-1, 2**62), Needed(-1, 0)


class Agreement(NamedTuple):
    """The agreement of all nodes: whether to write the step, and which checkpoints must stay."""

    due: bool
    needed: Needed


def is_due(step: int, every: int, after: int) -> bool:
    """Return true if a step is in another interval of ``every`` steps than ``after``."""
    return step // max(1, every) != after // max(1, every)


def combined(told: Sequence[Disk | None]) -> Disk | None:
    """Return what all these statements say together; None if not all persisters wait."""
    waiting = [disk for disk in told if disk is not None and disk.waiting]
    if not waiting or len(waiting) < len(told):
        return None
    common = set.intersection(*(set(disk.steps) for disk in waiting))
    after = max(disk.after for disk in waiting)
    return Disk(waiting[0].every, after, tuple(sorted(common)), waiting=True)


def agreed(step: int, disk: Disk | None) -> Agreement | None:
    """Return the nodes' agreement for a step that all hold, from what is ``combined`` of them."""
    if disk is None:
        return None
    needed = Needed(max(disk.steps, default=-1), since=step)
    return Agreement(is_due(step, disk.every, disk.after), needed)
