"""A decision that all ranks take together: the maximum of an integer from each."""

from datetime import timedelta

import torch
import torch.distributed as dist

from holdfast import config


class Agreement:
    """Takes the maximum of one integer over all ranks; without a process group, of one rank.

    It has a gloo group of its own, so that it neither waits behind the trainer's collectives nor
    disturbs them. Every wait is bounded by ``HOLDFAST_TIMEOUT_S``.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            timeout = timedelta(seconds=config.timeout_s())
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def __call__(self, value: int) -> int:
        """Return the largest value that any rank gives."""
        if self._group is None:
            return int(value)
        votes = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        return int(votes)

    @property
    def rank(self) -> int:
        """This rank; 0 without a process group."""
        return 0 if self._group is None else dist.get_rank()

    def gather(self, digest: str) -> list[str]:
        """Return the digest (hexadecimal, of one length) that each rank gives."""
        if self._group is None:
            return [digest]
        sent = torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(received, sent, group=self._group)
        return [one.numpy().tobytes().decode() for one in received]
