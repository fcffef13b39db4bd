"""Ranks of one node that divide the copies of one state, and bits that flip in their memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from at_rest_cases import flip
from replica_trainer import Replica

from bench.nodes_rank import say
from holdfast import events
from holdfast.guard import Guard
from holdfast.snapshot.client import replicas
from holdfast.snapshot.client.replicas import LocalCopy
from holdfast.snapshot.client.snapshots import Snapshots

STEPS = 10
BIT = 24


@dataclass(frozen=True)
class Strike:
    """A bit that flips in the first or the last tensor of the state of a rank, in a step.

    The first one, a weight, is in the part of the first rank; the last one, a moment, in that of
    the last. ``spoiled`` also flips a bit in the first rank's copy of its part.
    """

    step: int
    rank: int
    weight: bool
    spoiled: bool = False


def train_struck(said: Path, run_dir: Path, strikes: list[Strike]) -> None:
    """Train in a bare loop, then under a Guard with strikes, and say how both end."""
    calm, run = Replica(), Replica()
    begin = run.digest()
    for _ in range(STEPS):
        calm.step()
    torch.manual_seed(dist.get_rank())
    snapshots, left, computed = Snapshots(run.net, run.optimizer, run_dir=run_dir), [*strikes], []

    def strike(each: Strike) -> None:
        copy = snapshots.copied(each.step)
        assert isinstance(copy, LocalCopy)
        assert copy.room is None
        last = run.optimizer.state[run.net[2].bias]["exp_avg_sq"]
        index = 0 if each.weight else copy.flat.paths.index("optimizer.state.5.exp_avg_sq")
        entry, shards = copy.entries[index], copy.share.striping
        held = range(shards.nodes)
        owner = next(n for n in held if entry.offset < shards.shard(n).stop)
        say(said, step=each.step, op=copy.flat.paths[index], owner=owner)
        flip(run.net[0].weight.detach() if each.weight else last, BIT)

    def struck(batch: object) -> torch.Tensor:
        step = events.current_step()
        computed.append(step)
        for each in [each for each in left if each.step == step]:
            left.remove(each)
            if each.spoiled:  # on the first rank, once it has copied its part
                snapshots.copied(step)
                dist.barrier()
            if each.rank == dist.get_rank():
                strike(each)
        return run.forward_backward()

    with pytest.MonkeyPatch.context() as patch:
        # Other ranks copy late on a busy machine; what is damaged stays so however long one waits.
        patience_s = 0.3 if any(each.spoiled for each in strikes) else 15.0
        patch.setattr(replicas, "PARTS_PATIENCE_S", patience_s)
        patch.setattr(LocalCopy, "write", spoiling([each.step for each in strikes if each.spoiled]))
        with Guard(run.net, run.optimizer, snapshots=snapshots, at_rest=1.0) as guard:
            while guard.steps_done < STEPS:
                guard.step(struck, guard.steps_done)
    seen = [(event.kind, event.step, event.op, event.rung) for event in events.recent()]
    digests = {"begin": begin, "calm": calm.digest(), "digest": run.digest()}
    say(said, **digests, computed=computed, events=seen)


def spoiling(steps: list[int]) -> Any:
    """What flips a bit of the memory of the first rank's part once it is copied."""
    write, left = LocalCopy.write, [*steps]

    def spoiled(copy: LocalCopy, buffer: torch.Tensor) -> Any:
        content = write(copy, buffer)
        if copy.step in left and dist.get_rank() == 0:
            left.remove(copy.step)
            buffer[0] ^= 1
        return content

    return spoiled
