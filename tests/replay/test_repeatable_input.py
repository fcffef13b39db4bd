"""What a repeated pass is given: its batch, its buffers and its random numbers, as at first."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.guard import Guard
from holdfast.replay import MicroStep, buffers
from holdfast.replay.batches import KeptBatch
from holdfast.replay.buffers import Buffers

STEPS, STRUCK = 12, 10
Step = Callable[[nn.Module, Any, int], torch.Tensor]


def train(
    model: nn.Module, pass_of: Step, batch_of: Callable[[int], Any], **options: Any
) -> tuple[str, list[str]]:
    """Train bare, or under a Guard if options are given; return the state's digest and events."""
    torch.manual_seed(1)
    events.clear()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    guard = Guard(model, optimizer, **options) if options else None
    for number in range(STEPS):
        passes = iter(range(9))

        def forward_backward(batch: Any, number: int = number, passes: Any = passes) -> Any:
            loss = pass_of(model, batch, number)
            if options and number == STRUCK and next(passes) == 0:
                next(model.parameters()).grad.view(torch.int32).view(-1)[0] ^= 1 << 30
            return loss

        if guard is None:
            optimizer.zero_grad()
            forward_backward(batch_of(number))
            optimizer.step()
        else:
            guard.step(forward_backward, batch_of(number))
    state = [*model.parameters(), *model.buffers()]
    return state_digest(state), [event.kind for event in events.recent()]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))


def drawn(number: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(number))


def plain(model: nn.Module, batch: torch.Tensor, number: int) -> torch.Tensor:
    loss = model(batch).square().mean() + 0.1
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("batch", "place"),
    [
        (iter([1]), "batch is a list_iterator"),
        ((x for x in [1]), "batch is a generator"),
        ({"x": [iter([1])]}, r"batch\['x'\]\[0\] is a list_iterator"),
        ((0, {"x": enumerate([])}), r"batch\[1\]\['x'\] is a enumerate"),
    ],
)
def test_an_iterator_in_the_batch_is_refused_before_the_first_pass(batch: Any, place: str) -> None:
    model, called = linear(), []
    guard = Guard(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match=rf"{place}: .*draw the micro-batches before the step"):
        guard.step(called.append, batch)
    assert not called


def test_what_a_pass_takes_out_of_its_batch_is_put_back_for_the_next_one() -> None:
    def pops(model: nn.Module, batch: Any, number: int) -> torch.Tensor:
        batch["more"].append(0)
        batch["kept"] = batch.pop("x")
        return plain(model, batch["kept"], number)

    right, _ = train(linear(), pops, lambda n: {"x": drawn(n), "more": []})
    found, kinds = train(linear(), pops, lambda n: {"x": drawn(n), "more": []}, audit=1.0)
    assert (found, kinds) == (right, ["rerun"])
    assert train(linear(), pops, lambda n: {"x": drawn(n), "more": []}, audit=0.0)[0] == right


class Drained:
    """A batch of a class of its own, which is empty after it was read."""

    def __init__(self, value: torch.Tensor) -> None:
        self.values = [value]


def test_runs_that_leave_other_gradients_empty_do_not_overrule_the_first() -> None:
    def reads(model: nn.Module, batch: Drained, number: int) -> torch.Tensor:
        if not batch.values:
            return torch.zeros(())
        return plain(model, batch.values.pop(), number)

    def genuine_spike(number: int) -> Drained:
        return Drained(drawn(number) * (1000 if number == STEPS - 3 else 1))

    right, _ = train(linear(), plain, drawn)
    model = linear()
    with pytest.raises(UncorrectableFault, match=r"left other gradients empty.*check_determinism"):
        train(model, reads, genuine_spike, audit=0.0, seed=1)
    assert state_digest([*model.parameters()]) != right


def scales_in_place(model: nn.Module, batch: torch.Tensor, number: int) -> torch.Tensor:
    return plain(model, batch.clamp_(-0.5, 0.5), number)


def test_a_batch_changed_in_place_never_outvotes_the_first_run() -> None:
    model = linear()
    with pytest.raises(UncorrectableFault, match=r"another batch.*check_determinism\(model"):
        train(model, scales_in_place, drawn, audit=1.0)
    assert events.recent()[-1].detail["verdict"] == "persistent"
    bare = linear()
    kept = KeptBatch(drawn(0))
    MicroStep(bare, lambda batch: scales_in_place(bare, batch, 0), kept).run()
    with pytest.raises(UncorrectableFault, match=r"cannot be done again, because its batch was"):
        MicroStep(bare, lambda batch: scales_in_place(bare, batch, 0), kept).run()


