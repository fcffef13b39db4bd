"""What ranks do that shadow each other: small trainings, one rank of which errs."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lockstep_ranks import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from bench.nodes_rank import say
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.errors import HoldfastError
from holdfast.guard import Guard
from holdfast.replay import Shadow
from holdfast.replay.buffers import Buffers

STEPS, STRUCK_STEP = 5, 2


class Net(nn.Module):
    """All that a shadow has to be given: dropout, a buffer; two layers to divide, one to strike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.middle, self.norm, self.drop = Layer(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(self.drop(x)).relu())
        return self.last(self.norm(self.middle(x).relu()))


class Training:
    """A model laid out over the ranks, and how it trains; a bare loop, or a Guard's."""

    def __init__(self, layout: str, accumulated: int = 1) -> None:
        torch.manual_seed(0)
        self.net, self.accumulated = Net(), accumulated
        self.mesh: Any = None
        self.model: nn.Module = getattr(self, f"_{layout}")()
        self.reduces = layout in ("tp", "by_hand")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.strikes: Callable[[int, int], str] = lambda step, passes: ""
        self.rank, self.passes = dist.get_rank(), 0
        # The ranks of a tensor-parallel group have one batch and one dropout.
        self.replica = self.rank // 2 if self.mesh is not None else self.rank
        self._settle_buckets()
        torch.manual_seed(100 + self.replica)

    def _settle_buckets(self) -> None:
        """DDP lays its buckets out anew after its first pass, which changes three ranks' sums."""
        buffers = Buffers(self.model)
        for _ in range(2):
            self.forward_backward(self.batch(0))
        self.optimizer.zero_grad()
        self.passes = 0
        buffers.restore(self.model)

    def _ddp(self) -> nn.Module:
        return DistributedDataParallel(self.net)

    def _by_hand(self) -> nn.Module:
        return self.net

    def _fsdp(self) -> nn.Module:
        fully_shard(self.net.middle)
        return fully_shard(self.net)

    def _hsdp(self) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(self.net.middle, mesh=mesh)
        return fully_shard(self.net, mesh=mesh)

    def _tp(self) -> nn.Module:
        shape = dist.get_world_size() // 2, 2
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(self.net, self.mesh["tp"], plan)

    def batch(self, step: int) -> list[torch.Tensor]:
        """The micro-batches of a step, of this replica's own."""
        generator = torch.Generator().manual_seed(1000 * step + self.replica)
        return [torch.randn(8, 6, generator=generator) for _ in range(self.accumulated)]

    def group(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Forward and backward of one micro-batch, reduced with the last one."""
        last = number == self.accumulated - 1
        waits = isinstance(self.model, DistributedDataParallel) and not last
        with self.model.no_sync() if waits else nullcontext():
            loss = self.model(batch[number]).square().mean() / self.accumulated
            if self.net.middle.struck == "infinite":
                loss = loss * torch.inf
            loss.backward()
        return loss

    def forward_backward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """All micro-batches; this rank's passes may be struck."""
        self.net.middle.struck = self.strikes(events.current_step(), self.passes)
        self.passes += 1
        losses = [self.group(batch, number) for number in range(self.accumulated)]
        if self.reduces:
            self._reduce()
        return torch.stack(losses).sum()

    def _reduce(self) -> None:
        group = None if self.mesh is None else self.mesh["ddp"].get_group()
        for parameter in self.model.parameters():
            grad = getattr(parameter.grad, "to_local", lambda grad=parameter.grad: grad)()
            dist.all_reduce(grad, group=group)

    def bare(self, clip: float | None = None) -> "Training":
        """The loop without a Guard."""
        for step in range(STEPS):
            events.set_step(step)
            self.optimizer.zero_grad()
            self.forward_backward(self.batch(step))
            if clip is not None:
                clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
        return self

    def guarded(self, **options: Any) -> "Training":
        """Under a Guard."""
        with Guard(self.model, self.optimizer, **options) as guard:
            for step in range(STEPS):
                guard.step(self.forward_backward, self.batch(step))
        return self

    def digest(self) -> str:
        """Of this rank's part of the parameters, of the momenta, and the buffers."""
        local = [getattr(t, "to_local", lambda t=t: t)() for t in self._tensors()]
        return state_digest(local)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for parameter in self.model.parameters():
            yield self.optimizer.state[parameter]["momentum_buffer"]


def strikes_of(fault: dict[str, Any] | None) -> Callable[[int, int], str]:
    """Whether a pass errs, by step and by how many passes this rank made before.

    ``rank`` errs from its step ``first`` on: in every pass, or in ``only`` its pass of that number
    since then.
    """
    passes: list[int] = []

    def strikes(step: int, number: int) -> str:
        if fault is None or dist.get_rank() not in fault["ranks"] or step < fault.get("first", 2):
            return ""
        passes.append(number)
        struck = fault.get("only") in (None, len(passes) - 1)
        return fault.get("passes", "backward") if struck else ""

    return strikes


def train(said: Path, scenarios: list[dict[str, Any]]) -> None:
    """One training after the other; each rank says how each of them ended."""
    for scenario in scenarios:
        events.clear()
        training = Training(scenario["layout"], scenario.get("accumulated", 1))
        training.strikes = strikes_of(scenario.get("fault"))
        error = ""
        try:
            if "shadow" in scenario:
                options = dict(scenario["shadow"])
                if options.pop("one_group", False):
                    count = training.accumulated
                    options |= {"groups": count, "group_step": _struck_group(training)}
                shadow = Shadow(mesh=training.mesh, **options)
                audit, clip = scenario.get("audit", 0.0), scenario.get("clip")
                training.guarded(shadow=shadow, audit=audit, clip_grad_norm=clip)
            elif "audit" in scenario:
                training.guarded(audit=scenario["audit"])
            else:
                training.bare(scenario.get("clip"))
        except HoldfastError as caught:
            error = str(caught)
        found = [event.as_dict() for event in events.recent()]
        say(said, state=training.digest(), events=found, error=error, passes=training.passes)


def _struck_group(training: Training) -> Callable[[list[torch.Tensor], int], torch.Tensor]:
    def step(batch: list[torch.Tensor], group: int) -> torch.Tensor:
        training.net.middle.struck = training.strikes(events.current_step(), training.passes)
        training.passes += 1
        return training.group(batch, group)

    return step
