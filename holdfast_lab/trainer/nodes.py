"""A run on several emulated hosts: one agent on each, and replacements of lost hosts.

The launcher serves the store of torchrun's rendezvous, so that any host may be lost.
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
from holdfast.events import EventKind
from holdfast.inject.schedule import Fault
from holdfast.launch.service import Standby
from holdfast.report.run_files import FATAL_NAME
from holdfast_lab.trainer.agent import AGENT, ALONE, LOGS_NAME, POLL_S, RunFailed, last_line
from holdfast_lab.trainer.follower import Follower
from holdfast_lab.trainer.hosts import Cluster, Host, hosts
from holdfast_lab.trainer.settings import Settings
from holdfast_lab.trainer.worker import prepare_ledger

AGENT_LOG_NAME = "agent.log"


def launch_on_hosts(
    run_dir: Path,
    settings: Settings,
    faults: Sequence[Fault],
    follower: Follower,
    source: Standby | None = None,
) -> None:
    """Run a training on emulated hosts to its end; agents are forked from ``source``, if given.

    Raises:
        ConfigError: A rank found wrong input, which a restart cannot correct.
        RunFailed: The ranks of a host failed more often than they may.
    """
    losses = [fault for fault in faults if fault.kind == "lose_node"]
    ledger = events.Ledger(run_dir / events.LEDGER_NAME)
    with closing(ledger), hosts(settings.nodes, run_dir) as cluster:
        Agents(cluster, run_dir, follower, ledger, source).run(losses, settings.steps)


class Agents:
    """The agents of a run, one on each host of a cluster on which nothing runs yet.

    ``run_dir`` is the prepared directory of the run, which all hosts see. Events of the launcher
    are written to ``ledger``.
    """

    def __init__(
        self,
        cluster: Cluster,
        run_dir: Path,
        follower: Follower,
        ledger: events.Ledger,
        source: Standby | None,
    ) -> None:
        self._cluster, self._run_dir, self._source = cluster, run_dir, source
        self._follower, self._ledger = follower, ledger
        self._run_id = uuid.uuid4().hex
        self._store = cluster.call(self._serve)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._reserves: dict[int, subprocess.Popen[bytes]] = {}

    def _serve(self) -> TCPStore:
        limit = timedelta(seconds=config.timeout_s())
        with _silent_stderr():  # torch warns that the gateway has no host name
            return TCPStore(
                self._cluster.gateway, 0, is_master=True, wait_for_workers=False, timeout=limit
            )

    def run(self, losses: Sequence[Fault], steps: int) -> None:
        """Start an agent on every host, lose hosts at their steps, and wait for all agents.

        The replacement of the next host to be lost waits in reserve from the first step on. No host
        is lost after the last step, because ranks that have finished do not join a replacement
        again. The errors are those of ``launch_on_hosts``.
        """
        waiting = sorted(losses, key=lambda fault: fault.step)
        self._agents = {host.index: self._started(host) for host in self._cluster}
        while not self._finished():
            if waiting and waiting[0].step < steps and self._follower.steps_done:
                self._reserve(waiting[0])
            while waiting and waiting[0].step <= self._follower.steps_done < steps:
                self._lose(waiting.pop(0))
            time.sleep(POLL_S)
        for fault in waiting:
            self._record(fault, EventKind.FAULT_MISSED, f"host-{fault.host}")

    def _started(self, host: Host) -> subprocess.Popen[bytes]:
        prepare_ledger(host.run_dir)
        endpoint = f"{self._cluster.gateway}:{self._store.port}"
        arguments = [str(self._run_dir), endpoint, self._run_id, host.address]
        command = [sys.executable, "-u", "-m", AGENT, *arguments]
        log = host.run_dir / AGENT_LOG_NAME
        return host.run(command, env=ALONE, log=log, source=self._source)

    def _reserve(self, fault: Fault) -> Host:
        """Have the replacement of the host that a fault will lose wait in torchrun's rendezvous."""
        assert fault.host is not None
        host = self._cluster[fault.host]
        if fault.host not in self._reserves:
            self._reserves[fault.host] = self._started(host.reserve())
        return host

    def _lose(self, fault: Fault) -> None:
        host = self._reserve(fault)
        self._record(fault, EventKind.INJECTED, host.name)
        host.replace()
        self._agents[host.index] = self._reserves.pop(host.index)

    def _record(self, fault: Fault, kind: EventKind, where: str) -> None:
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
