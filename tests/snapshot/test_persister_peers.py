"""A persister among nodes that fall silent or have gone on: it gives up soon, and says so."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_nodes import roster_of

from holdfast import events
from holdfast.errors import SnapshotLost
from holdfast.snapshot.disk import persister
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.disk.persister import Persister
from holdfast.snapshot.layout import manifest
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.roster import Roster
from holdfast.snapshot.restore import full_state
from holdfast.snapshot.restore.reader import Leased

TIMEOUT_S = 5.0
SETTINGS = {"every": 1, "keep": 2, "world_size": 3, "first_rank": 0}


class Memory:
    """A reader of an SMP that holds these steps, newest last; of nodes at these addresses."""

    def __init__(self, steps: list[int], addresses: Sequence[tuple[str, int]] = ()) -> None:
        self.steps = steps
        self.persisted_: list[tuple[int, str]] = []
        self._addresses = tuple(addresses)

    def roster(self) -> Roster:
        return roster_of(0, self._addresses)

    def lease(self) -> Leased:
        blob = manifest.encode(None, [], b"of a share" if self._addresses else None)
        part = Part(0, torch.zeros(8, dtype=torch.uint8), blob, manifest.digest_of(blob))
        return Leased(self.steps.pop(0) if len(self.steps) > 1 else self.steps[0], [part])

    def release(self) -> tuple[bool, int]:
        return True, self.steps[-1]

    def persisted(self, step: int, error: str) -> None:
        self.persisted_.append((step, error))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Three nodes that take connections, and never say a word: as of a host that is gone."""
    monkeypatch.setenv("HOLDFAST_TIMEOUT_S", str(TIMEOUT_S))
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        yield [sock.getsockname() for sock in sockets]


@pytest.mark.parametrize("patient", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_silent_nodes_are_given_up_long_before_the_timeout(
    silent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """With all the patience of others, the persister would hang for all of the timeouts."""
    if patient:
        monkeypatch.setattr(full_state, "_SHARE_OF_PATIENCE", 1.0)
    memory: Any = Memory([7], silent)
    started_s = time.monotonic()
    with pytest.raises(SnapshotLost, match="step 7 cannot be read whole: node 0 cannot be read"):
        full_state.full_state(memory.lease(), memory)
    timeouts = (time.monotonic() - started_s) / TIMEOUT_S
    # One more than parity makes up for is not waited for at all.
    assert timeouts > 1.9 if patient else timeouts < 0.5


@pytest.mark.parametrize(
    ("steps", "tried"), [([7, 7], [7]), ([7, 8, 9, 9], [7, 8, 9]), ([*range(7, 30)], range(7, 17))]
)
def test_another_step_is_tried_only_if_it_is_newer(
    steps: list[int], tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def gone(leased: Leased, _: Any) -> Leased:
        asked.append(leased.step)
        raise SnapshotLost(f"step {leased.step} is gone")

    monkeypatch.setattr(persister, "full_state", gone)
    memory: Any = Memory(list(steps))
    settings = PersistSettings(str(tmp_path), **SETTINGS)
    Persister(memory, settings)._persist(memory.lease(), 0)
    assert asked == list(tried)
    ((_, error),) = memory.persisted_
    assert error == f"step {asked[-1]} is gone"
    assert [event.kind for event in events.recent()][-1] == "persist_failed"


def test_a_step_that_the_run_went_back_behind_while_it_was_written_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persister, "full_state", lambda leased, _: leased)
    memory: Any = Memory([7])
    leased, writer = memory.lease(), Persister(memory, PersistSettings(str(tmp_path), **SETTINGS))
    memory.steps = [6]
    writer._persist(leased, 0)
    assert not list(tmp_path.glob("*step*"))
    ((step, error),) = memory.persisted_
    assert step == 7
    assert "or the run went back" in error
    memory.steps = [7]
    writer._persist(leased, 0)
    assert memory.persisted_[-1] == (7, "")


def test_an_smp_of_an_older_installation_starts_the_persister(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lingers while the package is upgraded, and starts the new code by its own options."""
    begun = []

    class Begun(Persister):
        def run(self) -> None:
            begun.append(self._settings)

    monkeypatch.setattr(persister, "Reader", lambda _: nullcontext())
    monkeypatch.setattr(persister, "Persister", Begun)
    monkeypatch.setattr(persister.os, "nice", lambda _: 0)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    options = ["--every=1", "--keep=2", "--world-size=3", "--first-rank=0"]
    assert persister.main([f"--run-dir={tmp_path}", f"--directory={tmp_path}", *options]) == 0
    assert begun == [PersistSettings(str(tmp_path), **SETTINGS)]
