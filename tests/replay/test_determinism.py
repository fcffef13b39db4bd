"""The determinism check: silent on what is deterministic, and it names what is not."""

from itertools import count
from typing import Any

import pytest
import torch
from lockstep_ranks import Altered
from torch import nn

from holdfast.digest.tensors import state_digest
from holdfast.replay import check_determinism
from holdfast.rng import rng_state, set_rng_state

drawn = count()


@torch.library.custom_op("holdfast_tests::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    """Adds what a counter says: a race, as seen from outside."""
    return x + 1e-3 * next(drawn)


class Model(nn.Module):
    def __init__(self, noise: str = "") -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.GELU())
        self.outer = nn.Linear(16, 1)
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.outer(Altered.apply(x, self.noise, shift))  # type: ignore[no-untyped-call]


def forward_backward_of(model: nn.Module) -> Any:
    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    return forward_backward


@pytest.fixture
def batch() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(32, 8)


def test_a_deterministic_step_is_called_so_and_leaves_what_one_run_leaves(
    batch: torch.Tensor,
) -> None:
    model = Model()
    before = rng_state()
    started = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward_backward_of(model)(batch)
    once = state_digest([model.state_dict(), [p.grad for p in model.parameters()]])
    model.load_state_dict(started)
    set_rng_state(before)
    found = check_determinism(model, forward_backward_of(model), batch, runs=3)
    assert (found.deterministic, found.runs, found.first) == (True, 3, None)
    assert state_digest([model.state_dict(), [p.grad for p in model.parameters()]]) == once


@pytest.mark.parametrize(
    ("noisy", "where", "reason"),
    [
        ("forward", "(model)", "losses and gradients of 2 runs differ"),
        ("backward", "backward of AlteredBackward", "gradients or buffers of 2 runs differ"),
    ],
)
def test_an_operator_of_either_pass_is_named(
    batch: torch.Tensor, noisy: str, where: str, reason: str
) -> None:
    model = Model(noisy)
    found = check_determinism(model, forward_backward_of(model), batch)
    assert not found.deterministic
    assert "holdfast_tests.shift" in str(found.first)
    assert found.first.where == where
    assert reason in found.reason
    assert found.operations > 10
    with pytest.raises(ValueError, match="runs=1: at least 2"):
        check_determinism(model, forward_backward_of(model), batch, runs=1)


@pytest.mark.parametrize(
    ("struck", "reason"),
    [
        (lambda turn, x: x * 2 if turn % 2 else x.exp(), "do not call the same operators"),
        (lambda turn, x: x * (3 if turn else 2), "not while every operator was looked at"),
    ],
)
def test_where_no_operator_is_to_blame_it_is_told_why(
    batch: torch.Tensor, struck: Any, reason: str
) -> None:
    model, turns = Model(), iter(range(100))

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = struck(next(turns), model(x).square().mean())
        torch.autograd.backward(loss)
        return loss

    found = check_determinism(model, forward_backward, batch)
    assert not found.deterministic
    assert found.first is None
    assert reason in found.reason


def test_hooks_are_gone_afterwards_also_of_a_step_that_fails(batch: torch.Tensor) -> None:
    model, turns = Model("forward"), iter(range(100))

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        if next(turns) == 3:
            raise RuntimeError("in the trace")
        return forward_backward_of(model)(x)

    with pytest.raises(RuntimeError, match="in the trace"):
        check_determinism(model, forward_backward, batch)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
