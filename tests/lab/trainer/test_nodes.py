"""Runs on several hosts: the weights of a run on one, also when a host is lost on the way."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_server import Server, descendants
from snapshot_waits import until

from holdfast import config, events
from holdfast.errors import ConfigError
from holdfast.inject import Fault
from holdfast.inject.schedule import NO_RANK
from holdfast.report.run_files import METRICS_NAME
from holdfast_lab.trainer import agent, hosts
from holdfast_lab.trainer.agent import RunFailed
from holdfast_lab.trainer.gpt import GPTConfig
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

MODEL = GPTConfig(layers=1, heads=2, width=16, context=16)
STEPS = 120
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "30")


def _choose(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = hosts.kind_here()[1]
    if kind == Switch.kind and reason:
        pytest.skip(f"no namespaces: {reason}")
    monkeypatch.setattr(hosts, "kind_here", lambda: (kind, "chosen by a test"))


def _settings(text: Path, **changes: Any) -> Settings:
    fields = {"mode": "bare", "steps": STEPS, "ranks": 3, "nodes": 3, "batch_size": 2}
    return Settings(**fields | {"warmup_steps": 1, "data": str(text), "model": MODEL} | changes)


@pytest.fixture(scope="module")
def calm(text: Path, tmp_path_factory: Any, python_server: Server) -> RunResult:
    """The run of as many ranks on a single host."""
    with python_server.client.forking():
        return train(tmp_path_factory.mktemp("calm") / "run", _settings(text, nodes=1))


def _loss(step: int, host: int) -> Fault:
    return Fault(step, NO_RANK, "lose_node", host=host)


def _processes(run_dir: Path) -> list[psutil.Process]:
    """Agents and ranks of a run, without nsenter, which has the command line of its child."""
    found = descendants("holdfast_lab.trainer.", str(run_dir))
    return [process for process in found if "nsenter" not in process.cmdline()[0]]


def test_three_hosts_compute_what_three_ranks_on_one_do(
    calm: RunResult, text: Path, tmp_path: Path
) -> None:
    result = train(tmp_path / "run", _settings(text))
    assert result.digests == calm.digests
    assert result.losses == calm.losses
    assert sorted(path.name for path in (tmp_path / "run").glob("host-*")) == [
        "host-0",
        "host-1",
        "host-2",
    ]
    assert _processes(tmp_path / "run") == []


def _lose_host(
    run_dir: Path, settings: Settings, lost: int, calm: RunResult
) -> tuple[RunResult, Outcome]:
    result = train(run_dir, settings, [_loss(STEPS // 4, lost)])
    assert result.digests == calm.digests
    assert result.losses == calm.losses
    (outcome,) = outcomes(result.events)
    assert (outcome.kind, outcome.op) == ("lose_node", f"host-{lost}")
    assert STEPS // 4 <= outcome.step < STEPS
    assert (run_dir / f"host-{lost}b" / agent.LOGS_NAME).is_dir()
    assert _processes(run_dir) == []
    return result, outcome


# Hosts that are process groups are found by their environment: their programs are executed.
@pytest.mark.parametrize(
    ("kind", "lost"),
    [pytest.param(Switch.kind, 0, marks=pytest.mark.representative), (Loopback.kind, 2)],
)
def test_a_run_that_loses_a_host_ends_as_the_calm_one(
    calm: RunResult,
    text: Path,
    tmp_path: Path,
    kind: str,
    lost: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _choose(kind, monkeypatch)
    result, outcome = _lose_host(tmp_path / "run", _settings(text, mode="guarded"), lost, calm)
    assert (outcome.seen_by, outcome.rung) == ("torchrun", "rebuild")
    restored = [event for event in result.events if event.kind == "restored"]
    assert sorted(event.rank for event in restored) == [0, 1, 2]
    (step,) = {event.detail["step"] for event in restored}
    assert step >= outcome.step - 2


def test_a_host_that_falls_silent_is_lost_too(
    calm: RunResult, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    _lose_host(run_dir, _settings(text), 1, calm)
    lives = (run_dir / METRICS_NAME).read_bytes().count(b"\n")
    assert lives > STEPS, "no step was computed again: nothing was lost"


def test_the_events_of_every_host_and_of_the_launcher_are_in_the_runs_ledger(
    text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    struck = [Fault(2, rank, "inf", op="head/mm/forward", identifier=rank) for rank in range(3)]
    settings = _settings(text, mode="unprotected", steps=5)
    result = train(run_dir, settings, [*struck, _loss(5, 1)])
    assert sorted(e.rank for e in result.events if e.kind == "injected") == [0, 1, 2]
    assert [len(list(events.read_ledger(path))) for path in host_ledgers(run_dir)] == [1, 1, 1]
    (missed,) = [event for event in result.events if event.kind == "fault_missed"]
    assert (missed.op, missed.detail["kind"], missed.step) == ("host-1", "lose_node", 5)
    kept = [event for _, event in events.read_ledger(run_dir / events.LEDGER_NAME)]
    assert kept == result.events


def test_ranks_that_fail_for_good_are_reported_with_their_host(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TIMEOUT_S", "not a number")
    monkeypatch.setattr(config, "timeout_s", lambda: 30.0)
    with pytest.raises(RunFailed, match=r"the agent of host-\d failed \(exit code 1\): .*logs are"):
        train(tmp_path / "run", _settings(text))
    assert _processes(tmp_path / "run") == []


@pytest.mark.representative
def test_what_no_restart_can_mend_is_a_configuration_error(text: Path, tmp_path: Path) -> None:
    fault = Fault(1, 2, "inf", op="head/mm/forward", index=(9999, 0))
    with pytest.raises(ConfigError, match=r"fault 1: index \[9999, 0\] is outside the output"):
        train(tmp_path / "run", _settings(text, mode="unprotected"), [fault])
    assert _processes(tmp_path / "run") == []


@pytest.mark.representative
def test_a_killed_launcher_leaves_nothing(text: Path, tmp_path: Path) -> None:
    if reason := hosts.kind_here()[1]:
        pytest.skip(f"no namespaces: {reason}")
    run_dir = tmp_path / "run"
    sizes = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch-size": 2}
    sizes |= {"steps": 100_000, "nodes": 2}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "holdfast.cli.main", "train", "--run-dir", str(run_dir)]
    command += ["--data", str(text), "--mode", "bare", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as launcher:
        try:
            until((run_dir / METRICS_NAME).exists, "a step is made", PATIENCE_S)
            assert len(_processes(run_dir)) == 4
        finally:
            os.kill(launcher.pid, signal.SIGKILL)
    until(lambda: not _processes(run_dir), "the ranks end", PATIENCE_S)
    again = [*command, "--resume"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "ended with its launcher, and their memory with them" in done.stderr


@pytest.mark.representative
def test_ranks_are_divided_evenly(text: Path) -> None:
    with pytest.raises(ConfigError, match="ranks = 4 cannot be divided among nodes = 3"):
        _settings(text, ranks=4)
