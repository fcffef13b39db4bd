"""Agreement of local ranks on the step to restore, decided without I/O: in memory, then on disk.

In memory: once all ranks have asked, all are offered the newest step, or the newest one before a
step that they name. If one finds it damaged it is dropped on all ranks and the next older one is
offered. Once all have verified it, all load it, and newer ones are dropped.

If no step is left each rank looks on disk, and proposes the newest step whose part of its own it
has verified. If all propose the same step they load it. Otherwise all are asked again for a step
that is not newer than the oldest proposal, so that the agreement ends.
"""

from collections.abc import Sequence

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.leases import Leases
from holdfast.snapshot.protocol.slots import NodeState


def agreed_on_disk(proposals: Sequence[int | None]) -> tuple[str, int]:
    """Return the verdict on the newest intact step that each rank has on disk, if any.

    The verdict is ``load`` with the step, ``older`` with the step that new proposals must not
    exceed, or ``nothing`` if a rank has no step.
    """
    steps = [step for step in proposals if step is not None]
    if len(steps) < len(proposals):
        return "nothing", -1
    return "load" if len(set(steps)) == 1 else "older", min(steps)


class RestoreAgreement:
    """The agreement that is under way, if any."""

    def __init__(self, node: NodeState, leases: Leases) -> None:
        self._node, self._leases = node, leases
        self._proposals: dict[int, int | None] = {}
        self._reset()

    def _reset(self) -> None:
        self._asked: set[int] = set()
        self._verified: set[int] = set()
        self._offered: int | None = None
        self._before = m.ANY_STEP

    def leave(self, rank: int) -> None:
        """Stop waiting for a rank."""
        self._asked.discard(rank)
        self._verified.discard(rank)
        self._proposals.pop(rank, None)
        if not self._asked:
            self._reset()

    def restore(self, rank: int, before: int = m.ANY_STEP) -> None:
        """Offer a rank the newest step before ``before`` once all ranks have asked for it."""
        self._proposals.pop(rank, None)
        if self._proposals:
            # The other ranks were told that memory holds nothing, and wait for this one.
            self._say_nothing(rank)
            return
        self._asked.add(rank)
        self._verified.discard(rank)
        self._before = min(before, self._before)
        if self._offered is None:
            self._offer_next()
        else:
            self._offer(rank, self._offered)

    def verified(self, event: m.Verified) -> None:
        """Note that a rank found its part of the offered step intact."""
        if self._stale(event.rank, event.step):
            return
        self._verified.add(event.rank)
        if len(self._verified) == len(self._node.ranks):
            for newer in [step for step in self._node.common() if step > event.step]:
                self._node.drop(newer)
            self._reset()
            self._tell_all("load", event.step)

    def corrupt(self, event: m.Corrupt) -> None:
        """Offer an older step; drop this one if a rank found its part damaged."""
        if self._stale(event.rank, event.step):
            return
        if event.kept:
            self._before = event.step
        else:
            self._node.drop(event.step)
        self._offered = None
        self._verified.clear()
        self._offer_next()

    def recall(self, event: m.Recall) -> None:
        """Record a rank's proposal of a step on disk; answer all once all have proposed."""
        self._proposals[event.rank] = event.step if event.found else None
        if len(self._proposals) == len(self._node.ranks):
            proposals, self._proposals = list(self._proposals.values()), {}
            verdict, step = agreed_on_disk(proposals)
            # Steps that were kept although these ranks could not use them are of the past now.
            for held in self._node.common() if verdict == "load" else ():
                if held >= step:
                    self._node.drop(held)
            self._tell_all(verdict, step)

    def _tell_all(self, verb: str, step: int) -> None:
        if verb == "load":
            self._leases.back_to(step)
        for rank in range(len(self._node.ranks)):
            self._node.reply(rank, verb, step=step)

    def _stale(self, rank: int, step: int) -> bool:
        # A verdict on a former offer needs no answer: the newer offer was sent already.
        return rank not in self._asked or step != self._offered

    def _offer_next(self) -> None:
        if len(self._asked) < len(self._node.ranks):
            return
        older = (step for step in self._node.common() if step < self._before)
        self._offered = max(older, default=None)
        if self._offered is None:
            self._reset()
        for rank in range(len(self._node.ranks)):
            if self._offered is None:
                self._say_nothing(rank)
            else:
                self._offer(rank, self._offered)

    def _offer(self, rank: int, step: int) -> None:
        slot = self._node.ranks[rank].clean()[step]
        index = self._node.ranks[rank].slots.index(slot)
        fields = {"step": step, "slot": index, "digest": slot.digest}
        self._node.out.append(m.Reply(rank, "offer", fields, slot=index, manifest=slot.manifest))

    def _say_nothing(self, rank: int) -> None:
        self._node.reply(rank, "lost" if self._node.commits else "fresh", step=-1)
