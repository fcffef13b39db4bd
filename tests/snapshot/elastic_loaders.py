"""Loaders with a state, of the rows of one rank."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


class Stream(IterableDataset[Any]):
    """The rows of a rank, one after the other; it has a state if ``stateful``."""

    def __init__(self, rows: range, stateful: bool) -> None:
        self.rows, self.given = rows, 0
        if stateful:
            self.state_dict = lambda: {"given": self.given}
            self.load_state_dict = lambda state: setattr(self, "given", state["given"])

    def __iter__(self) -> Iterator[int]:
        for row in self.rows[self.given :]:
            self.given += 1
            yield row


def loader_of(kind: str, rows: int, batch: int, place: tuple[int, int]) -> StatefulDataLoader[Any]:
    """A new loader for a rank of so many; ``plain+2`` has two workers."""
    (name, _, workers), (rank, ranks) = kind.partition("+"), place
    given: dict[str, Any] = {"batch_size": batch, "num_workers": int(workers or 0)}
    if name.endswith("stream"):
        stream = Stream(range(rank, rows, ranks), name == "stateful stream")
        return StatefulDataLoader(stream, **given)
    made = StatefulDistributedSampler if name == "stateful" else DistributedSampler
    sampler = made(range(rows), num_replicas=ranks, rank=rank, seed=5)
    return StatefulDataLoader(range(rows), sampler=sampler, **given)
