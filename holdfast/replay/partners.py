"""A pair of ranks that run the same program and exchange values to compare them."""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from holdfast import config
from holdfast.errors import ConfigError

_meetings: Counter[tuple[int, int]] = Counter()


def _pair_group(own: int, other: int) -> tuple[Any, int]:
    """Make a gloo group of two ranks; return it with the other rank's place in it.

    ``torch.distributed.new_group`` cannot be used: it has to be called by all ranks of the job,
    and a second group of the same ranks would find the addresses of the first one in the store.
    """
    pair = min(own, other), max(own, other)
    _meetings[pair] += 1
    name = f"holdfast/partners/{pair[0]}-{pair[1]}/{_meetings[pair]}"
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    limit = timedelta(seconds=config.timeout_s())
    return dist.ProcessGroupGloo(store, pair.index(own), 2, limit), pair.index(other)


class Partner:
    """The other rank of a comparison, reached over a gloo group of the two.

    Args:
        rank: Number of the other rank, which names this one in turn.
        reference: True if this rank's values are the correct ones; the other rank gives False.

    Raises:
        ConfigError: There is no process group, no such rank, or both sides say the same.
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
        self._group, self._there = _pair_group(own, rank)
        if bool(self.exchange(torch.tensor(reference))) == reference:
            self.close()
            raise ConfigError(
                f"ranks {own} and {rank} both say reference={reference}: one of them must be it"
            )

    def pair(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange a tensor; return the reference's values and the suspect's."""
        theirs, mine = self.exchange(tensor), tensor.detach()
        return (mine, theirs) if self.reference else (theirs, mine)

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the other rank's tensor of the same shape and dtype, on this tensor's device.

        Raises:
            RuntimeError: The partner is gone, or does not answer in time.
        """
        mine = tensor.detach().cpu().contiguous()
        theirs = torch.empty_like(mine)
        if mine.numel():
            received = [torch.empty_like(_bytes(mine)), torch.empty_like(_bytes(mine))]
            received[self._there] = _bytes(theirs)
            self._group.allgather([received], [_bytes(mine)]).wait()
        return theirs.to(tensor.device)

    def close(self) -> None:
        """Leave the group, which ends its threads."""
        self._group = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
