"""The loops: what one rank trains, bare and under a Guard.

A loop is constructed on every rank after ``init_process_group``, with the same seed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from holdfast import Guard, Optimizers, Schedulers
from holdfast.digest.tensors import state_digest
from holdfast.replay.rerun import MicroStep
from holdfast.step.buckets import Buckets

STEPS, WIDTH, ROWS = 12, 8, 6
CLIP = 0.5

# A micro-batch: its number in the step, inputs, targets, and the number by which the sum of its
# squared errors is divided. A batch: the number of its step, and its micro-batches.
Part = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]
Batch = tuple[int, list[Part]]


class Net(nn.Module):
    """Two products that can be divided, two that are not, dropout, and statistics if wanted."""

    def __init__(self, *, statistics: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if statistics else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block."""
        hidden = self.down(nn.functional.gelu(self.up(self.drop(x))))
        out: torch.Tensor = self.head(self.norm(x + hidden))
        return out


class Loader:
    """The batches of one replica; which one is next can be saved and restored."""

    def __init__(self, make: Callable[[int], Batch]) -> None:
        self._make, self._next = make, 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._next += 1
        return self._make(self._next - 1)

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next batch."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with a saved batch."""
        self._next = state["next"]


class Loop:
    """One rank of a training loop whose Guard applies the step.

    Args:
        seed: Seed of the weights, the data and the dropout.

    Attributes:
        name: Name of the loop on the command line.
        ranks: Number of ranks.
        micro_batches: Number of micro-batches of a step.
        nodes: Number of nodes over which the ranks are spread; if there are several, the nodes
            protect each other's snapshots by a parity.
        refused: True if the Guard refuses the loop.
        mesh: Mesh of all ranks, if the parameters do not tell which ranks hold the same state.
        around: Called with step and number of a micro-batch, returns the context in which the
            micro-batch runs; faults are injected by it.
    """

    name: ClassVar[str]
    ranks: ClassVar[int]
    micro_batches: ClassVar[int] = 1
    nodes: ClassVar[int] = 1
    refused: ClassVar[bool] = False
    mesh: DeviceMesh | None = None

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed, self.rank = seed, dist.get_rank()
        self.net = self._net()
        self.model: Any = self._laid_out(self.net)
        self.parameters = list(self.model.parameters())
        self.optimizer: Any = self._optimizer()
        self.scheduler: Any = self._scheduler()
        self.loader = Loader(self._batch)
        self.around: Callable[[int, int], AbstractContextManager[object]] = _undisturbed
        torch.manual_seed(1000 * seed + self.replica)

    @property
    def replica(self) -> int:
        """Number of the replica, which has batches and dropout of its own."""
        return self.rank

    def _net(self) -> nn.Module:
        return Net()

    def _laid_out(self, net: Any) -> Any:
        raise NotImplementedError

    def _optimizer(self) -> Any:
        return AdamW(self.parameters, lr=1e-2)

    def _scheduler(self) -> Any:
        return LambdaLR(self.optimizer, _warm_up)

    def _batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(10_000 * self.seed + 100 * step + self.replica)
        parts = []
        for number in range(self.micro_batches):
            drawn = torch.randn(2, ROWS, WIDTH, generator=generator)
            parts.append((number, drawn[0], drawn[1], torch.tensor(self.micro_batches * ROWS)))
        return step, parts

    def guard(self, **options: Any) -> Guard:
        """Return the Guard of this loop."""
        return Guard(self.model, self.optimizer, clip_grad_norm=CLIP, **options)

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Run the pass of a step."""
        step, (part,) = batch
        return self.micro(step, part)

    def micro(self, step: int, part: Part) -> torch.Tensor:
        """Run one micro-batch."""
        number, inputs, targets, rows = part
        with self.around(step, number):
            loss: torch.Tensor = (self.model(inputs) - targets).square().sum() / rows
            loss.backward()
        return loss

    def bare_step(self, batch: Batch) -> None:
        """Train one step without a Guard."""
        self.optimizer.zero_grad()
        self.forward_backward(batch)
        clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.scheduler.step()

    def guarded_step(self, guard: Guard, batch: Batch) -> None:
        """Train one step under a Guard."""
        guard.step(self.forward_backward, batch)

    def begin_bare(self, batch: Batch) -> None:
        """Do what a Guard does before the first step and a bare loop does not."""

    def between_steps(self, step: int) -> None:
        """Do what the loop does after a step: nothing, unless a loop evaluates."""

    def digest(self) -> str:
        """Return the digest of this rank's part of model, optimizer and schedule."""
        states = [each.state_dict() for each in (self.model, self.optimizer, self.scheduler)]
        return state_digest(states)


