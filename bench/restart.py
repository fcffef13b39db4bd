"""From the death of a rank or a host to the first new step, stage by stage.

    python -m bench.restart [--times 5] [--nodes 3] [--ways standby,none,stock]

Emulated hosts (``holdfast_lab.trainer.hosts``) each run ``holdfast run`` with one rank that trains
a small model with DDP and a snapshot every step; one more host waits in reserve, as torchrun allows
with more agents than ``--nnodes``. A rank is killed, or a host with all its processes, whose place
the reserve takes; then the next one. The step of the restore must not be older than the last that
was committed everywhere, less the one that was under way.

Stages, in seconds after the kill, each that of the last rank or agent to reach it: noticed (an
agent stops its ranks), ended (they are gone), formed (all agents start ranks), started (the rank's
program begins), imported, group (``init_process_group``), wrapped (DDP and ``Snapshots``),
restored, and step (the first new one); lower quartile, median, upper quartile. ``--ways``: with the
standby process; ``none``, without; and ``stock``, without and with torchrun's own rendezvous.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from bench.rows import record
from holdfast.launch.client import READY
from holdfast.torchrun import OWN_STORE_VARIABLE
from holdfast_lab.trainer.hosts import Cluster, Host, hosts

LIMIT_S = 120.0
PACE_S = 0.05
RESERVE_S = 10.0  # a reserve without a standby process needs so long until it waits
AGENT_STAGES = {
    "Stopping worker group": "noticed",
    "Rendezvous'ing worker group": "ended",
    "Starting worker group": "formed",
}
STAGES = ("noticed", "ended", "formed", "started", "imported", "group", "wrapped", "restored")
WAYS = {
    "standby": [],
    "none": ["--no-standby"],
    # With five heartbeats of one second, as the demo had it; torchrun's default is three of 5 s.
    "stock": ["--no-standby", "--rdzv-backend", "c10d"],
}
LOGGED = re.compile(r"\[?[IWE](\d{4} \d\d:\d\d:\d\d\.\d{6})\d* .*\] (.*)")


class Run:
    """Agents on all hosts of a cluster, one of which is the reserve."""

    def __init__(self, cluster: Cluster, folder: Path, way: str) -> None:
        self.cluster, self.folder, self.way = cluster, folder, way
        self.store = cluster.call(
            lambda: TCPStore(
                cluster.gateway, 0, is_master=True, wait_for_workers=False,
                timeout=timedelta(seconds=LIMIT_S),
            )
        )  # fmt: skip

    def start(self, host: Host) -> None:
        """Start an agent."""
        nodes = len(self.cluster) - 1
        command = [sys.executable, "-m", "holdfast", "run", *WAYS[self.way]]
        command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "restart"]
        conf = "is_host=0,join_timeout=120"
        if self.way == "stock":
            conf += ",keep_alive_interval=1,keep_alive_max_attempt=5"
        command += ["--rdzv-endpoint", f"{self.cluster.gateway}:{self.store.port}"]
        command += ["--rdzv-conf", conf, "--local-addr", host.address, "--max-restarts", "1000"]
        command += [str(Path(__file__).with_name("restart_rank.py")), str(self.folder), str(PACE_S)]
        env = {"LOGLEVEL": "INFO", "OMP_NUM_THREADS": "1", "HOLDFAST_RUN_ID": "restart"}
        env["TMPDIR"] = str(host.run_dir)  # where a lost host leaves the folder of its socket
        if self.way == "stock":
            env[OWN_STORE_VARIABLE] = "0"
        host.run(command, env=env, log=self.folder / f"{host.name}.log")

    def lines(self) -> list[dict[str, Any]]:
        """Return all that ranks have noted."""
        texts = [path.read_text() for path in self.folder.glob("rank-*.jsonl")]
        return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]

    def until_stepping(self, after_s: float) -> list[dict[str, Any]]:
        """Wait until new ranks have each taken five steps; return their lines."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            lines = [line for line in self.lines() if line["time_s"] > after_s]
            new = {life(line) for line in lines if line["stage"] == "started"}
            lines = [line for line in lines if life(line) in new]
            steps = [line["rank"] for line in lines if line["stage"] == "step"]
            if all(steps.count(rank) >= 5 for rank in range(len(self.cluster) - 1)):
                return lines
            time.sleep(0.1)
        raise SystemExit(f"no steps after {LIMIT_S:.0f} s: see {self.folder}")

    def until_waiting(self, reserve: Host) -> None:
        """Wait until a reserve has joined, and its standby process has imported everything."""
        log = self.folder / f"{reserve.name}.log"
        while "Rendezvous'ing" not in log.read_text():
            time.sleep(0.1)
        sockets = list(reserve.run_dir.glob("holdfast-standby-*/standby.sock"))
        for path in sockets:
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(str(path))
                assert asking.recv(1) == READY
        time.sleep(0.5 if sockets else RESERVE_S)

    def agents(self, after_s: float) -> dict[str, float]:
        """Return when the last agent reached each of its stages after a moment."""
        found: dict[str, float] = {}
        for path in self.folder.glob("host-*.log"):
            for line in path.read_text(errors="replace").splitlines():
                matched = LOGGED.match(line)
                if matched is None:
                    continue
                moment = datetime.strptime(matched[1], "%m%d %H:%M:%S.%f")
                time_s = moment.replace(year=datetime.now().year).timestamp()
                for text, stage in AGENT_STAGES.items():
                    if matched[2].endswith(text) and time_s > after_s:
                        found[stage] = max(time_s, found.get(stage, 0.0))
        return found

    def kill(self, what: str, turn: int) -> float:
        """Kill a rank or a host; return when."""
        newest = {line["host"]: line for line in self.lines()}
        last = max(line["time_s"] for line in newest.values())
        training = sorted(h for h, line in newest.items() if line["time_s"] > last - 1)
        name = training[turn % len(training)]
        host = next(host for host in self.cluster if host.name == name)
        if what == "host":
            killed_s = time.time()
            host.kill()
            self.lost = host
            return killed_s
        (self.folder / f"kill-{name}").touch()
        while (self.folder / f"kill-{name}").exists():
            time.sleep(0.01)
        return max(line["time_s"] for line in self.lines() if line["stage"] == "killed")

    def measure(self, what: str, turn: int) -> dict[str, float]:
        """Kill a rank or a host; return seconds by stage."""
        time.sleep(0.5)
        newest = max(line["step"] for line in self.lines())
        killed_s = self.kill(what, turn)
        lines = self.until_stepping(killed_s)
        stages = self.agents(killed_s)
        first: dict[Any, float] = {}
        for line in lines:
            first.setdefault((line["stage"], life(line)), line["time_s"])
        for (stage, _), time_s in first.items():
            stages[stage] = max(time_s, stages.get(stage, 0.0))
        restored = {line["step"] for line in lines if line["stage"] == "restored"}
        assert len(restored) == 1, restored
        assert min(restored) >= newest - 2, (restored, newest)
        if what == "host":
            reserve = self.lost.replace()
            self.start(reserve)
            self.until_waiting(reserve)
        return {stage: time_s - killed_s for stage, time_s in stages.items()}


