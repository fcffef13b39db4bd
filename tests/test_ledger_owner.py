"""A ledger belongs to one run: another one in the same directory neither reads nor writes it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Guard, Snapshots, events
from holdfast.errors import SnapshotMismatch
from holdfast.events import LEDGER_NAME, EventKind, Ledger, read_ledger
from holdfast.events.ledger import STEPS_NAME


@pytest.fixture(autouse=True)
def _closed() -> object:
    yield
    events.close_ledger()


def train(
    run_dir: Path, run_id: str, *, die: bool = False, seen: str = "", closes: bool = True
) -> None:
    """Two steps of a run, which records an event that names it."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots = Snapshots(model, optimizer, run_dir=run_dir, run_id=run_id)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    if closes:
        events.close_ledger()
    with Guard(model, optimizer, snapshots=snapshots) as guard:
        for _ in range(2):
            guard.step(forward_backward, torch.ones(3, 8))
        events.record(EventKind.SCREENED, op=seen or run_id)
        if die:
            snapshots.wait_committed()
            raise KeyboardInterrupt


def stored(path: Path) -> list[str]:
    return [event.op for _, event in read_ledger(path) if event.kind == "screened"]


def test_the_next_run_in_a_directory_begins_a_ledger_of_its_own(run_dir: Path) -> None:
    train(run_dir, "first")
    steps = (run_dir / STEPS_NAME).read_text()
    train(run_dir, "second")
    assert stored(run_dir / LEDGER_NAME) == ["second"]
    assert stored(run_dir / "events-first.sqlite") == ["first"]
    assert (run_dir / "steps-first.jsonl").read_text() == steps
    train(run_dir, "first", seen="first again")
    assert stored(run_dir / LEDGER_NAME) == ["first", "first again"]
    assert stored(run_dir / "events-second.sqlite") == ["second"]


def test_the_next_run_of_a_process_has_its_own_ledger(tmp_path: Path) -> None:
    for name in ("first", "second"):
        train(tmp_path / name, name, closes=False)
    events.close_ledger()
    for name in ("first", "second"):
        assert stored(tmp_path / name / LEDGER_NAME) == [name]


def test_a_run_that_is_restarted_continues_its_ledger(run_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(run_dir, "", die=True, seen="before")
    train(run_dir, "", seen="after")
    assert stored(run_dir / LEDGER_NAME) == ["before", "after"]
    assert "restored" in [event.kind for _, event in read_ledger(run_dir / LEDGER_NAME)]


def test_a_refused_run_leaves_the_others_ledger_as_it_was(run_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(run_dir, "first", die=True)
    events.close_ledger()
    before = list(read_ledger(run_dir / LEDGER_NAME))
    with pytest.raises(SnapshotMismatch, match="another run"):
        train(run_dir, "second")
    events.record(EventKind.SCREENED, op="second")
    events.close_ledger()
    assert list(read_ledger(run_dir / LEDGER_NAME)) == before
    assert not list(run_dir.glob("events-*"))


def test_a_ledger_without_a_run_is_taken_over(run_dir: Path) -> None:
    run_dir.mkdir()
    events.open_ledger(run_dir)
    events.record(EventKind.SCREENED, op="the machine")
    events.close_ledger()
    train(run_dir, "first")
    assert stored(run_dir / LEDGER_NAME) == ["the machine", "first"]


def test_who_had_a_ledger_open_that_was_set_aside_goes_on_in_the_new_one(tmp_path: Path) -> None:
    Ledger(tmp_path / LEDGER_NAME, run_id="first").close()
    events.open_ledger(tmp_path)
    events.record(EventKind.SCREENED, op="before")
    Ledger(tmp_path / LEDGER_NAME, run_id="second").close()
    events.record(EventKind.SCREENED, op="after")
    assert stored(tmp_path / LEDGER_NAME) == ["after"]
    assert stored(tmp_path / "events-first.sqlite") == ["before"]


def test_several_ranks_of_a_run_share_its_ledger(tmp_path: Path) -> None:
    Ledger(tmp_path / LEDGER_NAME, run_id="old").close()
    ledgers = [Ledger(tmp_path / LEDGER_NAME, run_id="new") for _ in range(3)]
    assert all(ledger.is_in_place() for ledger in ledgers)
    for ledger in ledgers:
        ledger.append(events.Event("screened", op="here"))
        ledger.close()
    assert stored(tmp_path / LEDGER_NAME) == ["here"] * 3
