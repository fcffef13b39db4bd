"""Small models divided among gloo ranks in every way, and what tests have the ranks do."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import STARTING_S
from snapshot_waits import PATIENCE_S
from torch import nn
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from bench.nodes_rank import say
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.errors import SnapshotMismatch
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout.dtensors import local_of
from holdfast.snapshot.layout.groups import of_model


class Net(nn.Module):
    """Uneven sizes, a tied weight, a buffer that changes, dropout, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 7, bias=False)
        self.norm = nn.BatchNorm1d(7)
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.dropout(self.norm(self.embed(batch)), 0.2, True)
        value: torch.Tensor = self.last(self.head(self.down(torch.relu(self.up(hidden)))))
        return value * self.scale.sum()


def fsdp(net: Net) -> None:
    """Divided by FSDP2 on a mesh without names; one parameter is not, and stays a plain one."""
    fully_shard(net.up)
    fully_shard(net, ignored_params={net.scale})


def whole(net: Net) -> None:
    """As FSDP2 with all of its parameters."""
    fully_shard(net)


def replicas(net: Net) -> None:
    """Not divided at all."""


def hsdp(net: Net) -> None:
    """Two replicas, each divided by two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(net, mesh=mesh, ignored_params={net.scale})


def tensor_parallel(net: Net) -> None:
    """Two linear layers divided by columns and rows; all the rest is plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    _parallelize(net, mesh)


