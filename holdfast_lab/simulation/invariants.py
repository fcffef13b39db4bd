"""What must hold after every event, whatever happens.

- No wrong byte is restored, and no mixture of two states, or of two lives of the run.
- A step is committed only if every node holds it with its mirrors, but for nodes whose SMP was
  replaced since the step was begun.
- Nothing older than the newest committed step is restored, and that step stays restorable, as long
  as no more is lost than the parities make up for.
- A committed step can be rebuilt, bit for bit, from any nodes that may be left; some are.
- The newest checkpoint that all disks have stays there until all have a newer one.
- An SMP's memory, and the messages that it sends for a step, are bounded.
- Once faults have ceased a step is committed on all ranks, and the run ends (``World.run``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.protocol.slots import SlotState
from holdfast_lab.simulation import reading, resizing, states
from holdfast_lab.simulation.world import Violation

if TYPE_CHECKING:
    from holdfast.snapshot.restore.newest_state import Found
    from holdfast_lab.simulation.node import Node
    from holdfast_lab.simulation.trainers import Rank
    from holdfast_lab.simulation.world import World


TREE_MESSAGES = 8  # about a step to each neighbour in the commit tree
REHEARSED = 0.02  # the share of commits after which a loss is rehearsed


class Invariants:
    """Checks the run against its own record of what was written and committed.

    Attributes:
        newest: the newest step that any rank or node has seen committed.
        tokens: the number of the state of every step that was begun.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.newest: Stamp | None = None
        self._former_epoch = -1
        self.tokens: dict[Stamp, int] = {}
        self._begun_s: dict[Stamp, float] = {}
        self._restored: dict[int, tuple[int, int] | None] = {}
        self._common = -1
        self._beyond = False
        self._sent: Counter[tuple[int, int, int]] = Counter()

    def take_over(self, former: Invariants) -> None:
        """Go on after the run of another world, whose newest step other nodes wrote."""
        self.newest, self._former_epoch = former.newest, max(former._begun_s).epoch
        self.tokens, self._begun_s = dict(former.tokens), dict(former._begun_s)

    def _is_taken_over(self) -> bool:
        """Return true if the newest step was written by the nodes of another world."""
        return self.newest is not None and self.newest.epoch <= self._former_epoch

    def begins(self, rank: Rank, epoch: int, step: int, token: int) -> None:
        """Record that a rank copies a state."""
        stamp = Stamp(epoch, step)
        if self.tokens.get(stamp, token) != token and self._forgotten(stamp):
            del self.tokens[stamp]  # epochs begin at 1 again
        if self.tokens.setdefault(stamp, token) != token:
            raise Violation(f"rank {rank.rank} has another state at {stamp} than the others")
        self._begun_s.setdefault(stamp, self._world.now)

    def _forgotten(self, stamp: Stamp) -> bool:
        """Return true if no SMP is left that existed when a step was begun."""
        return all(self._new(node, stamp) for node in self._world.nodes)

    def _new(self, node: Node, stamp: Stamp) -> bool:
        return node.protocol is None or node.booted_s > self._begun_s[stamp]

    def committed(self, node: Node, stamp: Stamp) -> None:
        """Check that all nodes hold a step that one node sees committed."""
        if self.newest is not None and stamp <= self.newest:
            return
        world = self._world
        for other in world.nodes:
            if not self._new(other, stamp) and not (
                other.holds(stamp) and self._has_mirrors(other, stamp)
            ):
                raise Violation(f"node {node.index} committed {stamp}, node {other.index} lacks it")
        world.say("node {}: {} is committed", node.index, stamp)
        self.newest, self._beyond = stamp, False
        world.stats["commits"] += 1
        if world.draw.random() < REHEARSED:
            world.at(0.0, self._rehearse, stamp)

    def _rehearse(self, stamp: Stamp) -> None:
        """Rebuild the state of a rank from the newest step without as many nodes as may be lost."""
        world, lacking = self._world, self.lacking()
        epochs = {node.epoch for node in world.nodes if node.index not in lacking}
        if stamp != self.newest or world.too_many(lacking) or len(epochs) > 1:
            return
        lost = set(lacking)
        for group in world.cut:
            left = [node for node in group if node not in lacking]
            lost |= set(world.draw.sample(left, world.size.parities - len(group) + len(left)))
        rank = world.trainers.ranks[world.nodes[world.draw.choice(sorted(lost))].ranks[0]]
        tried = reading.rehearsed(rank, stamp, lost)
        if tried.damage or tried.unreachable:
            raise Violation(f"without nodes {sorted(lost)}, {stamp}: {tried}")
        if not states.is_state(tried.tree, rank.rank, world.replicated):
            raise Violation(f"without nodes {sorted(lost)}, wrong bytes of {stamp} are rebuilt")
        world.stats["rehearsed"] += 1

    def _has_mirrors(self, node: Node, stamp: Stamp) -> bool:
        cluster = node.protocol.cluster_commit.cluster if node.protocol else None
        if cluster is None or cluster.roster.epoch != stamp.epoch:
            return True  # it has begun a newer epoch meanwhile
        return all((rank, stamp) in cluster.mirrors for rank in cluster.roster.mirrored_ranks)

    def lacking(self) -> set[int]:
        """Return the nodes that do not hold the newest committed step."""
        if self.newest is None:
            return set()
        return {node.index for node in self._world.nodes if not node.holds(self.newest)}

    def at_stake(self) -> set[int]:
        """Return the nodes that lack the newest committed step, or will lack one in the making.

        An SMP that was replaced may have announced the step that is committed next.
        """
        if self._is_taken_over():
            return set(self._world.group_of)  # what is left of it is all needed
        found, last = self.lacking(), max(self._begun_s, default=Stamp(0, 0)).epoch
        for stamp in self._begun_s:
            if stamp.epoch == last and (self.newest is None or stamp > self.newest):
                found |= {node.index for node in self._world.nodes if self._new(node, stamp)}
        return found

    def changed(self, node: Node) -> None:
        """Check, after a node lost or dropped something, that the newest step survives."""
        if self.newest is None or self._is_taken_over():
            return
        world = self._world
        group = world.group_of[node.index]
        lacking = {other for other in group if not world.nodes[other].holds(self.newest)}
        self._beyond |= len(lacking) > world.size.parities
        if self._beyond:
            if not world.reckless:
                raise Violation(f"{self.newest} is lost on nodes {sorted(lacking)}")
            return
        if not self._restorable(group, lacking):
            raise Violation(
                f"{self.newest} cannot be put together; nodes {sorted(lacking)} lack it"
            )

    def _restorable(self, group: Collection[int], lacking: set[int]) -> bool:
        assert self.newest is not None
        nodes = [self._world.nodes[index] for index in group]
        known = {rank for node in nodes if node.index not in lacking for rank in node.ranks}
        for node in nodes:
            cluster = node.protocol.cluster_commit.cluster if node.protocol else None
            if cluster is not None:
                known |= {rank for rank, stamp in cluster.mirrors if stamp == self.newest}
        return known >= {rank for node in nodes for rank in node.ranks}

    def check(self, node: Node, event: m.Event) -> None:
        """Check a node after an event."""
        if isinstance(event, m.Tick | m.Spare):
            return
        if isinstance(event, m.Resume):
            self._resumed(Stamp(event.epoch, event.step))
        if self.newest is not None and node.protocol is not None and not node.holds(self.newest):
            self.changed(node)
        if isinstance(event, m.Allocated):
            self._check_memory(node, event.rank)

    def sends(self, node: Node, out: Iterable[m.Instruction]) -> None:
        """Check that an SMP sends no more about a step than its group and the tree need.

        To each other node of the group: that it wrote the step, holds it, skips it or gives it up,
        and the size of each rank's state; the manifests to those that mirror them. To each
        neighbour in the tree: sealed, committed, late, void, and what may still be sealed, which
        changes a few times while a step is under way. Pieces of parities are as many as bytes need.
        """
        told = [each for each in out if isinstance(each, m.ToPeer) and "step" in each.fields]
        cluster = node.protocol.cluster_commit.cluster if told and node.protocol else None
        if cluster is None:
            return
        roster, ranks = cluster.roster, len(node.ranks)
        neighbours = 0 if cluster.tree.alone else len(roster.parents + roster.children) + 1
        most = len(roster.members) * (4 + ranks) + ranks * roster.parities
        most += neighbours * TREE_MESSAGES
        for each in told:
            key: Any = node.instance, each.fields["epoch"], each.fields["step"]
            self._sent[key] += 1
            if self._sent[key] > most:
                raise Violation(
                    f"node {node.index} sends {self._sent[key]} messages about {key[1:]}, "
                    f"not {most}, to a group of {len(roster.group)}: {each.verb}"
                )

    def _resumed(self, stamp: Stamp) -> None:
        """Note that all ranks continue from a step, which counts as committed from now on."""
        if stamp == Stamp(0, 0):
            if self._beyond or self._world.reckless:
                self.newest = None
        elif self._beyond or self._world.reckless or self.newest is None or stamp > self.newest:
            self.newest, self._beyond = stamp, False

    def _check_memory(self, node: Node, local: int) -> None:
        assert node.protocol is not None
        slots = node.protocol.node.ranks[local].slots
        used = sum(slot.capacity > 0 for slot in slots)
        excused = sum(slot.doubtful or slot.state is SlotState.RETIRED for slot in slots)
        most = self._world.keep + 1 + excused + node.protocol.leases.readers
        if used > most:
            shown = [(slot.state.value, slot.stamp) for slot in slots]
            raise Violation(f"node {node.index}: {used} slots have memory, not {most}: {shown}")

    def restored(self, rank: Rank, epoch: int, found: Found | None) -> None:
        """Check what a rank has restored; all ranks of a life must have restored the same."""
        world = self._world
        step = found.step if found else -1
        world.say("rank {}: restored step {} in epoch {}", rank.rank, step, epoch)
        token = found.tree["token"] if found else -1
        if self._restored.setdefault(rank.life, (step, token)) != (step, token):
            raise Violation(f"rank {rank.rank} restored step {step}, others {self._restored}")
        if found is not None and found.source == "memory":
            self._check_state(rank, found)
        newest = self.newest.step if self.newest else -1
        if not (self._beyond or world.reckless) and step < newest:
            raise Violation(f"rank {rank.rank} restored step {step}, {self.newest} was committed")
        world.stats["restored"] += found is not None

    def _check_state(self, rank: Rank, found: Found) -> None:
        token = found.tree["token"]
        if (former := self._world.former) is not None and "dealt" in found.tree:
            right = resizing.is_dealt(found.tree, rank.rank, former)
            self._world.stats["dealt"] += 1
        else:
            right = states.is_state(found.tree, rank.rank, self._world.replicated)
        if not right:
            raise Violation(f"rank {rank.rank} restored wrong bytes of step {found.step}")
        if not any(s.step == found.step and t == token for s, t in self.tokens.items()):
            raise Violation(f"rank {rank.rank} restored a state of another step as {found.step}")

    def lost(self, rank: Rank, error: Exception) -> None:
        """Check that a run may begin anew because everything was lost."""
        if not (self._world.reckless and (self._beyond or self.newest is None)):
            raise Violation(f"rank {rank.rank}: {self.newest} was committed, but: {error}")
        self.newest, self._common = None, -1
        self.tokens.clear()
        self._begun_s.clear()

    def on_disk(self, node: Node) -> None:
        """Check, after a node wrote a checkpoint, that the newest common one is never lost."""
        disks = [other.disk.steps for other in self._world.nodes]
        own = sorted(node.disk.steps, reverse=True)
        common = next((step for step in own if all(step in steps for steps in disks)), -1)
        if common < self._common:
            raise Violation(f"all disks had step {self._common}, now {list(map(sorted, disks))}")
        self._common = common

    def back_to(self, step: int) -> None:
        """Note that the run continues from a step, and newer checkpoints are void."""
        self._common = min(self._common, step)
