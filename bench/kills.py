"""SIGKILLs at random moments: is every restored state bit-exact, and never older than the last
commit?

    python -m bench.kills [--kills 50]

Two ranks under torchrun train a GPT with a snapshot every step; this process kills one rank or
both at random moments, and torchrun starts them again. Every restart digests what it restored; the
digests are compared with those of an undisturbed run at the same step. What was committed is asked
of the SMP just before each kill.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from bench.rows import record
from holdfast import config, events
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.node.launch import smp_status, stop_smp
from holdfast_lab.trainer.gpt import GPT, GPTConfig, make_optimizer

MODEL = GPTConfig(layers=4, heads=4, width=512, context=64)
LONGEST_PAUSE_S = 0.1  # before and after the optimizer: kills must hit outside of the copy too
PERTURBATION = 1e-3


class Run:
    """A stand-in for training: each step changes every parameter and all optimizer state."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = GPT(MODEL)
        self.optimizer = make_optimizer(self.model, 1e-3, 0.1)
        self.rank = rank

    def step(self, number: int, before_optimizer: Any) -> None:
        """Gradients that depend on step and rank only, then the optimizer."""
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * PERTURBATION
        before_optimizer()
        self.optimizer.step()

    def digest(self) -> str:
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])


def worker(run_dir: Path) -> None:
    """One rank, until it is killed or told to stop by a file."""
    run = Run(config.rank())
    events.open_ledger(run_dir)
    with Snapshots(run.model, run.optimizer, run_dir=run_dir) as snapshots:
        restored = snapshots.restore()
        line = {"restored": restored, "digest": run.digest(), "time_s": time.time()}
        with (run_dir / f"restored-{run.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        step = restored or 0
        copying = os.open(run_dir / f"copying-{run.rank}", os.O_CREAT | os.O_WRONLY, 0o600)
        while not (run_dir / "stop").exists():
            run.step(step, snapshots.finish)
            step += 1
            time.sleep(random.uniform(0, LONGEST_PAUSE_S))
            os.pwrite(copying, b"1", 0)
            snapshots.begin(step)
            assert snapshots._copier.future is not None
            snapshots._copier.future.add_done_callback(lambda _: os.pwrite(copying, b"0", 0))
            time.sleep(random.uniform(0, LONGEST_PAUSE_S))
        snapshots.finish()
        os._exit(0)  # the ranks stop at different steps: no orderly end, and none is needed


def expected_digests(rank: int, steps: int) -> list[str]:
    """Digest after each step of a run that nothing disturbs."""
    run = Run(rank)
    digests = [run.digest()]
    for step in range(steps):
        run.step(step, lambda: None)
        digests.append(run.digest())
    return digests


class Killer(threading.Thread):
    """Kills ranks of a run at random moments and notes what the SMP held just before."""

    def __init__(self, run_dir: Path, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.kills = run_dir, kills
        self.random = random.Random(seed)
        self.log: list[dict[str, Any]] = []

    def run(self) -> None:
        """Kill, wait for the restart, and again."""
        with Progress() as progress:
            for _ in progress.track(range(self.kills), description="kills"):
                self._wait_until_running()
                time.sleep(self.random.uniform(0.2, 1.5))
                self._kill()
        self._wait_until_running()
        (self.run_dir / "stop").touch()

    def _pids(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"--worker" in words and str(self.run_dir).encode() in words:
                    found.append(int(entry.name))
        return found

    def _wait_until_running(self) -> None:
        lives = len(self.log) + 1
        deadline = time.monotonic() + 2 * config.timeout_s()
        files = [self.run_dir / f"restored-{rank}.jsonl" for rank in range(2)]
        while time.monotonic() < deadline:
            if all(f.exists() and len(f.read_text().splitlines()) >= lives for f in files):
                return
            time.sleep(0.02)
        os._exit(3)  # a restart that never comes is the failure this bench looks for

    def _kill(self) -> None:
        pids = self._pids()
        victims = pids if self.random.random() < 0.5 else [self.random.choice(pids)]
        status = smp_status(self.run_dir)
        flags = [self.run_dir / f"copying-{rank}" for rank in range(2)]
        in_mid_copy = any(flag.exists() and flag.read_bytes() == b"1" for flag in flags)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.log.append({"victims": len(victims), "in_mid_copy": in_mid_copy, "status": status})


def main() -> None:
    """Run, kill, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
    with tempfile.TemporaryDirectory() as folder:
        killer = launch(Path(folder), args.kills, args.seed)
        files = [Path(folder, f"restored-{rank}.jsonl") for rank in range(2)]
        restored = [[json.loads(line) for line in f.read_text().splitlines()] for f in files]
    judge(killer, restored)


def launch(run_dir: Path, kills: int, seed: int) -> Killer:
    """Train under torchrun until the killer has had its kills."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from holdfast.torchrun import quiet_torchrun

    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": "1"},
        max_restarts=kills + 3,
        monitor_interval=0.05,
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir / "logs"), redirects=Std.ALL),
    )
    killer = Killer(run_dir, kills, seed)
    killer.start()
    try:
        with quiet_torchrun():
            entry = elastic_launch(launch_config, sys.executable)
            entry("-m", "bench.kills", "--worker", str(run_dir))
    finally:
        stop_smp(run_dir)
    return killer


def judge(killer: Killer, restored: list[list[dict[str, Any]]]) -> None:
    """Compare every restore with the undisturbed run and with the last commit known before it."""
    steps = max(line["restored"] or 0 for lines in restored for line in lines)
    committed = [newest_commit(kill["status"]) for kill in killer.log]
    exact = older = nothing = 0
    for rank, lines in enumerate(restored):
        digests = expected_digests(rank, steps)
        for line, least in zip(lines[1:], committed, strict=True):
            exact += line["digest"] == digests[line["restored"] or 0]
            older += (line["restored"] or 0) < least
            nothing += line["restored"] is None
    restores = sum(len(lines) - 1 for lines in restored)
    record(
        "kills",
        {
            "kills": len(killer.log),
            "both_ranks": sum(kill["victims"] == 2 for kill in killer.log),
            "in_mid_copy": sum(kill["in_mid_copy"] for kill in killer.log),
            "restores": restores,
            "bit_exact": exact,
            "older_than_last_commit": older,
            "killed_before_the_first_commit": nothing,
            "state_bytes_per_rank": sum(p.numel() * 12 for p in Run(0).model.parameters()),
        },
    )
    raise SystemExit(not (exact == restores and older == 0))


def newest_commit(status: dict[str, Any] | None) -> int:
    """The newest step that all ranks hold clean, by the SMP's own account."""
    assert status is not None, "the SMP was gone"
    return int(status["newest"] or 0)


if __name__ == "__main__":
    main()