class MicroLoop(Loop):
    """One rank of a loop that accumulates gradients and applies its optimizer itself."""

    micro_batches = 3

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch, in which gradients are reduced or not."""
        raise NotImplementedError

    def finish_step(self) -> None:
        """Clip and apply the gradients, advance the schedule, empty the gradients."""
        clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def guard(self, **options: Any) -> Guard:
        """Return the Guard of this loop."""
        return Guard(self.model, self.optimizer, apply_again=self.finish_step, **options)

    def bare_step(self, batch: Batch) -> None:
        """Train one step without a Guard."""
        step, parts = batch
        for part in parts:
            with self.reducing(part is parts[-1]):
                self.micro(step, part)
        self.finish_step()

    def guarded_step(self, guard: Guard, batch: Batch) -> None:
        """Train one step under a Guard."""
        step, parts = batch
        for part in parts:
            last = part is parts[-1]
            with self.reducing(last):
                guard.micro_step(lambda given: self.micro(step, given), part, last=last)
        self.finish_step()
        guard.after_optimizer_step()


class Ddp(MicroLoop):
    """DDP with batch normalisation, which reduces in the last of three micro-batches only."""

    name, ranks = "ddp", 3

    def _net(self) -> nn.Module:
        return Net(statistics=True)

    def _laid_out(self, net: Any) -> Any:
        # Every second seed lets gradients be views of what DDP reduces.
        return DistributedDataParallel(net, gradient_as_bucket_view=self.seed % 2 == 0)

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Return ``no_sync`` for all micro-batches but the last."""
        context: AbstractContextManager[object] = nullcontext() if last else self.model.no_sync()
        return context

    def begin_bare(self, batch: Batch) -> None:
        """Settle the order in which DDP sums three ranks' gradients, as a Guard does."""
        step, parts = batch
        one_pass = MicroStep(self.model, lambda part: self.micro(step, part), parts[0])
        Buckets(self.model).settle(one_pass)


class DdpNodes(Ddp):
    """The same on three nodes: each keeps a part of the state and a parity of the others' parts."""

    name, nodes = "ddp-nodes", 3


class DdpPowerSgd(Ddp):
    """DDP that compresses gradients, with an error that every pass carries on to the next."""

    name, refused = "ddp-powersgd", True

    def _laid_out(self, net: Any) -> Any:
        model = DistributedDataParallel(net)
        model.register_comm_hook(PowerSGDState(None), powerSGD_hook)
        return model


class Fsdp(Loop):
    """FSDP2, evaluated after every third step."""

    name, ranks = "fsdp", 2

    def _laid_out(self, net: Any) -> Any:
        fully_shard(net.down)
        return fully_shard(net)

    def between_steps(self, step: int) -> None:
        """Evaluate, after which FSDP2 leaves the outermost module with gathered parameters."""
        if step % 3 == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(torch.ones(ROWS, WIDTH))
            self.model.train()


class FsdpNodes(Fsdp):
    """The same on two nodes, which hold different shards."""

    name, nodes = "fsdp-nodes", 2


