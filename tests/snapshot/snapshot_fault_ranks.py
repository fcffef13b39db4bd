"""What the ranks of a run do that is to go wrong at a given point; each may be a rank's target."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from dtensor_trainer import local_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bench import nodes_rank
from bench.nodes_rank import HANG_S, Replica, Work, say
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.restore import cluster_restore
from holdfast.snapshot.restore.stripe_decode import Fetcher
from holdfast.snapshot.transport.remote import Remote

# The step after which ranks stand still, or one of them goes astray.
FAULT_STEP = 3


class Diverging(Replica):
    """A replica of which one rank's weights change by one bit; it says what was recorded."""

    def __init__(self, directory: Path, width: int, rank: int) -> None:
        super().__init__(width, rank)
        self.rank, self.steps = rank, 0
        self._path = directory / f"events-{rank}.jsonl"

    def update(self) -> None:
        """As ``Replica``."""
        super().update()
        self.steps += 1
        for event in events.recent():
            say(self._path, kind=event.kind, detail=event.detail)
        events.clear()
        if (self.rank, self.steps) == (1, FAULT_STEP):
            self.model[0].weight.data.view(torch.int32)[0, 0] ^= 1


class Sharded(Replica):
    """A model divided among the ranks by FSDP2 or HSDP: each of them holds a state of its own."""

    def __init__(self, layout: str, width: int, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, width + 1),
            nn.BatchNorm1d(width + 1),
            nn.Dropout(),
            nn.Linear(width + 1, 3),
        )
        self.ddp = fully_shard(self.model, mesh=_mesh(layout))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        torch.manual_seed(rank + 1)

    def digest(self) -> str:
        """Of all that this rank must get back bit for bit."""
        parts: list[Any] = [self.model, self.optimizer, self.scheduler]
        states = local_state([part.state_dict() for part in parts])
        return state_digest([states, torch.get_rng_state()])


def _mesh(layout: str) -> DeviceMesh | None:
    if layout == "fsdp":
        return None
    # Folded: both replicas of a shard are on one node, which divides the work on it.
    ranks = [[0, 1], [2, 3]] if layout == "hsdp" else [[0, 2], [1, 3]]
    return DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard"))


def sharded(layout: str, *place: Any) -> None:
    """Nothing goes wrong with a model that is divided so."""
    nodes_rank.run(*place, make=partial(Sharded, layout))


class Held(Replica):
    """Stands still once step ``FAULT_STEP`` was handed over."""

    steps = 0

    def update(self) -> None:
        """As ``Replica``."""
        super().update()
        self.steps += 1
        if self.steps > FAULT_STEP:
            time.sleep(HANG_S)


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
    rebuild = cluster_restore.rebuild

    def paused(*given: Any, **options: Any) -> Any:
        (work.directory / f"restoring-{place['RANK']}").touch()
        while not (work.directory / "go").exists():
            time.sleep(0.01)
        return rebuild(*given, **options)

    with mock.patch.object(cluster_restore, "rebuild", paused):
        nodes_rank.run(work, attempt, place, log)


def trusting(*place: Any) -> None:
    """Takes whatever bytes it is given."""
    with mock.patch.object(Fetcher, "intact", return_value=True):
        nodes_rank.run(*place)


def disagreeing(work: Work, attempt: int, place: dict[str, str], log: Path) -> None:
    """Asks for another number of parities than the ranks before it."""
    nodes_rank.run(replace(work, parities=1 + (place["RANK"] == "2")), attempt, place, log)


def refused(times: int, work: Work, attempt: int, place: dict[str, str], log: Path) -> None:
    """Of rank 2 that many connections to other nodes' memories are refused while it restores."""
    connected, left = Remote._connected, [times if place["RANK"] == "2" else 0]

    def refuse(remote: Remote) -> Any:
        if left[0]:
            left[0] -= 1
            raise ConnectionRefusedError("the backlog is full")
        return connected(remote)

    with mock.patch.object(Remote, "_connected", refuse):
        nodes_rank.run(work, attempt, place, log)


def misdirected(work: Work, attempt: int, place: dict[str, str], log: Path) -> None:
    """Node 1 is told a wrong address of node 0, to which nobody listens; nobody waits for it."""
    roster_of = Membership._roster

    def wrong(membership: Membership, *told: Any) -> Any:
        roster = roster_of(membership, *told)
        _, port = roster.addresses[0]
        wrong = {**roster.addresses, 0: ("127.0.0.77", port)}
        return replace(roster, addresses=wrong) if place["RANK"] == "1" else roster

    unhurried = mock.patch.object(Snapshots, "wait_committed", return_value=None)
    with mock.patch.object(Membership, "_roster", wrong), unhurried:
        nodes_rank.run(work, attempt, place, log)