def both(net: Net) -> None:
    """FSDP2 over tensor parallelism: the strided placement."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    _parallelize(net, mesh["tp"])
    fully_shard(net, mesh=mesh["dp_shard"], ignored_params={net.scale})


def _parallelize(net: Net, mesh: DeviceMesh) -> None:
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


LAYOUTS: dict[str, Callable[[Net], None]] = {
    function.__name__: function for function in (fsdp, whole, replicas, hsdp, tensor_parallel, both)
}


class Run:
    """A model laid out over the ranks, its optimizer, and how it trains."""

    def __init__(self, layout: str, optimizer: str = "AdamW") -> None:
        torch.manual_seed(3)
        self.net = Net()
        LAYOUTS[layout](self.net)
        plain = [each for each in self.net.parameters() if not isinstance(each, DTensor)]
        self.reduced = [each for each in plain if layout == "replicas" or each is self.net.scale]
        options = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
        kind = getattr(torch.optim, optimizer)
        self.optimizer = kind(self.net.parameters(), lr=1e-2, **options)
        # In tensor parallelism all ranks see the same batch and the same dropout.
        torch.manual_seed(0 if layout in ("tensor_parallel", "both") else dist.get_rank())

    def step(self) -> None:
        """One step of training."""
        self.forward_backward()
        self.optimizer.step()

    def forward_backward(self) -> float:
        self.optimizer.zero_grad()
        loss = self.net(torch.randn(4, 6)).square().sum()
        loss.backward()
        for parameter in self.reduced:
            dist.all_reduce(parameter.grad)
        return float(loss.detach())

    def digest(self, extra: Any = None) -> str:
        parts = [part.state_dict() for part in (self.net, self.optimizer, extra) if part]
        return state_digest(local_state(parts))

    def by_name(self) -> Any:
        """The optimizer's whole state by parameters' names, and its options."""
        state = get_optimizer_state_dict(self.net, self.optimizer)
        options = [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]]
        return [dict(sorted(whole_state(state["state"]).items())), options]

    def snapshots(self, run_dir: Path, **options: Any) -> Snapshots:
        return Snapshots(self.net, self.optimizer, run_dir=run_dir, **options)


def local_state(value: Any) -> Any:
    """A state with this rank's dense tensors in the place of DTensors."""
    if isinstance(value, dict):
        return {key: local_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [local_state(item) for item in value]
    return local_of(value)


def train(said: Path, run_dir: Path, layout: str, steps: int, hang_at: int = -1) -> None:
    """Restore, say so, train on to ``steps``, and say the loss and the state after each.

    At step ``hang_at``, its copy in flight, nothing more happens: it is for the test to kill.
    """
    run = Run(layout)
    before = run.digest()
    snapshots = run.snapshots(run_dir)
    start = snapshots.restore() or 0
    say(said, start=start, before=before, digest=run.digest())
    for step in range(start + 1, steps + 1):
        loss = run.forward_backward()
        snapshots.finish()
        run.optimizer.step()
        if step == hang_at:
            snapshots.wait_committed()  # of the step before, or the SMPs may be at it still
        snapshots.begin(step)
        say(said, step=step, loss=loss.hex(), digest=run.digest())
        if step == hang_at:
            time.sleep(2 * STARTING_S)
    snapshots.wait_committed()
    snapshots.close(finished=True)
    say(said, events=[event.kind for event in events.recent()])


class Bag:
    """DTensors of every placement on a mesh of two dimensions, sizes that do not divide evenly."""

    PLACEMENTS = (
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(1, split_factor=2), Shard(1)),
        (Replicate(), Shard(1)),
        (Shard(1), Replicate()),
        (Replicate(), Replicate()),
    )

    def __init__(self, seed: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        self.tensors = {
            name: distribute_tensor(full, mesh, placements)
            for name, full, placements in self.contents(seed)
        }
        half = DeviceMesh("cpu", [0, 1])
        self.tensors["half"] = distribute_tensor(torch.full((5,), seed / 2), half, [Shard(0)])

    @classmethod
    def contents(cls, seed: int) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """Names, whole tensors and placements."""
        generator = torch.Generator().manual_seed(seed)
        for number, placements in enumerate(cls.PLACEMENTS):
            strided = any(isinstance(placement, _StridedShard) for placement in placements)
            for size in [(8, 12)] if strided else [(5, 7), (1, 3), (8, 2), (3, 5), (0, 4)]:
                full = torch.randn(size, generator=generator)
                yield f"{number}/{size}", full, placements

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def hold(said: Path, run_dir: Path, layout: str, steps: int, bag: bool = False) -> None:
    """Train, say what the whole of each tensor is, and wait for the test to look and kill."""
    run, extra = Run(layout), Bag(1) if bag else None
    snapshots = run.snapshots(run_dir, extra=extra)
    for _ in range(steps):
        run.step()
    snapshots.begin(steps)
    assert snapshots.wait_committed() == steps
    wholes = whole_state([run.net.state_dict(), None])
    digest = state_digest(run.by_name())
    holders = of_model(run.net, dist.get_world_size(), 1).holders()
    local = run.digest(extra)
    say(said, wholes=state_digest(wholes), optimizer=digest, local=local, holders=holders)
    time.sleep(2 * STARTING_S)


def reload_(said: Path, folder: Path, layout: str) -> None:
    """Load an exported checkpoint as DCP's documentation has it, and say what the whole is."""
    run = Run(layout)
    before = state_digest(whole_state([run.net.state_dict(), None]))
    model, optimizer = get_state_dict(run.net, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    load(state, checkpoint_id=folder)
    set_state_dict(
        run.net,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    wholes = whole_state([run.net.state_dict(), None])
    digest = state_digest(run.by_name())
    say(said, before=before, wholes=state_digest(wholes), optimizer=digest)


def restore(said: Path, run_dir: Path, layout: str, bag: bool = False) -> None:
    """Restore; say what the state was before and is after, and why if it cannot be done."""
    run, extra = Run(layout), Bag(2) if bag else None
    before, error = run.digest(extra), ""
    snapshots = run.snapshots(run_dir, extra=extra)
    try:
        snapshots.restore()
    except SnapshotMismatch as mismatch:
        error = str(mismatch)
    snapshots.close(finished=False)
    say(said, before=before, after=run.digest(extra), error=error)


def every_optimizer(said: Path, run_dir: Path, names: list[str]) -> None:
    """With each optimizer: train, snapshot, train on; restore into a new run, train on alike."""
    for name in names:
        first = Run("fsdp", name)
        with first.snapshots(run_dir / name, linger_s=PATIENCE_S) as snapshots:
            first.step()
            snapshots.begin(1)
            assert snapshots.wait_committed() == 1
            saved = first.digest()
            first.step()
            snapshots.close(finished=False)
        second = Run("fsdp", name)
        before = second.digest()
        with second.snapshots(run_dir / name, linger_s=PATIENCE_S) as snapshots:
            assert snapshots.restore() == 1
            restored = second.digest()
            second.step()
        say(said, name=name, equal=[restored == saved, second.digest() == first.digest()])
        assert before != restored


def paced(said: Path, run_dir: Path, steps: int) -> None:
    """Train with ``interval="auto"``, rank 1 stalling far longer; say which interval held when."""
    run = Run("whole")
    with run.snapshots(run_dir, interval="auto", mttf_s=1e9) as snapshots:
        for step in range(1, steps + 1):
            run.forward_backward()
            snapshots.finish()
            snapshots._copier.stall_s += 5.0 * dist.get_rank()
            run.optimizer.step()
            snapshots.begin(step)
            say(said, step=step, every=snapshots.every)
        committed = snapshots.wait_committed()
        say(said, interval=snapshots.status()["interval"], committed=committed)


def whole_state(value: Any) -> Any:
    """A state with whole tensors in the place of DTensors; a collective."""
    if isinstance(value, dict):
        return {key: whole_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole_state(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def change(
    said: Path,
    run_dir: Path,
    layout: str,
    steps: int,
    disk: Path | None = None,
    parities: int | None = None,
) -> None:
    """Restore on this layout, say what the whole of each tensor is, train on, say it again."""
    run = Run(layout)
    options = {"persist_dir": disk, "parities": parities}
    snapshots = run.snapshots(run_dir, **options)
    start = snapshots.restore()

    def tell(**words: Any) -> None:
        wholes = whole_state(run.net.state_dict())
        parameters = {n: wholes[n] for n, _ in run.net.named_parameters()}
        kinds = [(event.kind, event.detail) for event in events.recent()]
        found = {"wholes": state_digest(parameters), "optimizer": state_digest(run.by_name())}
        say(said, **found, events=kinds, rng=state_digest(torch.get_rng_state()), **words)

    tell(start=start)
    for step in range((start or 0) + 1, (start or 0) + steps + 1):
        run.step()
        snapshots.begin(step)
        assert snapshots.wait_committed() == step
    if disk is not None:
        snapshots.persist()
    tell(end=(start or 0) + steps)
    snapshots.close(finished=False)
