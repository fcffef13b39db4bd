"""Does the simulator of plans foretell a real run? SIGKILLs at Poisson times, against the plan.

    python -m bench.plan_agreement [--seeds 1 2 3 4] [--seconds 150] [--mttf 20] [--every 80]

One rank under torchrun trains the trainer's GPT in a Guard with snapshots. First, undisturbed but
for three kills, it is measured what a step takes, what a snapshot adds and what a restart takes.
Then runs of fixed length, one for each seed, are killed at Poisson times, also while they restart.
What they lost (their length less their steps, at the measured time of a step) is compared with what
the simulator says from the measured costs: of many such runs (an interval), and of each of these,
with its very kills. The exit code is 1 if what all lost together is outside its interval.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.progress import Progress

from bench.rows import record
from holdfast import config, events
from holdfast.guard import Guard
from holdfast.planner.detection import Looks
from holdfast.planner.fleet import Devices, Faults, LadderCosts, LadderQuestion, Model
from holdfast.planner.ladder import Configuration, expected
from holdfast.planner.simulate import Life
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.node.launch import stop_smp
from holdfast.torchrun import quiet_torchrun
from holdfast_lab.trainer.data import ByteLoader, read_corpus
from holdfast_lab.trainer.gpt import GPT, GPTConfig, loss, make_optimizer

MODEL = GPTConfig(layers=4, heads=4, width=256, context=64)
BATCH = 8
ROUNDS = 3  # of the calibration: warm steps, then a kill
WARM_STEPS = 20
AFTER_SNAPSHOT = 2  # steps that a snapshot may lengthen: the one that begins it and the next
SIMULATED = 2000
LIMIT_S = 150.0
LOG_NAME = "log.jsonl"


def worker(run_dir: Path, every: int) -> None:
    """One rank, until it is killed or told to stop by a file."""
    if (run_dir / "stop").exists():
        os._exit(0)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(MODEL)
    optimizer = make_optimizer(model, 1e-3, 0.1)
    loader = ByteLoader(
        read_corpus(None), context=MODEL.context, batch_size=BATCH, seed=0, rank=0, world_size=1
    )
    snapshots = Snapshots(model, optimizer, loader=loader, run_dir=run_dir, every=every)

    def forward_backward(batch: Any) -> torch.Tensor:
        value = loss(model, *batch)
        torch.autograd.backward(value)
        return value.detach()

    events.open_ledger(run_dir)
    with (
        Guard(model, optimizer, snapshots=snapshots) as guard,
        (run_dir / LOG_NAME).open("a") as log,
    ):
        _say(log, started=guard.steps_done)
        for batch in guard.batches(loader, steps=10**9):
            guard.step(forward_backward, batch)
            _say(log, step=guard.steps_done)
            if (run_dir / "stop").exists():
                os._exit(0)  # at no particular step: there is no orderly end to reach


def _say(log: Any, **line: int) -> None:
    log.write(json.dumps(line | {"time_s": time.time()}) + "\n")
    log.flush()


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """What the ranks of all lives have said; a kill may have cut a line short."""
    path = run_dir / LOG_NAME
    found = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("}") and line.startswith("{")]


def kill(run_dir: Path) -> float | None:
    """SIGKILL the rank, wherever it is; when, or None if there is none right now."""
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and "--worker" in words and str(run_dir) in words:
            os.kill(process.pid, signal.SIGKILL)
            return time.time()
    return None


class Calibration:
    """Rounds of undisturbed steps, each ended by a kill; the last one's restart is awaited, too."""

    def __init__(self, run_dir: Path, every: int) -> None:
        self.run_dir, self.every = run_dir, every
        self.kills: list[float] = []

    def __call__(self) -> None:
        """Kill after enough steps, three times."""
        for life in range(ROUNDS + 1):
            wanted = WARM_STEPS + (2 * self.every if life < ROUNDS else 0)
            wait_for(lambda life=life, wanted=wanted: self._steps(life) >= wanted)  # type: ignore[misc]
            if life < ROUNDS:
                killed = kill(self.run_dir)
                assert killed is not None
                self.kills.append(killed)

    def _steps(self, life: int) -> int:
        found = list(lives(lines(self.run_dir)))
        return len(found[life]) - 1 if len(found) > life else 0

    def costs(self) -> dict[str, float]:
        """Seconds: a step, what a snapshot adds to its steps, a restart until the first step."""
        plain, saved, restarts = [], [], []
        for number, life in enumerate(lives(lines(self.run_dir))):
            took = [(b["step"], b["time_s"] - a["time_s"]) for a, b in pairwise(life[1:])]
            took = took[WARM_STEPS:]
            near = [step % self.every < AFTER_SNAPSHOT for step, _ in took]
            plain += [s for (_, s), snapped in zip(took, near, strict=True) if not snapped]
            saved += [s for (_, s), snapped in zip(took, near, strict=True) if snapped]
            if number:
                restarts.append(life[1]["time_s"] - self.kills[number - 1])
        step_s = statistics.mean(plain)
        stall_s = AFTER_SNAPSHOT * (statistics.mean(saved) - step_s)
        return {
            "step_s": step_s,
            "stall_s": max(0.0, stall_s),
            "restart_s": statistics.mean(restarts) - step_s,
        }