class Cached(nn.Module):
    """A growing cache, as for rotary embeddings and masks, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.linear = way, nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(1)
        self.length = 0
        if way == "none":
            self.register_buffer("cache", None, persistent=False)
        elif way != "registered":
            self.register_buffer("cache", torch.ones(0), persistent=way != "flag")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.grow(len(x))
        return self.norm(self.linear(x)) * self.cache[: len(x), None]

    def grow(self, length: int) -> None:
        if self.length >= length:
            return
        made = torch.linspace(0, 1, length) + self.length
        if self.way == "resized":
            self.cache.resize_(length).copy_(made)
        elif self.way == "dtype":
            self.cache = made.double() if self.length else made
        elif self.way == "deleted":
            del self.cache
            self.cache = made
        elif self.way == "data":
            self.cache.data = made
        else:
            self.register_buffer("cache", made, persistent=False)
        self.length = length


def growing(number: int) -> torch.Tensor:
    return torch.randn(4 + number // 5 * 3, 4, generator=torch.Generator().manual_seed(number))


def twice(model: nn.Module, batch: torch.Tensor, number: int) -> torch.Tensor:
    loss = model(batch).float().square().mean() + 0.1
    loss.backward()
    return loss


WAYS = ["assigned", "registered", "none", "resized", "dtype", "deleted", "data", "flag"]


@pytest.mark.parametrize("way", WAYS)
def test_buffers_that_a_pass_makes_anew_are_as_before_when_it_is_repeated(way: str) -> None:
    """The struck step, the tenth, is one in which the cache grows."""
    right, _ = train(Cached(way), twice, growing)
    found, kinds = train(Cached(way), twice, growing, audit=1.0)
    assert (found, kinds) == (right, ["rerun"])
    assert train(Cached(way), twice, growing, audit=1e-9)[0] == right


class Frozen(nn.Module):
    """A large table, which nothing changes until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("table", torch.ones(2**15))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.linear(x) * self.table[:1]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the buffers that were copied."""
    sizes: list[int] = []
    of = buffers._Saved.of.__func__  # type: ignore[attr-defined]

    def counting(cls: Any, live: Any, before: Any) -> Any:
        saved = of(cls, live, before)
        if before is None or saved.copy is not before.copy:
            sizes.append(saved.copy.nbytes)
        return saved

    monkeypatch.setattr(buffers._Saved, "of", classmethod(counting))
    return sizes


def test_a_frozen_table_is_copied_once_and_one_that_changes_late_is_put_back(
    copied: list[int],
) -> None:
    def late(model: nn.Module, batch: torch.Tensor, number: int) -> torch.Tensor:
        if number >= STRUCK - 1:
            model.table.add_(1e-3)
        return plain(model, batch, number)

    right, _ = train(Frozen(), late, drawn)
    assert train(Frozen(), late, drawn, audit=1.0) == (right, ["rerun"])
    copied.clear()
    train(Frozen(), plain, drawn, audit=1e-9)
    assert copied.count(4 * 2**15) == 1
    assert copied.count(4) == STEPS


def test_a_large_buffer_that_is_changed_through_data_in_every_step_is_copied_in_every_step(
    copied: list[int],
) -> None:
    def unseen(model: nn.Module, batch: torch.Tensor, number: int) -> torch.Tensor:
        model.table.data.add_(1e-3)
        return plain(model, batch, number)

    right, _ = train(Frozen(), unseen, drawn)
    assert train(Frozen(), unseen, drawn, audit=1.0) == (right, ["rerun"])
    assert copied.count(4 * 2**15) >= STEPS - 1


def test_a_trusted_buffer_that_changed_unseen_is_never_repeated_with_an_old_value() -> None:
    def unseen(model: nn.Module, batch: torch.Tensor, number: int) -> torch.Tensor:
        if number == STRUCK - 2:
            model.table.data.add_(1e-3)
        return plain(model, batch, number)

    with pytest.raises(UncorrectableFault, match=r"changed unseen by autograd.*: table"):
        train(Frozen(), unseen, drawn, clip_grad_norm=1e9)


def test_tied_and_missing_buffers_stay_what_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    saved = Buffers(model)
    model(torch.randn(4, 2))
    model[1].running_mean = torch.ones(2)
    assert saved.restore(model) == []
    assert model[1].running_mean is model[0].running_mean
    assert not any(buffer.any() for name, buffer in model.named_buffers() if "var" not in name)


@pytest.mark.parametrize("fails", ["raises", "returns no loss"])
def test_a_pass_that_fails_leaves_buffers_and_random_state_for_the_retry(fails: str) -> None:
    def model_of() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))

    model, right = model_of(), model_of()
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    torch.manual_seed(1)

    def failing(batch: torch.Tensor) -> Any:
        loss = plain(model, batch, 0)
        if fails == "raises":
            raise MemoryError
        return [loss]

    with pytest.raises((MemoryError, TypeError)):
        guard.step(failing, drawn(0))
    guard.step(lambda batch: plain(model, batch, 0), drawn(0))
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(right.parameters(), 0.1)
    plain(right, drawn(0), 0)
    optimizer.step()
    assert state_digest(model.state_dict()) == state_digest(right.state_dict())


def test_buffers_of_a_step_that_is_given_up_are_as_before_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before, seeds = state_digest(model.state_dict()), iter(range(9))

    def noisy(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch + next(seeds)).square().mean()
        loss.backward()
        return loss * math.pi

    with pytest.raises(UncorrectableFault, match=r"4 runs gave no confirmed.*check_determinism"):
        Guard(model, torch.optim.SGD(model.parameters(), 0.1), audit=1.0).step(noisy, drawn(0))
    assert state_digest(model.state_dict()) == before
