"""Ranks of one node that train replicas, or models of their own, and what tests have them do."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import STARTING_S
from torch import nn

from bench.nodes_rank import say
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.errors import SnapshotMismatch
from holdfast.snapshot.client.snapshots import Snapshots


class Replica:
    """A model whose gradients are averaged over the ranks; its batches differ from rank to rank."""

    def __init__(self, *, seed: int | None = 3, averaged: bool = True, width: int = 31) -> None:
        torch.manual_seed(dist.get_rank() if seed is None else seed)
        self.net = nn.Sequential(nn.Linear(24, width), nn.BatchNorm1d(width), nn.Linear(width, 5))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.averaged = averaged
        torch.manual_seed(dist.get_rank())

    def forward_backward(self, batch: object = None) -> torch.Tensor:
        loss = self.net(torch.randn(8, 24)).square().sum()
        loss.backward()
        for parameter in self.net.parameters() if self.averaged else ():
            dist.all_reduce(parameter.grad)
        return loss

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.forward_backward()
        self.optimizer.step()
        return float(loss.detach())

    def digest(self) -> str:
        """The digest of all of it, generators and buffers of this rank included."""
        state = [self.net.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()]
        return state_digest(state)


def train(
    said: Path,
    run_dir: Path,
    steps: int,
    hang_at: int = -1,
    options: dict[str, Any] | None = None,
    flip: tuple[int, int] | None = None,
    finished: bool = True,
    kind: dict[str, Any] | None = None,
) -> None:
    """Restore, say so, train on to ``steps``, and say the state after each.

    At step ``hang_at``, its copy in flight, nothing more happens: it is for the test to kill.
    ``flip`` is a rank and a step after which one of its weights changes.
    """
    run = Replica(**(kind or {}))
    before = run.digest()
    snapshots = Snapshots(run.net, run.optimizer, run_dir=run_dir, **(options or {}))
    try:
        start = snapshots.restore() or 0
    except SnapshotMismatch as mismatch:
        say(said, error=str(mismatch), before=before, digest=run.digest())
        snapshots.close(finished=False)
        return
    say(said, start=start, before=before, digest=run.digest())
    for step in range(start + 1, steps + 1):
        snapshots.finish()
        run.step()
        if flip == (dist.get_rank(), step):
            with torch.no_grad():
                run.net[0].weight.view(-1)[step] += 1
        snapshots.begin(step)
        say(said, step=step, digest=run.digest())
        if step == hang_at:
            time.sleep(2 * STARTING_S)
    committed = snapshots.wait_committed()
    status = snapshots.status()
    if options and "persist_dir" in options:
        snapshots.persist()
    dist.barrier()
    kinds = [(event.kind, event.detail) for event in events.recent()]
    found = {"committed": committed, "bytes": status["bytes"], "copied": snapshots.copied_bytes}
    said_of = sorted(snapshots.diverged_steps)
    say(said, **found, events=kinds, shared=snapshots.compares_replicas, diverged=said_of)
    snapshots.close(finished=finished)
