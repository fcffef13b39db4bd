"""Runs on several hosts: the weights of a run on one, also when a host is lost on the way."""

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from process_server import descendants
from snapshot_waits import until

from holdfast import config, events
from holdfast.errors import ConfigError
from holdfast.inject import Fault
from holdfast.inject.schedule import NO_RANK
from holdfast.report.run_files import METRICS_NAME
from holdfast_lab.trainer import agent, hosts
from holdfast_lab.trainer.agent import RunFailed
from holdfast_lab.trainer.launch import RunResult, train
from holdfast_lab.trainer.namespaces import Switch
from holdfast_lab.trainer.process_groups import Loopback
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.storm import Outcome, outcomes
from holdfast_lab.trainer.worker import host_ledgers

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("forked_python"),
]

STEPS = 120
PATIENCE_S = 60.0
Make = Callable[..., Settings]


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "30")


def _choose(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = hosts.kind_here()[1]
    if kind == Switch.kind and reason:
        pytest.skip(f"no namespaces: {reason}")
    monkeypatch.setattr(hosts, "kind_here", lambda: (kind, "chosen by a test"))


@pytest.fixture
def thrice(settings: Make) -> Make:
    """Makes the settings of a small run on three hosts."""
    return partial(settings, mode="bare", steps=STEPS, ranks=3, nodes=3)


@pytest.fixture
def as_calm(calm: Callable[..., RunResult]) -> Callable[[RunResult], bool]:
    """Tells whether a run has ended as the one of as many ranks on a single host."""

    def same(result: RunResult) -> bool:
        one = calm(steps=STEPS, ranks=3)
        return (result.digests, result.losses) == (one.digests, one.losses)

    return same


def _loss(step: int, host: int) -> Fault:
    return Fault(step, NO_RANK, "lose_node", host=host)


def _processes(run_dir: Path) -> list[psutil.Process]:
    """Agents and ranks of a run, without nsenter, which has the command line of its child."""
    found = descendants("holdfast_lab.trainer.", str(run_dir))
    return [process for process in found if "nsenter" not in process.cmdline()[0]]


def _lose_host(run_dir: Path, settings: Settings, lost: int) -> tuple[RunResult, Outcome]:
    result = train(run_dir, settings, [_loss(STEPS // 4, lost)])
    (outcome,) = outcomes(result.events)
    assert (outcome.kind, outcome.op) == ("lose_node", f"host-{lost}")
    assert STEPS // 4 <= outcome.step < STEPS
    assert (run_dir / f"host-{lost}b" / agent.LOGS_NAME).is_dir()
    assert _processes(run_dir) == []
    return result, outcome


@pytest.mark.parametrize(
    ("kind", "lost"),
    [pytest.param(Switch.kind, 0, marks=pytest.mark.representative), (Loopback.kind, 2)],
)
def test_a_run_that_loses_a_host_ends_as_the_calm_one(
    thrice: Make,
    as_calm: Callable[[RunResult], bool],
    tmp_path: Path,
    kind: str,
    lost: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _choose(kind, monkeypatch)
    result, outcome = _lose_host(tmp_path / "run", thrice(mode="guarded"), lost)
    assert as_calm(result)
    assert (outcome.seen_by, outcome.rung) == ("torchrun", "rebuild")
    restored = [event for event in result.events if event.kind == "restored"]
    assert sorted(event.rank for event in restored) == [0, 1, 2]
    (step,) = {event.detail["step"] for event in restored}
    assert step >= outcome.step - 2


def test_a_host_that_falls_silent_is_lost_too(
    thrice: Make,
    as_calm: Callable[[RunResult], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the power fails: no connection is closed, there is just no answer any more."""
    _choose(Switch.kind, monkeypatch)
    kill = hosts.Host.kill

    def cut_off_and_kill(host: hosts.Host) -> None:
        if host.name == "host-1" and host.alive:
            host.link(up=False)
        kill(host)

    monkeypatch.setattr(hosts.Host, "kill", cut_off_and_kill)
    run_dir = tmp_path / "run"
    result, _ = _lose_host(run_dir, thrice(), 1)
    assert as_calm(result)
    lives = (run_dir / METRICS_NAME).read_bytes().count(b"\n")
    assert lives > STEPS, "no step was computed again: nothing was lost"


def test_the_events_of_every_host_and_of_the_launcher_are_in_the_runs_ledger(
    thrice: Make, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    struck = [Fault(2, rank, "inf", op="head/mm/forward", identifier=rank) for rank in range(3)]
    settings = thrice(mode="unprotected", steps=5)
    result = train(run_dir, settings, [*struck, _loss(5, 1)])
    assert sorted(e.rank for e in result.events if e.kind == "injected") == [0, 1, 2]
    assert [len(list(events.read_ledger(path))) for path in host_ledgers(run_dir)] == [1, 1, 1]
    (missed,) = [event for event in result.events if event.kind == "fault_missed"]
    assert (missed.op, missed.detail["kind"], missed.step) == ("host-1", "lose_node", 5)
    kept = [event for _, event in events.read_ledger(run_dir / events.LEDGER_NAME)]
    assert kept == result.events


def test_ranks_that_fail_for_good_are_reported_with_their_host(
    thrice: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TIMEOUT_S", "not a number")
    monkeypatch.setattr(config, "timeout_s", lambda: 30.0)
    with pytest.raises(RunFailed, match=r"the agent of host-\d failed \(exit code 1\): .*logs are"):
        train(tmp_path / "run", thrice())
    assert _processes(tmp_path / "run") == []


@pytest.mark.representative
def test_a_killed_launcher_leaves_nothing(
    command: Callable[..., list[str]], tmp_path: Path
) -> None:
    if reason := hosts.kind_here()[1]:
        pytest.skip(f"no namespaces: {reason}")
    run_dir = tmp_path / "run"
    endless = command(run_dir, "--mode=bare", "--steps=100000", "--nodes=2")
    with subprocess.Popen(endless, stdout=subprocess.DEVNULL) as launcher:
        try:
            until((run_dir / METRICS_NAME).exists, "a step is made", PATIENCE_S)
            assert len(_processes(run_dir)) == 6  # two agents, standby processes and ranks
        finally:
            os.kill(launcher.pid, signal.SIGKILL)
    until(lambda: not _processes(run_dir), "the ranks end", PATIENCE_S)
    again = [*endless, "--resume"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "ended with its launcher, and their memory with them" in done.stderr


@pytest.mark.representative
def test_ranks_are_divided_evenly(thrice: Make) -> None:
    with pytest.raises(ConfigError, match="ranks = 4 cannot be divided among nodes = 3"):
        thrice(ranks=4)
