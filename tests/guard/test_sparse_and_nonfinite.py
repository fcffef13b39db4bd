"""Sparse gradients, as embedding bags have them, and losses that stay non-finite."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import Run, events_of
from torch import nn

from holdfast import events
from holdfast.digest.tensors import state_digest, tensor_digest
from holdfast.errors import UncorrectableFault
from holdfast.guard import Guard
from holdfast.replay.gradients import local_gradients
from holdfast.replay.spikes import MAX_NONFINITE
from holdfast.snapshot.client.snapshots import Snapshots

STEPS, STRUCK = 12, 9
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, 0.1),
}


class Bag(nn.Module):
    """Tables whose gradients are sparse, and a dense layer."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.last = nn.Linear(4, 1) if dense else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.bag(rows) + self.table(rows % 10).sum(1)
        return (x if self.last is None else self.last(x)).square().mean() + 0.1


def train(optimizer: str, *, guarded: bool = True, faulty: bool = False, **options: Any) -> str:
    model = Bag(dense=optimizer != "sparse adam")
    applied = OPTIMIZERS[optimizer](model.parameters())
    run_dir = options.pop("run_dir", None)
    if run_dir is not None:
        options["snapshots"] = Snapshots(model, applied, run_dir=run_dir)
    faults = [STRUCK] * faulty

    def forward_backward(rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows)
        loss.backward()
        if events.current_step() in faults:
            model.bag.weight.grad._values().view(torch.int32)[0, 0] ^= 1 << 20
            faults.clear()
        return loss

    batches = [
        torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(n)) for n in range(STEPS)
    ]
    if guarded:
        with Guard(model, applied, **options) as guard:
            for rows in guard.batches(batches, steps=STEPS):
                guard.step(forward_backward, rows)
    else:
        for number, rows in enumerate(batches):
            events.set_step(number)
            applied.zero_grad()
            forward_backward(rows)
            applied.step()
    return state_digest([model.state_dict(), applied.state_dict()])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sparse_gradients_give_the_bare_loops_bits_and_an_audit_repairs_them(
    optimizer: str, run_dir: Path
) -> None:
    right = train(optimizer, guarded=False)
    assert train(optimizer) == train(optimizer, audit=1.0) == right
    assert train(optimizer, run_dir=run_dir) == right
    assert not events.recent() or {e.kind for e in events.recent()} <= {"restored"}
    assert train(optimizer, faulty=True) != right
    assert train(optimizer, faulty=True, audit=1.0) == right
    assert [event.detail["verdict"] for event in events_of("rerun")] == ["transient"]


def test_sparse_gradients_are_clipped_by_the_norm_that_dense_ones_have() -> None:
    rows = torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(3))
    grads = []
    for sparse in (True, False):
        model = Bag(dense=True)
        model.bag.sparse = model.table.sparse = sparse
        guard = Guard(model, torch.optim.SGD(model.parameters(), 0.0), clip_grad_norm=0.01)
        guard.step(lambda rows, model=model: _backward(model(rows)), rows)
        grads.append([p.grad.to_dense() for p in model.parameters()])
        assert guard.grad_norm > 0.01
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def _backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def test_sparse_gradients_are_observed_and_replaced() -> None:
    model, rows = Bag(dense=True), torch.randint(20, (6, 5))
    with local_gradients(model, keep=True) as found:
        model(rows).backward()
    right = [tensor_digest(p.grad) for p in model.parameters()]
    model.zero_grad()
    with local_gradients(model, right=found.values):
        model((rows + 1) % 20).backward()
    assert [tensor_digest(p.grad) for p in model.parameters()] == right


@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_a_loss_that_stays_nan_ends_the_run(audit: float) -> None:
    run = Run(special={n: torch.full((6, 8), math.nan) for n in range(3, 50)})
    with pytest.raises(UncorrectableFault, match=r"10 steps since step 3.*the model diverges"):
        run.guarded(40, audit=audit)
    assert len(events_of("nonfinite_genuine")) == MAX_NONFINITE
    assert max(run.computed) == 3 + MAX_NONFINITE - 1
