"""How local ranks agree on a step to load from disk, decided without I/O.

Each proposes the newest step of which it has verified its own part. If all propose the same they
load it; else all are asked again, for nothing newer than the oldest proposal, so that it ends.
"""

from collections.abc import Sequence

from holdfast.snapshot import messages as m


class Recalls:
    """The proposals of one agreement among ``world_size`` ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._proposals: dict[int, m.Recall] = {}

    @property
    def underway(self) -> bool:
        """Whether a rank has proposed and is waiting for the others."""
        return bool(self._proposals)

    def withdraw(self, rank: int) -> None:
        """Forget the proposal of a rank that left or began anew."""
        self._proposals.pop(rank, None)

    def propose(self, event: m.Recall) -> list[m.Instruction]:
        """Take a rank's proposal; the answers to all, once all have proposed."""
        self._proposals[event.rank] = event
        if len(self._proposals) < self._world_size:
            return []
        proposals, self._proposals = list(self._proposals.values()), {}
        verb, step = verdict(proposals)
        return [m.Reply(rank, verb, {"step": step}) for rank in range(self._world_size)]


def verdict(proposals: Sequence[m.Recall]) -> tuple[str, int]:
    """What follows from everybody's proposals: ``load``, ``older`` or ``nothing``, and the step."""
    oldest = min(proposal.step for proposal in proposals)
    if not all(proposal.found for proposal in proposals):
        return "nothing", -1
    if all(proposal.step == oldest for proposal in proposals):
        return "load", oldest
    return "older", oldest
