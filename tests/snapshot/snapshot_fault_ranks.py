"""What the ranks of a run do that is to go wrong at a given point; each may be a rank's target."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench import nodes_rank
from bench.nodes_rank import HANG_S, Replica, Work, say
from holdfast import events
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.restore.cluster_restore import Rebuild
from holdfast.snapshot.restore.fetch import Fetcher

# The step after which ranks stand still, or one of them goes astray.
FAULT_STEP = 3


class Watched(Replica):
    """Says in every step what was recorded."""

    def __init__(self, directory: Path, width: int, rank: int) -> None:
        super().__init__(width, rank)
        self.rank, self.steps = rank, 0
        self._path = directory / f"events-{rank}.jsonl"
        self._path.unlink(missing_ok=True)

    def update(self) -> None:
        """As ``Replica``."""
        super().update()
        self.steps += 1
        for event in events.recent():
            say(self._path, kind=event.kind, detail=event.detail)
        events.clear()


class Diverging(Watched):
    """One rank's weights change by one bit."""

    def update(self) -> None:
        """As ``Replica``."""
        super().update()
        if (self.rank, self.steps) == (1, FAULT_STEP):
            self.model[0].weight.data.view(torch.int32)[0, 0] ^= 1


class Held(Replica):
    """Stands still once step ``FAULT_STEP`` was handed over."""

    steps = 0

    def update(self) -> None:
        """As ``Replica``."""
        super().update()
        self.steps += 1
        if self.steps > FAULT_STEP:
            time.sleep(HANG_S)


def watched(work: Work, *place: Any) -> None:
    """Nothing goes wrong."""
    nodes_rank.run(work, *place, make=partial(Watched, work.directory))


def diverging(work: Work, *place: Any) -> None:
    """A replica is no replica any more."""
    nodes_rank.run(work, *place, make=partial(Diverging, work.directory))


def held(keep: int, *place: Any) -> None:
    """Waits to be killed, with that many clean snapshots."""
    keeping(keep, *place, make=Held)


def keeping(keep: int, *place: Any, **make: Any) -> None:
    """Nothing goes wrong with so many clean snapshots."""
    with mock.patch.object(nodes_rank, "Snapshots", partial(Snapshots, keep=keep)):
        nodes_rank.run(*place, **make)


def pausing(work: Work, attempt: int, place: dict[str, str], log: Path) -> None:
    """Waits in the middle of restoring until it may ``go`` on."""
    run = Rebuild.run

    def paused(rebuild: Rebuild, room: int = 0) -> Any:
        (work.directory / f"restoring-{place['RANK']}").touch()
        while not (work.directory / "go").exists():
            time.sleep(0.01)
        return run(rebuild, room)

    with mock.patch.object(Rebuild, "run", paused):
        nodes_rank.run(work, attempt, place, log)


def trusting(*place: Any) -> None:
    """Takes whatever bytes it is given."""
    with mock.patch.object(Fetcher, "intact", return_value=True):
        nodes_rank.run(*place)


def disagreeing(work: Work, attempt: int, place: dict[str, str], log: Path) -> None:
    """Asks for another number of parities than the ranks before it."""
    nodes_rank.run(replace(work, parities=1 + (place["RANK"] == "2")), attempt, place, log)
