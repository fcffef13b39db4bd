"""Batches that are digested where they are made, and compared where they are used."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guard_cases import Net, events_of, kinds
from spot_cases import flip
from torch.utils.data import DataLoader

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.guard import Guard
from holdfast.replay.made_batches import DigestedCollate

Change = Callable[[int, torch.Tensor], object]


class Striking(DigestedCollate):
    """Flips a bit of the n-th batch that it has made and digested, once; a file says so."""

    def __init__(self, path: Path, number: int, digested: bool = True) -> None:
        super().__init__()
        self.path, self.left, self.digested = path, number, digested

    def __call__(self, samples: Any) -> Any:
        """Make a batch, and strike it."""
        made, self.left = super().__call__(samples), self.left - 1
        if not self.left:
            with suppress(FileExistsError):  # another worker has struck, or an earlier pass
                self.path.touch(exist_ok=False)
                flip(made.batch)
        return made if self.digested else made.batch


class Drawn(list[torch.Tensor]):
    """Samples that are drawn from the random state of the process."""

    def __getitem__(self, _: Any) -> Any:
        return torch.rand(8)


def trained(collate: Any, where: str = "", change: Change | None = None, **loader: Any) -> str:
    """Train for two passes over the samples and a part of a third; return a digest of the weights.

    A batch may be changed before a step, also one of a micro-step, or within its first pass.
    """
    samples = [torch.rand(8, generator=torch.Generator().manual_seed(n)) for n in range(18)]
    torch.manual_seed(0)
    model = Net(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"dataset": samples, "batch_size": 6, "shuffle": True} | loader

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean() + 0.1
        loss.backward()
        if change is not None and where == "within":
            change(guard.steps_done, batch)
        return loss

    with Guard(
        model, optimizer, audit=float(where in ("within", "before an audited step"))
    ) as guard:
        for batch in guard.batches(DataLoader(collate_fn=collate, **options), steps=7):
            if change is not None and where != "within":
                change(guard.steps_done, batch)
            if where == "before a micro-step":
                guard.micro_step(forward_backward, batch, last=True)
                optimizer.step()
                optimizer.zero_grad()
                guard.after_optimizer_step()
            else:
                guard.step(forward_backward, batch)
    return state_digest(model.state_dict())


def once(step: int) -> Change:
    """Flip a bit of the batch of a step, once."""
    left = [step]
    return lambda now, batch: flip(batch) if now in left and left.pop() else None


@pytest.mark.parametrize(
    "workers", [0, pytest.param(2, marks=[pytest.mark.processes, pytest.mark.representative])]
)
def test_a_batch_that_changes_on_its_way_is_made_again(workers: int, tmp_path: Path) -> None:
    number, right = 1 if workers else 2, trained(None)
    assert trained(DigestedCollate(), num_workers=workers) == right
    assert kinds() == []
    assert trained(Striking(tmp_path / "struck", number), num_workers=workers) == right
    (event,) = events_of("batch_fault")
    assert (event.op, event.rung) == ("batch", "recompute")
    assert kinds() == ["batch_fault"]
    without = Striking(tmp_path / "without", number, digested=False)
    assert trained(without, num_workers=workers) != right


@pytest.mark.parametrize("where", ["before a step", "before a micro-step", "within"])
def test_a_batch_that_changes_before_a_pass_is_made_again(where: str) -> None:
    """Within the first pass means before the repetition of an audited step."""
    right = trained(None, where)
    assert trained(DigestedCollate(), where, once(4)) == right
    assert kinds() == ["batch_fault"]
    assert trained(None, where, once(4)) != right


def test_what_the_program_changes_is_no_fault() -> None:
    change = "before a step", lambda step, batch: batch.mul_(2)
    assert trained(DigestedCollate(), *change) == trained(None, *change)
    assert kinds() == []


def scaled(batch: torch.Tensor) -> None:
    """Change every element in a way that torch does not see."""
    batch.numpy()[:] *= 2


@pytest.mark.parametrize("where", ["before a step", "before an audited step"])
@pytest.mark.parametrize(("edit", "steps"), [(scaled, 0), (flip, 2)])
def test_what_the_program_changes_through_numpy_is_refused_and_not_undone(
    edit: Callable[[torch.Tensor], None], steps: int, where: str
) -> None:
    """An edit of all elements at once, one of a single element in each batch at the third."""
    with pytest.raises(UncorrectableFault, match=r"through NumPy or \.data.* in the collate"):
        trained(DigestedCollate(), where, lambda step, batch: edit(batch))
    assert kinds() == ["batch_fault"] * (steps + 1)


@pytest.mark.parametrize("why", ["cannot make it again", "made another one"])
def test_a_batch_that_cannot_be_made_again_is_refused(why: str, tmp_path: Path) -> None:
    options = {"dataset": Drawn(range(18))} if "another" in why else {}
    options |= {"generator": torch.Generator()} if "cannot" in why else {}
    with pytest.raises(UncorrectableFault, match=rf"^batch changed .* {why}: restart"):
        trained(Striking(tmp_path / "struck", 2), **options)
    (event,) = events_of("batch_fault")
    assert (event.rung, why in event.detail["reason"]) == ("", True)


def test_arrays_are_compared_and_a_batch_without_any_is_refused() -> None:
    """Also where a loop does without ``Guard.batches``."""
    made = DigestedCollate(lambda given: [np.array(given), {"deep": (torch.ones(6, 8),)}])([1, 2])
    assert sorted(made.digests) == ["batch[0]", "batch[1]['deep'][0]"]
    model = Net(0.5)
    guard = Guard(model, torch.optim.SGD(model.parameters()))
    guard.step(lambda batch: model(batch[1]["deep"][0]).sum(), made)
    made.batch[0][1] = 7
    with pytest.raises(UncorrectableFault, match=r"^batch\[0\] changed"):
        guard.step(lambda batch: torch.zeros(1), made)
    with pytest.raises(ConfigError, match="found no tensor in a batch of list"):
        DigestedCollate(list)(["a"])


def test_an_array_of_strings_is_compared_and_one_of_objects_left_out() -> None:
    names = np.array(["one", "two"])
    made = DigestedCollate(lambda _: [torch.ones(2), names, np.array([object()])])([1, 2])
    assert sorted(made.digests) == ["batch[0]", "batch[1]"]
    model = Net(0.5)
    guard = Guard(model, torch.optim.SGD(model.parameters()))
    names[0] = "six"
    with pytest.raises(UncorrectableFault, match=r"^batch\[1\] changed"):
        guard.step(lambda batch: torch.zeros(1), made)


def test_other_data_in_the_place_of_a_batch_are_refused() -> None:
    def halved(step: int, batch: torch.Tensor) -> None:
        batch.data = batch.data[:3]

    with pytest.raises(UncorrectableFault, match=r"through NumPy or \.data"):
        trained(DigestedCollate(), "before a step", halved)


def test_an_array_of_the_other_byte_order_has_a_digest() -> None:
    found = [state_digest(np.array([1, 2], order)) for order in (">f4", "<f4", ">f4")]
    assert found[0] == found[2] != found[1]
