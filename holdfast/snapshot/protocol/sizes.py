"""Sizes of the states that ranks stripe together, told by their SMPs; decided without I/O.

Optimizers make their state in their first step, not everywhere alike, and who stripes a step must
count with the same sizes as the others.
"""

from collections.abc import Iterable, Iterator

# Ranks are at most a step apart; what was never answered is forgotten.
_STEPS = 4


class Sizes:
    """The bytes of each rank's state at the last few steps, and who is told of this node's."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, int]] = {}
        self._told: dict[tuple[int, int], frozenset[int]] = {}

    def know(self, step: int, rank: int, nbytes: int, nodes: Iterable[int] = ()) -> None:
        """Note a rank's size at a step; of this node's own ranks with the ``nodes`` in need."""
        self._known.setdefault(step, {})[rank] = nbytes
        self._told[step, rank] = frozenset(nodes)
        for old in sorted(self._known)[:-_STEPS]:
            for gone in self._known.pop(old):
                del self._told[old, gone]

    def of(self, step: int, ranks: Iterable[int]) -> list[int] | None:
        """Return the sizes of these ranks at a step, once all are known."""
        known = self._known.get(step, {})
        found = [known.get(rank) for rank in ranks]
        return None if None in found else [nbytes for nbytes in found if nbytes is not None]

    def told(self, node: int) -> Iterator[tuple[int, int, int]]:
        """Yield step, rank and size of all that a node should know from this one."""
        for (step, rank), nodes in self._told.items():
            if node in nodes:
                yield step, rank, self._known[step][rank]
