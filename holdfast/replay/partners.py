"""Two ranks that compute the same thing, and what one of them makes of the other's values."""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from holdfast import config
from holdfast.errors import ConfigError

_meetings: Counter[tuple[int, int]] = Counter()


def _met(own: int, other: int) -> tuple[Any, int]:
    """A group of these two ranks, and the other's place in it.

    ``new_group`` is for all ranks of a job, or else may be had once of the same ranks: of a second
    one it finds the addresses of the first.
    """
    pair = min(own, other), max(own, other)
    _meetings[pair] += 1
    name = f"holdfast/partners/{pair[0]}-{pair[1]}/{_meetings[pair]}"
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    limit = timedelta(seconds=config.timeout_s())
    return dist.ProcessGroupGloo(store, pair.index(own), 2, limit), pair.index(other)


class Partner:
    """The rank that this one is compared with, over a gloo group of the two of them.

    Args:
        rank: the partner's; it must name this one.
        reference: whether this side's values are the ones that count; the partner's must not.

    Raises:
        ConfigError: there is no process group, no such rank, or both sides say the same.
    """

    def __init__(self, rank: int, *, reference: bool) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "comparing two ranks needs torch.distributed: call init_process_group first"
            )
        own, ranks = dist.get_rank(), dist.get_world_size()
        if not 0 <= rank < ranks or rank == own:
            raise ConfigError(
                f"partner = {rank}: this is rank {own} of {ranks}, name another one of them"
            )
        self.rank, self.reference = rank, reference
        self._group, self._there = _met(own, rank)
        mine, theirs = torch.tensor([int(reference)]), torch.empty(1, dtype=torch.int64)
        votes = [theirs, theirs.clone()] if own > rank else [theirs.clone(), theirs]
        self._group.allgather([votes], [mine]).wait()
        if int(mine) + int(theirs) != 1:
            self.close()
            raise ConfigError(
                f"ranks {own} and {rank} both say reference={reference}: one of them must be it"
            )

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """The other side's values of a tensor of the same shape and dtype, on the same device.

        Raises:
            RuntimeError: the partner is gone, or not there in time.
        """
        mine = tensor.detach().cpu().contiguous()
        theirs = torch.empty_like(mine)
        if self.reference:
            self._receive(theirs)
            self._send(mine)
        else:
            self._send(mine)
            self._receive(theirs)
        return theirs.to(tensor.device)

    def _send(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._group.send([_bytes(tensor)], self._there, 0).wait()

    def _receive(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._group.recv([_bytes(tensor)], self._there, 0).wait()

    def close(self) -> None:
        """Leave the group; its threads end with it."""
        self._group = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
