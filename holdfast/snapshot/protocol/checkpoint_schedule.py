"""The checkpoints that the nodes of a run write and keep, agreed upon without I/O or a leader.

A checkpoint of several nodes is of use only if all of them wrote the same step. So each says, with
every step that it announces (``cluster``), how its persister stands. Once the step is sealed every
node knows the same of all, and finds the same: it is due if all persisters wait for one and it is
in another interval than the last. Storage that is slow makes all nodes write more rarely; it never
makes them write different steps. A node whose persister does not come back (it hangs in its
storage, which it says) holds up the checkpoints of all, as there could be none without its part.

**Guarantee**: the newest step that all have on disk stays there, whoever is late and whoever dies,
until all have a newer one (``Needed``).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Disk(NamedTuple):
    """The state of a node's persister: ``every`` and ``after`` as in ``messages.Due``.

    ``steps`` were on its disk when it began to wait; whether it is ``waiting`` still.
    """

    every: int
    after: int
    steps: tuple[int, ...]
    waiting: bool

    @classmethod
    def parse(cls, given: Any) -> "Disk":
        """Read it as another node states it.

        Raises:
            ValueError, TypeError: it cannot be read.
        """
        every, after, steps, waiting = given
        if any(type(number) is not int for number in (every, after, *steps)):
            raise ValueError(f"a disk's {given!r} are no steps")
        return cls(every, after, tuple(steps), waiting is True)


class Needed(NamedTuple):
    """Checkpoints that must stay, however old: the step ``common``, and all ``since`` a step.

    Once all persisters were seen to wait, what some of them lacked then will never be common. So it
    is the newest step that all had, and what has been written since.
    """

    common: int
    since: int

    def removable(self, steps: Sequence[int], keep: int) -> list[int]:
        """Of the steps on a disk, oldest first, all but the newest ``keep`` and what must stay."""
        if self.common >= 0 and self.common not in steps:
            return []  # what is known is of before the run went back
        return [step for step in steps[:-keep] if step != self.common and step < self.since]


# A node that is alone needs nothing but its newest; of others nothing is known at first.
ALONE, UNKNOWN = Needed(-1, 2**62), Needed(-1, 0)


class Agreement(NamedTuple):
    """The agreement of all nodes: whether to write the step, and which checkpoints must stay."""

    due: bool
    needed: Needed


def is_due(step: int, every: int, after: int) -> bool:
    """Whether a step is in another interval of ``every`` steps than ``after``."""
    return step // max(1, every) != after // max(1, every)


def agreed(step: int, told: Sequence[Disk | None]) -> Agreement | None:
    """Return the nodes' agreement for a step that all hold; None: not all persisters wait."""
    waiting = [disk for disk in told if disk is not None and disk.waiting]
    if not waiting or len(waiting) < len(told):
        return None
    after = max(disk.after for disk in waiting)
    common = set.intersection(*(set(disk.steps) for disk in waiting))
    needed = Needed(max(common, default=-1), since=step)
    return Agreement(is_due(step, waiting[0].every, after), needed)
