"""Replicas that no longer hold the same parameters: which rank errs, and when to give up."""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from holdfast import events
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault
from holdfast.events import EventKind
from holdfast.replay.agreement import Agreement
from holdfast.replay.parameters import parameters_of

MAX_RETURNS = 2  # roll-backs for replicas that differ, without a committed snapshot between them


class Replicas:
    """Decides what follows when snapshots of replicas differ; the same on all ranks.

    Args:
        model: The model whose parameters are compared.
        agree: Connects the ranks.
    """

    def __init__(self, model: nn.Module, agree: Agreement) -> None:
        self._model, self._agree = model, agree
        self._returns, self._committed, self._handled = 0, -1, -1

    def differ(self, steps: Iterable[int]) -> bool:
        """Return whether a snapshot of any of these steps differed that is not dealt with yet."""
        return any(step > self._handled for step in steps)

    def reason(self, step: int, committed: int | None) -> str:
        """Return why the step must not be applied, and which rank erred; all ranks call it.

        Args:
            step: The step at hand; snapshots up to it are dealt with after this call.
            committed: The newest step of which the replicas were the same.

        Raises:
            UncorrectableFault: Rolling back has not helped.
        """
        newest = self._agree(-1 if committed is None else committed)
        self._returns = self._returns + 1 if newest == self._committed else 1
        self._committed, self._handled = newest, step
        wrong = self._wrong_ranks()
        said = "replicas hold different parameters, as an update or a reduction went wrong"
        said += (
            f" on rank {', '.join(map(str, wrong))}" if wrong else ", and no majority says where"
        )
        if self._returns > MAX_RETURNS:
            for rank in wrong if self._agree.rank == 0 else ():
                events.record(EventKind.EVICT, rank=rank, detector="digest", detail={"step": step})
            raise UncorrectableFault(
                f"step {step}: {said}, also after {MAX_RETURNS} roll-backs; replace the device, or "
                "audit with Guard(shadow=1.0) to find it, and restart"
            )
        return said

    def _wrong_ranks(self) -> list[int]:
        """Return the ranks whose parameters differ from those of most ranks, if there are three."""
        parameters = parameters_of(self._model)
        digests = self._agree.gather(tensors_digest(p.detach() for p in parameters))
        divided = any(hasattr(p, "device_mesh") for p in parameters)
        digest, count = Counter(digests).most_common(1)[0]
        if divided or len(digests) < 3 or 2 * count <= len(digests):
            return []
        return [rank for rank, own in enumerate(digests) if own != digest]
