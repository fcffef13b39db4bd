"""A persister among nodes that fall silent or have gone on: it gives up soon, and says so."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

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
        fields = {
            "mirrored_ranks": (),
            "mirror_nodes": ((1,),),
            "sets": (((0, 1, 2),),),
            "first_rank": 0,
        }
        return Roster(1, 0, self._addresses, "00", 1, **fields)

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


def seconds_until_given_up(addresses: list[tuple[str, int]]) -> float:
    memory: Any = Memory([7], addresses)
    started_s = time.monotonic()
    with pytest.raises(SnapshotLost, match="step 7 cannot be read whole: node 0 cannot be read"):
        full_state.full_state(memory.lease(), memory)
    return time.monotonic() - started_s


def test_silent_nodes_are_given_up_long_before_the_timeout(silent: list[tuple[str, int]]) -> None:
    # One more than parity makes up for is not waited for at all.
    assert seconds_until_given_up(silent) < 0.5 * TIMEOUT_S


@pytest.mark.processes
def test_without_a_patience_of_its_own_it_would_hang_for_all_of_it(
    silent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_state, "_SHARE_OF_PATIENCE", 1.0)
    assert seconds_until_given_up(silent) > 1.9 * TIMEOUT_S


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
    leased = memory.lease()
    memory.steps = [6]
    Persister(memory, PersistSettings(str(tmp_path), **SETTINGS))._persist(leased, 0)
    assert not list(tmp_path.glob("*step*"))
    ((step, error),) = memory.persisted_
    assert step == 7
    assert "or the run went back" in error
    memory.steps = [7]
    Persister(memory, PersistSettings(str(tmp_path), **SETTINGS))._persist(leased, 0)
    assert memory.persisted_[-1] == (7, "")
