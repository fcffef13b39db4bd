"""Ways to divide work among ranks that a Guard or a snapshot cannot follow."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.snapshot.client.snapshots import Snapshots


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


def wrapped() -> tuple[Any, torch.optim.Optimizer]:
    model = DistributedDataParallel(nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_hooks_of_ddp_whose_state_every_pass_changes_are_refused() -> None:
    model, optimizer = wrapped()
    model.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    with pytest.raises(ConfigError, match=r"PowerSGDState.*fp16_compress_hook"):
        Guard(model, optimizer)
    model, optimizer = wrapped()
    state = PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook)
    with pytest.raises(ConfigError, match="PostLocalSGDState"):
        Guard(nn.Sequential(model), optimizer)


def test_hooks_of_ddp_without_state_are_not() -> None:
    model, optimizer = wrapped()
    model.register_comm_hook(None, fp16_compress_hook)
    Guard(model, optimizer)


def test_an_optimizer_that_ddp_applies_in_its_backward_pass_is_refused() -> None:
    model, optimizer = wrapped()
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match="applied within the backward pass"):
        Guard(model, optimizer)


def test_fsdp1_is_refused() -> None:
    """It cannot be made without an accelerator: any class of that name stands for it."""
    model = type("FullyShardedDataParallel", (nn.Linear,), {})(4, 4)
    with pytest.raises(ConfigError, match="fully_shard"):
        Guard(nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_whose_state_is_on_one_rank_is_refused_by_snapshots(run_dir: Path) -> None:
    model, _ = wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    Guard(model, optimizer)
    for given in (optimizer, [optimizer]):
        with pytest.raises(ConfigError, match=r"ZeroRedundancyOptimizer.*FSDP2"):
            Snapshots(model, given, run_dir=run_dir)