def lives(said: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The lines of each life, the first of which says where it started."""
    life: list[dict[str, Any]] = []
    for line in said:
        if "started" in line and life:
            yield life
            life = []
        life.append(line)
    if life:
        yield life


def wait_for(ready: Any) -> None:
    """Wait until it is so.

    Raises:
        TimeoutError: it never is.
    """
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"what was waited for did not happen within {LIMIT_S:g} s")
        time.sleep(0.02)


class Storm:
    """Poisson kills for so many seconds, from the first step on."""

    def __init__(self, run_dir: Path, seconds: float, mttf_s: float, seed: int) -> None:
        self.run_dir, self.seconds, self.mttf_s = run_dir, seconds, mttf_s
        self._draw = random.Random(seed)
        self.began_s = 0.0
        self.kills: list[float] = []
        self.missed = 0

    def __call__(self) -> None:
        """Wait for warm steps, then kill until the time is over."""
        wait_for(lambda: len(lines(self.run_dir)) > WARM_STEPS)
        self.began_s = lines(self.run_dir)[-1]["time_s"]
        at_s = self.began_s
        while True:
            at_s += self._draw.expovariate(1 / self.mttf_s)
            end_s = self.began_s + self.seconds
            time.sleep(max(0.0, min(at_s, end_s) - time.time()))
            if at_s >= end_s:
                return
            killed = kill(self.run_dir)
            if killed is None:
                self.missed += 1
            else:
                self.kills.append(killed - self.began_s)

    def steps(self) -> int:
        """Done and kept at the end of the time, from its beginning."""
        end_s = self.began_s + self.seconds
        said = lines(self.run_dir)
        first = [line for line in said if line["time_s"] <= self.began_s][-1]["step"]
        before = [line for line in said if line["time_s"] <= end_s]
        last = before[-1]
        return int(last.get("step", last.get("started"))) - int(first)


def run(run_dir: Path, every: int, meanwhile: Any) -> None:
    """Train under torchrun while something else goes on in a thread."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=1,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": "1"},
        max_restarts=1000,
        monitor_interval=0.05,
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir / "logs"), redirects=Std.ALL),
    )

    failed: list[TimeoutError] = []

    def disturb() -> None:
        try:
            meanwhile()
        except TimeoutError as error:
            failed.append(error)
        (run_dir / "stop").touch()
        if failed:
            kill(run_dir)  # wherever it hangs; started anew, it stops at once

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        with quiet_torchrun():
            entry = elastic_launch(launch_config, sys.executable)
            entry("-m", "bench.plan_agreement", "--every", str(every), "--worker", str(run_dir))
    finally:
        stop_smp(run_dir)
    thread.join(config.timeout_s())
    if failed:
        raise SystemExit(f"{run_dir.name}: {failed[0]}")


def question(costs: dict[str, float], mttf_s: float) -> LadderQuestion:
    """The fleet of one device that is killed so often, with the measured costs and no others."""
    none = Faults(inf)
    kinds = ("matmul", "outside", "faulty_device", "node_loss")
    return LadderQuestion(
        Devices(1),
        Model(costs["step_s"], state_bytes=sum(12 * p.numel() for p in GPT(MODEL).parameters())),
        faults={**dict.fromkeys(kinds, none), "crash": Faults(mttf_s / 86_400)},
        costs=LadderCosts(
            snapshot_stall_s=costs["stall_s"],
            snapshot_s=costs["step_s"],
            restart_s=costs["restart_s"],
            restore_s=0.0,
        ),
    )