class Hsdp(Fsdp):
    """Two replicas, each divided over two ranks by FSDP2."""

    name, ranks = "hsdp", 4

    def _laid_out(self, net: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(net.down, mesh=mesh)
        return fully_shard(net, mesh=mesh)


class Titan(MicroLoop):
    """FSDP2 as torchtitan trains with it.

    The loss of a micro-batch is a sum over its own number of tokens, divided by the number of
    tokens of all ranks and micro-batches; gradients are reduced in the last micro-batch only; two
    optimizers are in one container, as are their schedules.
    """

    name, ranks = "titan", 2

    def _laid_out(self, net: Any) -> Any:
        for module in (net.up, net.down):
            fully_shard(module)
        model = fully_shard(net)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def _optimizer(self) -> Any:
        matrices = [p for p in self.parameters if p.ndim == 2]
        vectors = [p for p in self.parameters if p.ndim != 2]
        return Optimizers(AdamW(matrices, lr=1e-2), AdamW(vectors, lr=2e-2, weight_decay=0.0))

    def _scheduler(self) -> Any:
        return Schedulers(*(LambdaLR(each, _warm_up) for each in self.optimizer.optimizers))

    def _batch(self, step: int) -> Batch:
        """Return micro-batches of different lengths, with the number of tokens of all of them."""
        _, parts = super()._batch(step)
        draw = torch.Generator().manual_seed(step + 50 * self.rank)
        lengths = torch.randint(2, ROWS + 1, (len(parts),), generator=draw)
        tokens = lengths.sum()
        dist.all_reduce(tokens)
        cut = zip(parts, lengths.tolist(), strict=True)
        return step, [(n, x[:length], y[:length], tokens) for (n, x, y, _), length in cut]

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Let FSDP2 reduce, or accumulate whole gradients."""
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


class Tensor(Loop):
    """Tensor parallelism: two products divided by columns and rows, all else on both ranks."""

    name, ranks = "tp", 2

    @property
    def replica(self) -> int:
        """The same on all ranks, which compute one gradient together."""
        return 0

    def _laid_out(self, net: Any) -> Any:
        mesh = init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("tp",))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(net, mesh, plan)

    def guard(self, **options: Any) -> Guard:
        """Return the Guard of this loop; torch clips no plain gradients beside DTensors."""
        return Guard(self.model, self.optimizer, **options)

    def bare_step(self, batch: Batch) -> None:
        """Train one step without a Guard."""
        self.optimizer.zero_grad()
        self.forward_backward(batch)
        self.optimizer.step()
        self.scheduler.step()


class Pipeline(MicroLoop):
    """Pipeline parallelism by 1F1B: two stages, four micro-batches in one call of the schedule."""

    name, ranks, micro_batches = "pp", 2, 1
    stages, chunks = 2, 3

    def _laid_out(self, net: Any) -> Any:
        shape = self.ranks // self.stages, self.stages
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "pp"))
        self._replicas, self._stages = self.mesh.get_group("ddp"), self.mesh.get_group("pp")
        self._stage, device = self.mesh.get_local_rank("pp"), torch.device("cpu")
        stage = PipelineStage(net, self._stage, self.stages, device, group=self._stages)
        self._schedule = Schedule1F1B(stage, self.chunks, loss_fn=nn.functional.mse_loss)
        return net

    @property
    def replica(self) -> int:
        """The same on all stages; the first one takes the inputs, the last one the targets."""
        return self.rank // self.stages

    def micro(self, step: int, part: Part) -> torch.Tensor:
        """Run all forward and backward passes of the schedule; the last stage has the loss."""
        number, inputs, targets, _ = part
        losses: list[torch.Tensor] = []
        with self.around(step, number):
            if self._stage == 0:
                self._schedule.step(inputs)
            else:
                self._schedule.step(target=targets, losses=losses)
        self._reduce()
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def _reduce(self) -> None:
        """Add the gradients of the replicas of this stage, if there are several."""

    def reducing(self, last: bool) -> AbstractContextManager[object]:
        """Return no context, as the micro-step reduces by itself."""
        return nullcontext()

    def finish_step(self) -> None:
        """Clip by the norm of the gradients of all stages, and apply them."""
        square = get_total_norm([p.grad for p in self.parameters if p.grad is not None]) ** 2
        dist.all_reduce(square, group=self._stages)
        clip_grads_with_norm_(self.parameters, CLIP, square.sqrt())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class PipelineNodes(Pipeline):
    """The pipeline with each stage on a node of its own."""

    name, nodes = "pp-nodes", 2


class PipelineReplicas(Pipeline):
    """Two replicas of the pipeline, whose gradients are added by hand."""

    name, ranks = "pp-ddp", 4

    def _reduce(self) -> None:
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad, group=self._replicas)


def _undisturbed(step: int, number: int) -> AbstractContextManager[object]:
    return nullcontext()


def _warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4) * (1 - step / (2 * STEPS))


LOOPS: dict[str, type[Loop]] = {
    loop.name: loop
    for loop in (
        *(Ddp, DdpNodes, DdpPowerSgd, Fsdp, FsdpNodes, Hsdp, Titan, Tensor, Pipeline),
        *(PipelineNodes, PipelineReplicas),
    )
}