def life(line: dict[str, Any]) -> tuple[str, int]:
    """Return the host and process of a line."""
    return line["host"], line["pid"]


def measure(way: str, nodes: int, times: int) -> None:
    """Kill ranks and hosts of one run; record a row for each kind."""
    with tempfile.TemporaryDirectory() as folder, hosts(nodes + 1, Path(folder)) as cluster:
        run = Run(cluster, Path(folder), way)
        for host in cluster:
            run.start(host)
        run.until_stepping(0.0)
        for host in cluster:
            run.until_waiting(host)
        for what in ("rank", "host"):
            found = [run.measure(what, turn) for turn in range(times)]
            row: dict[str, Any] = {"way": way, "killed": what, "nodes": nodes, "times": times}
            for stage in (*STAGES, "step"):
                low, middle, high = statistics.quantiles([f[stage] for f in found], n=4)
                row[f"{stage}_s"] = [round(value, 3) for value in (low, middle, high)]
            record("restart", row | {"load_average": os.getloadavg()[0]})


def steady(nodes: int, steps: int) -> None:
    """Train undisturbed beside processes that keep all cores busy; count needless restarts.

    A host whose heartbeats are missed would be replaced by the reserve, with new ranks everywhere.
    """
    spinning = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spinning) for _ in os.sched_getaffinity(0)]
    try:
        with tempfile.TemporaryDirectory() as folder, hosts(nodes + 1, Path(folder)) as cluster:
            run = Run(cluster, Path(folder), "standby")
            for host in cluster:
                run.start(host)
            run.until_stepping(0.0)
            started_s, loads = time.time(), []
            while (newest := max(line["step"] for line in run.lines())) < steps:
                loads.append(os.getloadavg()[0])
                time.sleep(5.0)
            lives = {life(line) for line in run.lines()}
            row = {"way": "standby", "killed": "nothing", "nodes": nodes, "steps": newest}
            row |= {"needless_restarts": len(lives) - nodes, "seconds": time.time() - started_s}
            record("restart", row | {"load_average": statistics.median(loads)})
    finally:
        for process in busy:
            process.kill()


def main() -> None:
    """Measure every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="kills of each kind and way")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    text = "only train so many steps beside busy processes, and count needless restarts"
    parser.add_argument("--steady", metavar="STEPS", type=int, help=text)
    args = parser.parse_args()
    if args.steady:
        steady(args.nodes, args.steady)
        return
    for way in args.ways.split(","):
        measure(way, args.nodes, args.times)


if __name__ == "__main__":
    main()
