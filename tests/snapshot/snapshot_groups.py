"""Several parity groups without sockets: ``Nodes`` whose groups seal and whose tree commits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from random import Random
from typing import Any, ClassVar

import pytest
from snapshot_nodes import Nodes, roster_of

from holdfast.snapshot.layout import node_groups
from holdfast.snapshot.restore import choose_step
from holdfast.snapshot.restore.choose_step import Candidate

LOSSES = 6


class Groups(Nodes):
    """Nodes with one rank each, in groups of these sizes, in a tree of this fan-out."""

    # Milder than those of one group: what befalls one node costs all of them the step.
    campaign_moves = 150
    moves: ClassVar = {
        "begin": 30.0,
        "write": 60.0,
        "deliver": 240.0,
        "cut": 0.4,
        "mend": 4.0,
        "wait": 0.1,
        "lose": 0.3,
        "replace": 0.4,
        "tear": 0.2,
    }

    def __init__(
        self, sizes: Sequence[int], parities: int = 1, keep: int = 1, fan_out: int = 8
    ) -> None:
        ends = [*accumulate(sizes)]
        starts = [0, *ends]
        self.groups = [tuple(range(*pair)) for pair in zip(starts, ends, strict=False)]
        self.tree = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node_groups, "FAN_OUT", fan_out)
            for node in range(ends[-1]):
                self.tree.append(node_groups.tree_neighbours(self.groups, node))
        super().__init__(ends[-1], parities, keep)

    def group_of(self, node: int) -> tuple[int, ...]:
        """Return the group of a node."""
        return next(group for group in self.groups if node in group)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the nodes of a group, and neighbours in the tree, in both orders."""
        found = []
        for node, neighbours in enumerate(self.tree):
            others = {*self.group_of(node), *chain(*neighbours)} - {node}
            found += [(node, other) for other in sorted(others)]
        return found

    def roster(self, node: int) -> dict[str, Any]:
        """Return what the ranks of a node are told of the run."""
        group, (parents, children) = self.group_of(node), self.tree[node]
        place = group.index(node)
        known = {n: ("127.0.0.1", 1000 + n) for n in (*group, *parents, *children)}
        alone = roster_of(place, [known[n] for n in group], self.parities, self.epoch)
        return replace(
            alone,
            node=node,
            run_nodes=self.count,
            group=group,
            addresses=known,
            first_rank=node,
            mirror_nodes=tuple(tuple(group[n] for n in nodes) for nodes in alone.mirror_nodes),
            mirrored_ranks=tuple(group[rank] for rank in alone.mirrored_ranks),
            sets=((group,),),
            parents=parents,
            children=children,
        ).encode()

    def restorable(self, lost: tuple[int, ...] = ()) -> Candidate | None:
        """Return the newest step that all groups could put together without these nodes."""
        held = self.inventories(lost)
        found = [
            choose_step.candidates(held, [g], self.parities, g, len(held)) for g in self.groups
        ]
        common = set.intersection(*({each.stamp for each in each_group} for each_group in found))
        return next((each for each in found[0] if each.stamp in common), None)

    def losses(self) -> list[tuple[int, ...]]:
        """Return some of the sets of nodes that may be lost now."""
        draw, found = Random(str(self.wires.keys())), []
        for _ in range(LOSSES):
            lost = list[int]()
            for group in self.groups:
                left = self.parities - len(self.bare.intersection(group))
                whole = [node for node in group if node not in self.bare]
                lost += draw.sample(whole, draw.randint(0, max(0, min(left, len(whole)))))
            found.append(tuple(lost))
        return found

    def move(self, draw: Random, steps: list[int]) -> None:
        """As ``Nodes``; no group has more SMPs replaced at a time than it may lose."""
        bare = self.bare
        super().move(draw, steps)
        for group in self.groups:
            assert len(self.bare.intersection(group)) <= self.parities, bare
