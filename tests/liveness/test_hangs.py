"""Runs of three ranks in which one stops, skips a collective, or is slow: who is named?"""

import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.events import LEDGER_NAME, Event, EventKind, read_ledger

RANKS = 3
PATIENCE_S = 120.0
SCRIPT = Path(__file__).with_name("hang_ranks.py")

pytestmark = pytest.mark.processes


class Run:
    """The ranks of a case; ``close`` ends those that hang."""

    def __init__(self, folder: Path, case: str) -> None:
        self.folder = folder
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        place |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(SCRIPT), str(folder), case]
        self.ranks = [
            subprocess.Popen(words, env=os.environ | place | {"RANK": str(rank)})
            for rank in range(RANKS)
        ]

    def events(self, kind: EventKind) -> list[Event]:
        try:
            return [event for _, event in read_ledger(self.folder / LEDGER_NAME, kind=kind)]
        except ConfigError:  # it is not there yet
            return []

    def until(self, kind: EventKind) -> Event:
        """Wait for an event of this kind."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            if found := self.events(kind):
                return found[0]
            time.sleep(0.1)
        raise AssertionError(f"no {kind} within {PATIENCE_S:g} s")

    def close(self) -> None:
        for each in self.ranks:
            each.kill()
            each.wait(PATIENCE_S)


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest):
    started = Run(tmp_path, request.param)
    yield started
    started.close()


@pytest.mark.parametrize(
    ("run", "why"),
    [
        pytest.param("stop", "stopped", marks=pytest.mark.representative),
        ("loader", "has not entered"),
        ("other", "has entered gloo:broadcast"),
    ],
    indirect=["run"],
)
def test_the_rank_for_which_the_others_wait_is_named(run: Run, why: str) -> None:
    found = run.until(EventKind.RANK_HUNG).detail
    assert list(found["behind"]) == ["1"], found
    assert why in found["behind"]["1"]
    assert "gloo:" in found["waiting_in"]
    if why != "stopped":  # such a process writes its stacks once it goes on
        stacks = (run.folder / "ranks" / "1.stacks.txt").read_text()
        assert "hang_ranks.py" in stacks


@pytest.mark.parametrize("run", ["skip"], indirect=True)
def test_a_rank_that_skips_a_collective_is_killed_if_that_is_wanted(run: Run) -> None:
    found = run.until(EventKind.RANK_HUNG).detail
    assert list(found["behind"]) == ["1"], found
    assert run.ranks[1].wait(PATIENCE_S) == -9


@pytest.mark.parametrize("run", ["far"], indirect=True)
def test_where_no_rank_is_left_to_kill_the_named_one_a_waiting_rank_ends_itself(run: Run) -> None:
    """Each rank is on a host of its own, and the launcher restarts all if one of them ends."""
    found = run.until(EventKind.RANK_HUNG).detail
    assert (list(found["behind"]), found["restarts"]) == (["1"], True)
    assert run.ranks[0].wait(PATIENCE_S) == -9
    assert run.ranks[1].poll() is None


@pytest.mark.parametrize("run", ["slow"], indirect=True)
def test_a_rank_that_computes_three_times_as_long_is_named(run: Run) -> None:
    found = run.until(EventKind.STRAGGLER).detail
    assert found["rank"] == 2
    # From 1.3 on a rank is a straggler; its waits for a core count, too, and so do the others'.
    assert found["factor"] >= 1.3
    assert not run.events(EventKind.RANK_HUNG)


@pytest.mark.parametrize("run", ["healthy"], indirect=True)
def test_nothing_is_said_of_checkpoints_pauses_evaluation_and_compilers(run: Run) -> None:
    for each in run.ranks:
        assert each.wait(PATIENCE_S) == 0
    assert not run.events(EventKind.RANK_HUNG)
    assert not run.events(EventKind.STRAGGLER)
