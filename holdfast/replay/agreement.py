"""One decision of all ranks: the largest of what each of them wants."""

from datetime import timedelta

import torch
import torch.distributed as dist

from holdfast import config


class Agreement:
    """``Agreement()(wish)`` is the maximum of all ranks' integer wishes; one rank agrees alone.

    Uses a gloo group of its own, so that it neither waits behind nor disturbs the trainer's
    collectives; every wait is bounded by ``HOLDFAST_TIMEOUT_S``.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            timeout = timedelta(seconds=config.timeout_s())
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def __call__(self, wish: int) -> int:
        """The largest wish of all ranks."""
        if self._group is None:
            return int(wish)
        votes = torch.tensor([wish], dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        return int(votes)
