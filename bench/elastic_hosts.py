"""``holdfast run --nnodes 2:4``: hosts go and come; does the run see every sample once?

    python -m bench.elastic_hosts

Three launchers on this machine, each with a run directory of its own, stand for three hosts of one
rank. One is killed whole, launcher, rank and snapshot process; the two that are left go on from
memory; then an empty one joins, and three go on. Every rank notes the samples of each step.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench.elastic_script import GLOBAL_BATCH
from bench.rows import record
from holdfast.snapshot.node import launch

ROOT = Path(__file__).parents[1]
STEPS, PATIENCE_S = 400, 100.0


class Hosts:
    """One launcher with one rank each, which all run ``elastic_script``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launchers = folder, list[subprocess.Popen[bytes]]()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]

    def add(self) -> None:
        """Start another host."""
        number = len(self.launchers)
        words = [
            "--nnodes",
            "2:4",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "5",
            "--rdzv-conf",
            "last_call_timeout=2",
        ]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}"]
        script = [str(Path(__file__).parent / "elastic_script.py"), str(self.folder)]
        script += [str(STEPS), "0.25"]
        own = {"HOLDFAST_RUN_DIR": str(self.run_dir(number)), "HOLDFAST_TIMEOUT_S": "30"}
        env = {**os.environ, **own, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / f"host-{number}.log").open("wb") as log:
            self.launchers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "holdfast.cli.main", "run", *words, *script],
                    env=env | {"OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=log,
                )
            )

    def run_dir(self, number: int) -> Path:
        """The run directory of a host."""
        return self.folder / f"run-{number}"

    def is_up(self) -> bool:
        """Return whether the first host serves the store, which must not move to another one."""
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self._port)) == 0

    def lose(self, number: int) -> None:
        """Kill a host whole: launcher, ranks and SMP."""
        status = launch.smp_status(self.run_dir(number))
        launcher = psutil.Process(self.launchers[number].pid)
        doomed = [*launcher.children(recursive=True), launcher]
        doomed += [psutil.Process(status["pid"])] if status else []
        for process in doomed:
            process.kill()
        self.launchers[number].wait()

    def seen(self) -> list[dict[str, Any]]:
        """What all ranks have seen so far; what was begun again counts as it was last."""
        lines = [
            json.loads(line)
            for path in self.folder.glob("seen-*.jsonl")
            for line in path.read_text().rpartition("\n")[0].splitlines()
        ]
        last = {line["step"]: line["life"] for line in sorted(lines, key=lambda each: each["at"])}
        return [line for line in lines if line["life"] == last[line["step"]]]

    def until(self, condition: Callable[[list[dict[str, Any]]], bool], what: str) -> None:
        """Wait until something holds of what was seen.

        Raises:
            AssertionError: it took too long.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.seen()):
            logs = [path.read_text()[-2000:] for path in self.folder.glob("host-*.log")]
            assert time.monotonic() < deadline, (what, logs)
            time.sleep(0.2)

    def close(self) -> None:
        """Leave nothing behind."""
        for number, launcher in enumerate(self.launchers):
            if launcher.poll() is None:
                self.lose(number)
            launch.stop_smp(self.run_dir(number))


def changed(hosts: Hosts) -> None:
    """Start three hosts, lose one, and add another one."""
    hosts.add()
    hosts.until(lambda _: hosts.is_up(), "the store")
    hosts.add()
    hosts.add()
    hosts.until(lambda seen: _lines(seen, 3) >= 15, "three hosts")
    hosts.lose(2)
    hosts.until(lambda seen: _lines(seen, 2) >= 10, "two hosts")
    hosts.add()
    hosts.until(lambda seen: _lines(seen, 3) >= 45, "three again")


def _lines(seen: list[dict[str, Any]], ranks: int) -> int:
    return sum(line["ranks"] == ranks for line in seen)


def judged(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the samples of the steps that all ranks did."""
    ordered = sorted(seen, key=lambda line: float(line["at"]))
    lives = list(dict.fromkeys((line["life"], line["ranks"]) for line in ordered))
    done = max(line["step"] for line in seen) - 1
    samples = [sample for line in seen if line["step"] <= done for sample in line["samples"]]
    return {
        "hosts": [ranks for _, ranks in lives],
        "steps": done,
        "samples_due": GLOBAL_BATCH * done,
        "samples_seen": len(samples),
        "samples_different": len(set(samples)),
    }


def main() -> None:
    """Change the hosts, count, record."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        try:
            changed(hosts)
        finally:
            hosts.close()
        row = judged(hosts.seen())
    record("elastic_hosts", row)
    counts = {row[f"samples_{name}"] for name in ("due", "seen", "different")}
    raise SystemExit(len(counts) > 1 or row["hosts"][-3:] != [3, 2, 3])


if __name__ == "__main__":
    main()