def simulated(asked: LadderQuestion, every: int, seconds: float, seed: int) -> float:
    """Seconds lost in one simulated run."""
    found = Configuration(Looks(0, 0, 0), 0, every, every)
    month = Life(asked, found, seed, window_s=seconds).run()
    return month.lost_h * 3600


class Replayed(Life):
    """One run with kills at given times."""

    def __init__(
        self, asked: LadderQuestion, every: int, seconds: float, at_s: list[float]
    ) -> None:
        never = {kind: replace(faults, mttf_days=inf) for kind, faults in asked.faults.items()}
        found = Configuration(Looks(0, 0, 0), 0, every, every)
        super().__init__(replace(asked, faults=never), found, 0, window_s=seconds)
        self._trace = iter([*at_s, inf])
        self._due = [(next(self._trace), "crash")]

    def _pop(self) -> tuple[str, int]:
        self._due = [(next(self._trace), "crash")]
        return "crash", 0


def main() -> int:
    """Measure, disturb, foretell, compare, record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="of each disturbed run")
    parser.add_argument(
        "--mttf", type=float, default=20.0, help="seconds between kills, on average"
    )
    parser.add_argument("--every", type=int, default=80, help="steps between snapshots")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4], help="of the kills")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.every)
    storms = []
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        calm = Path(folder, "calm")
        calm.mkdir()
        runs = progress.add_task("calibrating", total=1 + len(args.seeds))
        calibration = Calibration(calm, args.every)
        run(calm, args.every, calibration)
        costs = calibration.costs()
        for seed in args.seeds:
            progress.update(runs, advance=1, description=f"kills of seed {seed}")
            wild = Path(folder, f"wild-{seed}")
            wild.mkdir()
            storms.append(Storm(wild, args.seconds, args.mttf, seed))
            run(wild, args.every, storms[-1])
        return judge(args, costs, storms)


def judge(args: argparse.Namespace, costs: dict[str, float], storms: list[Storm]) -> int:
    """Record what was lost beside what was foretold; 1 if the sum is outside of its interval."""
    asked = question(costs, args.mttf)
    foretold = [simulated(asked, args.every, args.seconds, seed) for seed in range(SIMULATED)]
    lost_s = [args.seconds - storm.steps() * costs["step_s"] for storm in storms]
    draw = random.Random(0)
    together = [sum(draw.choices(foretold, k=len(storms))) for _ in range(SIMULATED)]
    month = expected(asked, Configuration(Looks(0, 0, 0), 0, args.every, args.every))
    one, all_runs = middle(foretold), middle(together)
    inside = all_runs[0] <= sum(lost_s) <= all_runs[1]
    replayed_s = [
        Replayed(asked, args.every, args.seconds, storm.kills).run().lost_h * 3600
        for storm in storms
    ]
    record(
        "plan_agreement",
        {
            "seconds": args.seconds,
            "mttf_s": args.mttf,
            "every": args.every,
            "seeds": args.seeds,
            "kills": [len(storm.kills) for storm in storms],
            "kills_that_found_no_process": [storm.missed for storm in storms],
            **{f"measured_{name}": round(value, 4) for name, value in costs.items()},
            "steps_kept": [storm.steps() for storm in storms],
            "lost_s": [round(lost, 2) for lost in lost_s],
            "simulated_with_these_kills_s": [round(lost, 2) for lost in replayed_s],
            "simulated_lost_s": round(statistics.mean(foretold), 2),
            "simulated_lost_s_95": one,
            "runs_in_interval": sum(one[0] <= lost <= one[1] for lost in lost_s),
            "expected_lost_s": round(month.lost_h / 730 * args.seconds, 2),
            "all_lost_s": round(sum(lost_s), 2),
            "all_simulated_lost_s_95": all_runs,
            "in_interval": inside,
        },
    )
    return int(not inside)


def middle(values: list[float]) -> tuple[float, float]:
    """Between which 95 % of them are."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.025, 0.975))
    return round(low, 2), round(high, 2)


if __name__ == "__main__":
    sys.exit(main())
