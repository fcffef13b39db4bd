"""How local ranks agree on the step to restore, decided without I/O: in memory, then on disk.

In memory: once all ranks asked, all are offered the newest step; if one finds it damaged it is
dropped everywhere and the next older one is offered; once all verified it, all load it. If none is
left each looks on disk (``recalls``).
"""

from collections.abc import Callable

from holdfast.snapshot import messages as m
from holdfast.snapshot.recalls import Recalls
from holdfast.snapshot.slots import Rank, drop


class Rounds:
    """The agreement that is under way, if any: who asked, what is offered, who verified it.

    Args:
        ranks: the slots of every local rank, shared with the protocol.
        newest: the newest step that is CLEAN on every rank.
        committed: whether a step ever was.
    """

    def __init__(
        self, ranks: list[Rank], newest: Callable[[], int | None], committed: Callable[[], bool]
    ) -> None:
        self._ranks, self._newest, self._committed = ranks, newest, committed
        self._recalls = Recalls(len(ranks))
        self._reset()

    def _reset(self) -> None:
        self._asked: set[int] = set()
        self._verified: set[int] = set()
        self._offered: int | None = None

    def leave(self, rank: int) -> None:
        """Count on a rank no more."""
        self._asked.discard(rank)
        self._verified.discard(rank)
        self._recalls.withdraw(rank)
        if not self._asked:
            self._reset()

    def restore(self, rank: int) -> list[m.Instruction]:
        """A rank asks for the newest intact step."""
        self._recalls.withdraw(rank)
        if self._recalls.underway:
            # The others know already that memory holds nothing, and wait for this rank.
            return [self._nothing(rank)]
        self._asked.add(rank)
        self._verified.discard(rank)
        return self._offer_next() if self._offered is None else [self._offer(rank, self._offered)]

    def verified(self, event: m.Verified) -> list[m.Instruction]:
        """A rank found its part of the offered step intact."""
        if self._stale(event.rank, event.step):
            return []
        self._verified.add(event.rank)
        if len(self._verified) < len(self._ranks):
            return []
        self._reset()
        return [m.Reply(rank, "load", {"step": event.step}) for rank in range(len(self._ranks))]

    def corrupt(self, event: m.Corrupt) -> list[m.Instruction]:
        """A rank found its part of the offered step damaged."""
        if self._stale(event.rank, event.step):
            return []
        drop(self._ranks, event.step)
        self._offered = None
        self._verified.clear()
        return self._offer_next()

    def recall(self, event: m.Recall) -> list[m.Instruction]:
        """A rank proposes a step on disk."""
        return self._recalls.propose(event)

    def _stale(self, rank: int, step: int) -> bool:
        # The answer to a stale verdict is the newer offer, which is on its way already.
        return rank not in self._asked or step != self._offered

    def _offer_next(self) -> list[m.Instruction]:
        if len(self._asked) < len(self._ranks):
            return []
        step = self._newest()
        if step is None:
            self._reset()
            return [self._nothing(rank) for rank in range(len(self._ranks))]
        self._offered = step
        return [self._offer(rank, step) for rank in range(len(self._ranks))]

    def _offer(self, rank: int, step: int) -> m.Instruction:
        slot = self._ranks[rank].clean()[step]
        index = self._ranks[rank].slots.index(slot)
        fields = {"step": step, "slot": index, "digest": slot.digest}
        return m.Reply(rank, "offer", fields, slot=index, manifest=slot.manifest)

    def _nothing(self, rank: int) -> m.Instruction:
        return m.Reply(rank, "lost" if self._committed() else "fresh", {"step": -1})
