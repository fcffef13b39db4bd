"""What ranks do whose collectives go wrong: single ones, and small guarded trainings."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # functional collectives import it: once, before the ranks fork
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.nodes_rank import say
from holdfast import config, events
from holdfast.collectives.checks import Collectives
from holdfast.collectives.transfers import Transfer
from holdfast.digest.tensors import state_digest, tensor_digest
from holdfast.errors import HoldfastError
from holdfast.guard import Guard
from holdfast.replay.gradients import local_of
from holdfast_lab.campaign.collectives import collective_fault

ELEMENTS, STEPS, STRUCK = 5000, 4, 2


def collectives(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Every collective that is checked, by the way in which it is issued."""
    world: Any = dist.group.WORLD
    ranks, like = dist.get_world_size(), values.new_empty
    return {
        "all_reduce": lambda: dist.all_reduce(values.clone()),
        "all_reduce, waited for": lambda: dist.all_reduce(values.clone(), async_op=True).wait(),
        "all_reduce, left alone": lambda: dist.all_reduce(values.clone(), async_op=True),
        "all_reduce, functional": lambda: functional.all_reduce(values, "sum", world).sum(),
        "all_reduce, maximum": lambda: dist.all_reduce(values.clone(), dist.ReduceOp.MAX),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(like(len(values) // ranks), values),
        "reduce_scatter, list": lambda: dist.reduce_scatter(
            like(len(values) // ranks), list(values.chunk(ranks))
        ),
        "reduce_scatter, functional": lambda: functional.reduce_scatter_tensor(
            values, "sum", 0, world
        ).sum(),
        "all_gather": lambda: dist.all_gather_into_tensor(like(len(values) * ranks), values),
        "all_gather, list": lambda: dist.all_gather(list(like(ranks, len(values))), values),
        "all_gather, functional": lambda: functional.all_gather_tensor(values, 0, world).sum(),
        "broadcast": lambda: dist.broadcast(values.clone(), 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(values), values),
        "all_to_all, list": lambda: dist.all_to_all(
            list(torch.empty_like(values).chunk(ranks)), list(values.chunk(ranks))
        ),
    }


CLEAN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda x: x,
    "bf16": lambda x: x.bfloat16(),
    "fp16": lambda x: x.half(),
    "fp64": lambda x: x.double(),
    "integers": lambda x: (100 * x).long(),
    "large": lambda x: x * 1e37,
    "large, bf16": lambda x: (x * 1e37).bfloat16(),
    "overflowing": lambda x: (x * 2e4).half(),
    "small": lambda x: x * 1e-40,
    "cancelling": lambda x: (1e6 + x) * (-1) ** dist.get_rank(),
    "cancelling, bf16": lambda x: ((1e3 + x) * (-1) ** dist.get_rank()).bfloat16(),
    "all magnitudes": lambda x: x * 10 ** (30 * x.cos()),
    "zero": torch.zeros_like,
    "with INF": lambda x: x.masked_fill(x > 3, torch.inf),
    "with NaN": lambda x: x.masked_fill(x > 3, torch.nan),
}


def values_of(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return CLEAN[name](torch.randn(ELEMENTS * dist.get_world_size(), generator=generator))


def outcome(run: Callable[[], object], fault: AbstractContextManager[None]) -> dict[str, Any]:
    """Whether any rank got something wrong, and the events of this rank."""
    before, checks = len(events.recent()), Collectives()
    with checks.watching(), fault:
        run()
    found = [event.as_dict() for event in checks.check()]
    recorded = [event for event in events.recent()[before:] if event.kind != "injected"]
    assert len(recorded) in (0, len(found))
    wrong = torch.tensor(len(found))
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    return {"wrong": bool(wrong), "events": found}


def failing(said: Path) -> None:
    """A check fails on one rank, and then one of another group does not."""
    values, note = values_of("fp32"), Transfer.note_given

    def fails(transfer: Transfer) -> None:
        if dist.get_rank() == 1:
            raise MemoryError
        note(transfer)

    checks, before = Collectives(), len(events.recent())
    others: Any = dist.new_group()
    for group, method in ((None, fails), (None, note), (others, note)):
        Transfer.note_given = method  # type: ignore[method-assign]
        with checks.watching():
            result = values.clone()
            dist.all_reduce(result, group=group)
        found = len(checks.check())
        say(said, found=found, sum=tensor_digest(result), noted=len(checks._groups))
    say(said, events=[[e.kind, e.detail["error"]] for e in events.recent()[before:]])


def absent(said: Path) -> None:
    """Rank 1 reduces as the others do, and does not come to the check before they have ended."""
    store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    checks, error, begun_s = Collectives(), "", time.monotonic()
    with checks.watching():
        dist.all_reduce(values_of("fp32"))
    os.environ[config.TIMEOUT_VARIABLE] = "1"
    try:
        store.wait(["ended"]) if dist.get_rank() == 1 else checks.check()
    except HoldfastError as failed:
        error = str(failed)
    say(said, error=error, took_s=time.monotonic() - begun_s)
    store.set("ended", "")


def single(said: Path, faults: dict[str, dict[str, Any]]) -> None:
    """Every collective on every kind of clean data, then each fault in those of fp32."""
    for data in CLEAN:
        for name, run in collectives(values_of(data)).items():
            say(said, data=data, name=name, **outcome(run, nullcontext()))
    for fault, options in faults.items():
        for name in collectives(values_of("fp32")):
            erring = dist.get_rank() == 1 or fault == "wrong sum"
            injected = collective_fault(name.split(",")[0], **options)
            run = collectives(values_of("fp32"))[name]
            found = outcome(run, injected if erring else nullcontext())
            say(said, fault=fault, name=name, **found)


def model_of(layout: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 90), nn.BatchNorm1d(90), nn.ReLU(), nn.Linear(90, 30))
    if layout == "ddp":
        return DistributedDataParallel(model)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_shard(model, mesh=mesh if layout == "hsdp" else None)


def trained(layout: str, fault: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A guarded training in which one collective of a pass may go wrong on rank 1."""
    model, passes = model_of(layout), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def forward_backward(step: int) -> torch.Tensor:
        nonlocal passes
        passes += step == STRUCK
        erring = fault and step == STRUCK and passes == 1 and dist.get_rank() == 1
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        with collective_fault(**fault) if erring else nullcontext():
            loss = model(torch.randn(8, 64, generator=generator)).square().mean()
            loss.backward()
        return loss

    before = len(events.recent())
    with Guard(model, optimizer, **options) as guard:
        for step in range(STEPS):
            guard.step(forward_backward, step)
    state = [local_of(each) for each in (*model.parameters(), *model.buffers())]
    new = [event.as_dict() for event in events.recent()[before:]]
    return {"state": state_digest(state), "events": new, "passes": passes}


def train(said: Path, scenarios: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    for name, (layout, fault, options) in scenarios.items():
        say(said, name=name, **trained(layout, fault, **options))
