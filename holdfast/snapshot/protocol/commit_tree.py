"""The agreement of several parity groups on the steps that are committed, decided without I/O.

A group *seals* a step once all of its nodes hold it. The step is *committed* for the run once all
groups have sealed it, and only for a committed step is an older one given up: otherwise groups
could restore different steps. The groups form a tree with up to 8 children each. Each node of a
group is linked to one node of each neighbouring group, so that there is a tree for each place in a
group, and none of them is needed while another one stands::

    sealed in the group and below -> told to the parents -> the root: committed -> told downwards

A node passes on what it learns of a commit to the next node of its group, too: the successor of a
node whose parent is lost. If there is one group, a step is committed when it is sealed, and no
message of this file is sent.

**Order**: a node tells its parents of sealed steps in ascending order, and no step that is not
newer. So a step that is missing when a newer one is told of, or that is *passed*, will never be
sealed below: it is *dead*, and all that have told of it are answered that it is void. The answer is
not *firm* if an SMP was replaced: the former one may have told of the step, and other nodes may
have seen it committed. Then it is no longer waited for, and kept until a newer one is committed.

All of this is repeated on every new link; nothing depends on how often it is heard.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.snapshot.protocol import checkpoint_schedule
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Disk
from holdfast.snapshot.protocol.cluster_steps import StepRecords
from holdfast.snapshot.protocol.roster import Roster, fitted
from holdfast.snapshot.protocol.slots import NodeState

# A group is named as late after so long.
LATE_S = 1.0

TreeEvent = m.PeerSealed | m.PeerPassed | m.PeerVoid | m.PeerCommitted | m.PeerLate


@dataclass
class Branch:
    """The steps that a child has told of, for its own group and those below.

    Attributes:
        sealed: the state of their disks (``checkpoint_schedule.combined``), by sealed step.
        last, alive: steps up to ``last`` are dead unless they are sealed, or may be (``alive``).
        firm: false if an SMP was replaced there.
    """

    sealed: dict[int, Disk | None] = field(default_factory=dict)
    last: int = -1
    alive: frozenset[int] = frozenset()
    firm: bool = True

    def is_dead(self, step: int) -> bool:
        """Return true if the step will never be sealed there."""
        return step <= self.last and step not in self.sealed and step not in self.alive


class CommitTree:
    """One node's part in the commits of one epoch.

    Attributes:
        committed: the newest step that is committed, -1 if there is none.
        disk: the state of all nodes' disks that was told with it.
        late: the newest step that was named as late, and the nodes that it waits for.
        alone: true if there is no other group.
    """

    def __init__(self, roster: Roster, steps: StepRecords, node: NodeState) -> None:
        self.committed = -1
        self.disk: Disk | None = None
        self.late: tuple[int, tuple[int, ...]] = (-1, ())
        self._roster, self._steps, self._node = roster, steps, node
        self._here, self._void = Branch(), dict[int, bool]()
        self._branches = {node: Branch() for node in roster.children}
        self._told: dict[int, Disk | None] = {}
        self._answered, self._replaced = set[tuple[int, int]](), set[int]()
        self._stated: tuple[object, ...] = ()
        self._oldest, self._since_s = -1, 0.0
        place = roster.group.index(roster.node)
        self.alone = not (roster.parents or roster.children)
        self._next = () if self.alone else (roster.group[(place + 1) % len(roster.group)],)

    def sealed(self, step: int, disk: Disk | None) -> None:
        """Note that this node's group has sealed a step, with this state of its disks."""
        if step > max([self.committed, *self._here.sealed]):
            self._here.sealed[step] = disk
            self.settle()

    def has_sealed(self, step: int) -> bool:
        """Return true if ``sealed`` was called for this step, and it is not committed yet."""
        return step in self._here.sealed

    def give_up(self, step: int) -> None:
        """Note that this node drops a step, so that the group can never seal it."""
        # Of steps that were skipped in the group, all of it knows by itself.
        untold = not self.alone and step > self.committed and not self._steps.is_skipped(step)
        self._void[step] = True
        self._node.tell(self._roster.members if untold else (), "void", step, firm=True)
        self.settle(passed=True)

    def is_dead(self, step: int) -> bool:
        """Return true if a step will not be committed, or if that will never be known."""
        return bool(self._deaths(step))

    def is_void(self, step: int) -> bool:
        """Return true if a step is dead, and no node can have seen it committed."""
        return any(self._deaths(step))

    def _deaths(self, step: int) -> list[bool]:
        """Return for each reason why a step is dead whether it is firm."""
        if step <= self.committed:
            return []
        found = [branch.firm for branch in self._branches.values() if branch.is_dead(step)]
        found += [self._void[step]] if step in self._void else []
        if step not in self._here.sealed and self._steps.is_skipped(step):
            found.append(self._steps.is_skipped(step, firmly=True))
        return found

    def hear(self, event: TreeEvent) -> None:
        """Take a message of a neighbour, or of the node before this one in the group."""
        node, step, branch = event.node, event.step, self._branches.get(event.node)
        match event:
            case m.PeerCommitted():
                self._commit(step, _disk(event), node)
            case m.PeerLate() if step > max(self.committed, self.late[0]):
                self._name_late(step, tuple(event.nodes), node)
            case m.PeerVoid() if step > self.committed and step not in self._void:
                self._void[step] = event.firm and node not in self._replaced
                self._node.tell(self._next, "void", step, firm=self._void[step])
            case m.PeerSealed() if branch and step > self.committed:
                branch.sealed[step] = _disk(event)
                branch.alive = frozenset(other for other in branch.alive if other > step)
                self._answered.discard((node, step))
            case m.PeerPassed() if branch:
                branch.alive = frozenset(event.alive)
        if branch and isinstance(event, m.PeerSealed | m.PeerPassed):
            branch.last, branch.firm = max(step, branch.last), branch.firm and event.firm
        self.settle(passed=isinstance(event, m.PeerPassed))

    def settle(self, *, passed: bool = False) -> None:
        """Say what follows from the records; ``passed`` if a step was skipped in the group."""
        if self.alone and not self._here.sealed:
            return
        branches = [self._here, *self._branches.values()]
        for step in sorted(self._waiting()):
            if self.is_dead(step):
                told = {(node, step) for node, b in self._branches.items() if step in b.sealed}
                nodes = [node for node, _ in told - self._answered]
                self._answered |= told
                self._node.tell(nodes, "void", step, firm=self.is_void(step))
                passed = passed or step not in self._told
            elif step not in self._told and all(step in branch.sealed for branch in branches):
                disk = checkpoint_schedule.combined([each.sealed[step] for each in branches])
                if self._roster.parents:
                    self._told[step] = disk
                    self._tell_sealed(self._roster.parents, step)
                else:
                    self._commit(step, disk, -1)
        if passed:
            self._pass_on()

    def _waiting(self) -> set[int]:
        """Return the steps that were written here, or sealed somewhere, and are not committed."""
        branches = self._here, *self._branches.values()
        known = self._steps.own.keys(), *[each.sealed.keys() for each in branches]
        return {step for steps in known for step in steps if step > self.committed}

    def _commit(self, step: int, disk: Disk | None, by: int) -> None:
        if step <= self.committed:
            return
        # Before this node says anything of newer steps, its parents must know of the commit.
        unaware = [] if step in self._told else self._roster.parents
        to = {*unaware, *self._roster.children, *self._next} - {by}
        self.committed, self.disk = step, disk
        for branch in (self._here, *self._branches.values()):
            branch.sealed = {new: disk for new, disk in branch.sealed.items() if new > step}
        self._told = {new: disk for new, disk in self._told.items() if new > step}
        self._void = {new: firm for new, firm in self._void.items() if new > step}
        self._answered = {(node, new) for node, new in self._answered if new > step}
        self._node.tell(to, "committed", step, disk=disk or [])

    def _pass_on(self) -> None:
        """Tell the parents of the steps that may still be sealed up to the newest one, if any."""
        last = max(self._steps.newest(), *(b.last for b in [self._here, *self._branches.values()]))
        alive = (branch.alive for branch in self._branches.values())
        known = self._waiting() | self._steps.known().union(*alive)
        open_steps = [
            step
            for step in sorted(known)
            if self.committed < step <= last and step not in self._told and not self.is_dead(step)
        ]
        if last > self.committed and (last, open_steps, self._firm) != self._stated:
            self._stated = last, open_steps, self._firm
            fields = {"alive": open_steps, "firm": self._firm}
            self._node.tell(self._roster.parents, "passed", last, **fields)

    @property
    def _firm(self) -> bool:
        return not self._steps.replaced and all(each.firm for each in self._branches.values())

    def linked(self, node: int) -> None:
        """Say what a neighbour may have missed before its link was established."""
        if self.committed >= 0 and not self.alone:
            self._node.tell([node], "committed", self.committed, disk=self.disk or [])
        if node in self._roster.group and not self.alone:
            for step, firm in self._void.items():
                self._node.tell([node], "void", step, firm=firm)
        if node in self._roster.parents:
            for step in sorted(self._told):
                self._tell_sealed([node], step)
            self._stated = ()
            self._pass_on()
        self._answered = {(other, step) for other, step in self._answered if other != node}
        self.settle()

    def replaced(self, node: int) -> None:
        """Note that another SMP acts for a neighbour, which may not know what was told before."""
        self._replaced.add(node)
        if node in self._branches:
            self._branches[node].firm = False

    def tick(self) -> None:
        """Name what the oldest step waits for, if it has waited for long."""
        oldest = min((step for step in self._waiting() if not self.is_dead(step)), default=-1)
        if oldest != self._oldest:
            self._oldest, self._since_s = oldest, self._node.now_s
        waited_s = self._node.now_s - self._since_s
        if oldest <= self.late[0] or waited_s < LATE_S:
            return
        late = () if self._steps.is_sealed(oldest) else self._steps.lacking(oldest)
        if not late and waited_s > 2 * LATE_S:  # that group has had the time to name its own nodes
            late = tuple(n for n, each in self._branches.items() if oldest not in each.sealed)
        if late:
            self._name_late(oldest, late)

    def _name_late(self, step: int, nodes: tuple[int, ...], by: int = -1) -> None:
        self.late = step, nodes
        to = {*self._roster.parents, *self._roster.children, *self._next} - {by}
        self._node.tell(to, "late", step, nodes=nodes)

    def _tell_sealed(self, nodes: Iterable[int], step: int) -> None:
        self._node.tell(nodes, "sealed", step, disk=self._told[step] or [], firm=self._firm)


def _disk(event: m.PeerSealed | m.PeerCommitted) -> Disk | None:
    return fitted(event.disk, Disk) if event.disk else None
