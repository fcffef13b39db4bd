"""Loaders of torchdata and of Hugging Face datasets: a restart continues at the next batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from guard_cases import Run
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import Guard, Snapshots

pytestmark = pytest.mark.processes

ROWS, STEPS = 20, 12  # five batches a pass


def table(rows: int = ROWS) -> datasets.Dataset:
    """A map-style data set of Hugging Face."""
    values = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))
    return datasets.Dataset.from_dict({"row": values.tolist()})


def stream(buffer: int = 0, rows: int = ROWS) -> datasets.IterableDataset:
    """An iterable one with ``state_dict``, which forgets what a shuffle buffer holds."""
    made = table(rows).to_iterable_dataset(num_shards=4)
    return (made.shuffle(seed=3, buffer_size=buffer) if buffer else made).with_format("torch")


class Plain(IterableDataset[Any]):
    """A data set without a position, which shuffles."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
        return iter(rows[torch.randperm(ROWS)])


def loaders() -> dict[str, Callable[[], Any]]:
    """Makes of each kind a new one."""
    torch_table = lambda: table().with_format("torch")  # noqa: E731
    return {
        "torchdata": lambda: StatefulDataLoader(torch_table(), batch_size=4, shuffle=True),
        # One pass: later ones begin where the stream was resumed.
        "torchdata of a stream": lambda: StatefulDataLoader(stream(rows=4 * STEPS), batch_size=4),
        "DataLoader of a table": lambda: DataLoader(torch_table(), batch_size=4, shuffle=True),
        "DataLoader of a stream": lambda: DataLoader(stream(buffer=7), batch_size=4),
        "DataLoader of a plain set": lambda: DataLoader(Plain(), batch_size=4),
    }


def train(
    run_dir: Path, make: Callable[[], Any], ends_at: int | None = None, seed: int = 5
) -> tuple[list[str], str]:
    """Train to the end, or to a step; return the rows of each batch, and a digest."""
    torch.manual_seed(seed)
    loader, run, seen = make(), Run(), []  # torchdata draws a seed when it makes a loader
    snapshots = Snapshots(
        run.model, run.optimizer, scheduler=run.scheduler, loader=loader, run_dir=run_dir
    )
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=0.0) as guard:
        for batch in guard.batches(loader, steps=STEPS):
            rows = batch["row"] if isinstance(batch, dict) else batch
            seen.append(str(rows[:, 0].tolist()))
            guard.step(run.forward_backward, (guard.steps_done, rows))
            if guard.steps_done == ends_at:
                snapshots.wait_committed()
                raise KeyboardInterrupt
    return seen, run.digest()


@pytest.mark.parametrize("kind", loaders())
def test_a_restart_continues_at_the_next_batch(kind: str, tmp_path: Path) -> None:
    make = loaders()[kind]
    whole, digest = train(tmp_path / "whole", make)
    assert len(set(whole)) >= 5
    for ends_at in (3, 5):  # within a pass, and at its end
        run_dir = tmp_path / f"run{ends_at}"
        with pytest.raises(KeyboardInterrupt):
            train(run_dir, make, ends_at)
        rest, again = train(run_dir, make, seed=99)
        assert rest == whole[ends_at:], ends_at
        assert again == digest
