"""A run on several hosts: an agent on each, lost hosts replaced, the storm's losses carried out.

The store of torchrun's rendezvous is the launcher's own, so that no host is special: any of them
may be lost.
"""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from holdfast import config, events
from holdfast.errors import ConfigError
from holdfast.inject.schedule import Fault
from holdfast.report.run_files import FATAL_NAME
from holdfast_lab.trainer.agent import LOGS_NAME, POLL_S, RunFailed, last_line
from holdfast_lab.trainer.follower import Follower
from holdfast_lab.trainer.hosts import Cluster, Host, hosts
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.worker import prepare_ledger

AGENT_LOG_NAME = "agent.log"


def launch_on_hosts(
    run_dir: Path, settings: Settings, faults: Sequence[Fault], follower: Follower
) -> None:
    """Run a training on hosts of this machine to its end.

    Raises:
        ConfigError: a rank found input that no restart can mend.
        RunFailed: the ranks of a host failed more often than they may.
    """
    losses = [fault for fault in faults if fault.kind == "lose_node"]
    ledger = events.Ledger(run_dir / events.LEDGER_NAME)
    with closing(ledger), hosts(settings.nodes, run_dir) as cluster:
        Crew(cluster, run_dir, follower, ledger).run(losses, settings.steps)


class Crew:
    """The agents of a run, one a host.

    Args:
        cluster: hosts on which nothing runs yet.
        run_dir: the run's directory, filled, which all hosts see.
        follower: says how far the run is.
        ledger: the run's own, for what the launcher does.
    """

    def __init__(
        self, cluster: Cluster, run_dir: Path, follower: Follower, ledger: events.Ledger
    ) -> None:
        self._cluster, self._run_dir = cluster, run_dir
        self._follower, self._ledger = follower, ledger
        self._run_id = uuid.uuid4().hex
        self._store = cluster.call(self._serve)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def _serve(self) -> TCPStore:
        limit = timedelta(seconds=config.timeout_s())
        with _silent_stderr():  # torch misses a name for the gateway, which needs none
            return TCPStore(
                self._cluster.gateway, 0, is_master=True, wait_for_workers=False, timeout=limit
            )

    def run(self, losses: Sequence[Fault], steps: int) -> None:
        """Start an agent on every host and wait for all; lose hosts when their step comes.

        A host is not lost any more once the last step is done: ranks that have finished do not
        meet a replacement again.

        Raises:
            ConfigError, RunFailed: see ``launch_on_hosts``.
        """
        waiting = sorted(losses, key=lambda fault: fault.step)
        for host in self._cluster:
            self._start(host)
        while not self._finished():
            while waiting and waiting[0].step <= self._follower.steps_done < steps:
                self._lose(waiting.pop(0))
            time.sleep(POLL_S)
        for fault in waiting:
            self._record(fault, "fault_missed", f"host-{fault.host}")

    def _start(self, host: Host) -> None:
        prepare_ledger(host.run_dir)
        endpoint = f"{self._cluster.gateway}:{self._store.port}"
        arguments = [str(self._run_dir), endpoint, self._run_id, host.address]
        command = [sys.executable, "-u", "-m", "holdfast_lab.trainer.agent", *arguments]
        self._agents[host.index] = host.run(command, log=host.run_dir / AGENT_LOG_NAME)

    def _lose(self, fault: Fault) -> None:
        assert fault.host is not None
        host = self._cluster[fault.host]
        self._record(fault, "injected", host.name)
        self._start(host.replace())

    def _record(self, fault: Fault, kind: str, where: str) -> None:
        detail = {"fault": fault.identifier, "kind": fault.kind, "site": "node", "bit": None}
        step = self._follower.steps_done
        self._ledger.append(events.record(kind, op=where, detail=detail, step=step, rank=-1))

    def _finished(self) -> bool:
        fatal = self._run_dir / FATAL_NAME
        if fatal.exists():
            raise ConfigError(fatal.read_text())
        codes = {index: agent.poll() for index, agent in self._agents.items()}
        for index, code in codes.items():
            if code:
                raise self._failure(self._cluster[index], code)
        return all(code == 0 for code in codes.values())

    def _failure(self, host: Host, code: int) -> RunFailed:
        said = last_line(iter([host.run_dir / AGENT_LOG_NAME]))
        return RunFailed(
            f"the agent of {host.name} failed (exit code {code}): {said}; logs are in "
            f"{host.run_dir / LOGS_NAME}"
        )


@contextmanager
def _silent_stderr() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
