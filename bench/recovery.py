"""From a host's death to the first new step: how long, and what of it is spent on what?

    python -m bench.recovery [--losses 10] [--ways memory disk] [--width 256] [--plot FILE]

``holdfast train --nodes 3`` with a snapshot every step and a checkpoint every tenth loses hosts
whole: trainer, torchrun's agent and SMP. *memory*: one host at a time, which the parities make up
for. *disk*: two at a time, more than they do, so that the newest checkpoint is loaded and the steps
since are computed again. Both runs must end with the weights of an undisturbed one.

- *detection*: until the last rank of the surviving hosts has ended;
- *rendezvous*: until the ranks of all hosts have been started again, the replacement's too;
- *start*: Python, torch, the process group and the model, until the state is asked for;
- *find*: until it is in the rank's own memory: agreeing, reading, and *transfer* and *decode*
  (``rebuild``, a part of it) from the other nodes;
- *load*: into model, optimizer and loader;
- *again*: steps that had been done before, until the first that had not; the snapshot of the
  restored step is committed meanwhile.

Hosts share this machine and its loopback: there is no network to wait for.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.progress import Progress

from bench.rows import record
from holdfast import events
from holdfast.cli.plots import check_drawable, save
from holdfast.report.run_files import METRICS_NAME

PHASES = ("detection", "rendezvous", "start", "find", "load", "again")
WAYS = {"memory": 1, "disk": 2}
PERSIST_EVERY = 10
FIRST_LOSS, BETWEEN = 13, 14
POLL_S = 0.02
LIMIT_S = 1200.0
AT_ONCE_S = 2.0
WORKER = "holdfast_lab.trainer.worker"


@dataclass
class Rank:
    """A process of a rank: when it began, and when it was last seen."""

    began_s: float
    seen_s: float


def watch(
    process: "subprocess.Popen[str]", run_dir: Path, steps: int, progress: Progress
) -> list[Rank]:
    """Every rank's process of a run of so many steps, from its start to its end.

    Raises:
        SystemExit: it takes too long.
    """
    found: dict[int, Rank] = {}
    task = progress.add_task(run_dir.name, total=steps)
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None:
        done = steps_done(run_dir)
        if time.monotonic() > deadline:
            raise SystemExit(f"{run_dir.name}: at step {done} of {steps} after {LIMIT_S:g} s")
        now = time.time()
        for other in psutil.process_iter(["cmdline", "create_time", "status"]):
            words = other.info["cmdline"] or []
            if WORKER in words and str(run_dir) in words:
                began_s = other.info["create_time"]
                found.setdefault(other.pid, Rank(began_s, now)).seen_s = now
        progress.update(task, completed=done)
        time.sleep(POLL_S)
    return list(found.values())


def steps_done(run_dir: Path) -> int:
    """The step that a run reported last; 0 before the first."""
    try:
        lines = (run_dir / METRICS_NAME).read_text().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, IndexError):
        return 0


def schedule(path: Path, hosts: Sequence[Sequence[int]]) -> int:
    """Write when which hosts are lost; the steps that the run needs."""
    lines = []
    for number, lost in enumerate(hosts):
        step = FIRST_LOSS + number * BETWEEN
        lines += [f'[[fault]]\nstep = {step}\nkind = "lose_node"\nhost = {host}\n' for host in lost]
    path.write_text("\n".join(lines))
    return FIRST_LOSS + len(hosts) * BETWEEN


def train(
    folder: Path, name: str, args: argparse.Namespace, hosts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """A run that loses these hosts; its digests, and every loss by phase."""
    steps = schedule(folder / f"{name}.toml", hosts)
    command = [str(Path(sys.executable).with_name("holdfast")), "train"]
    command += ["--run-dir", str(folder / name), "--nodes", str(args.nodes)]
    steps = steps if hosts else FIRST_LOSS + args.losses * BETWEEN
    command += ["--steps", str(steps)]
    command += ["--width", str(args.width), "--persist-every", str(PERSIST_EVERY)]
    command += ["--json", str(folder / f"{name}.json")]
    command += ["--schedule", str(folder / f"{name}.toml")] if hosts else []
    with Progress(transient=True) as progress:
        with open(folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        try:
            ranks = watch(process, folder / name, steps, progress)
        finally:
            process.terminate()
            process.wait(60)
    if process.returncode:
        raise SystemExit((folder / f"{name}.log").read_text()[-3000:])
    said = json.loads((folder / f"{name}.json").read_text())
    return {"digests": said["digests"], "losses": _losses(folder / name, ranks)}


def _losses(run_dir: Path, ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    happened = [event for _, event in events.read_ledger(run_dir / events.LEDGER_NAME)]
    deaths = sorted(event.time_s for event in happened if event.kind == "injected")
    # Of hosts lost at once the last one counts.
    deaths = [t for t, after in _followed(deaths) if after - t > AT_ONCE_S]
    lines = [json.loads(line) for line in (run_dir / METRICS_NAME).read_text().splitlines()]
    return [_phases(death, end, happened, lines, ranks) for death, end in _followed(deaths)]


def _followed(times: Sequence[float]) -> list[tuple[float, float]]:
    """Each time, and the one after it."""
    return list(zip(times, [*times, float("inf")][1:], strict=True))


def _phases(
    death: float,
    end: float,
    happened: Sequence[events.Event],
    lines: Sequence[dict[str, Any]],
    ranks: Sequence[Rank],
) -> dict[str, Any]:
    restored = [e for e in happened if e.kind == "restored" and death < e.time_s < end]
    rebuilt = [e for e in happened if e.kind == "snapshot_rebuilt" and death < e.time_s < end]
    done = max((line["step"] for line in lines if line["time_s"] <= death), default=0)
    first = min(
        line["time_s"] for line in lines if line["step"] > done and death < line["time_s"] < end
    )
    again = [line for line in lines if line["step"] <= done and death < line["time_s"] < first]
    stopped = max(rank.seen_s for rank in ranks if rank.began_s < death)
    started = max(rank.began_s for rank in ranks if death < rank.began_s < first)
    asked = min(event.time_s - event.duration_s for event in restored)
    held = max(event.time_s for event in restored)
    load_s = max(event.detail["load_s"] for event in restored)
    return {
        "total": first - death,
        "detection": max(0.0, stopped - death),
        "rendezvous": started - max(stopped, death),
        "start": asked - started,
        "find": held - asked - load_s,
        "load": load_s,
        "again": first - held,
        "rebuild": max((event.duration_s for event in rebuilt), default=0.0),
        "rebuilt_bytes": sum(event.detail["bytes"] for event in rebuilt),
        "steps_again": len(again),
        "sources": sorted({event.detail["source"] for event in restored}),
    }


def plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Where the time goes, a bar for each way."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 3), layout="constrained")
    axes = drawn.subplots()
    left = [0.0] * len(rows)
    names = [f"{row['way']} ({row['losses']} losses)" for row in rows]
    for phase in PHASES:
        seconds = [row[f"{phase}_s"] for row in rows]
        axes.barh(names, seconds, left=left, label=phase)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.set_xlabel("seconds from the death of a host to the first new step (medians)")
    axes.legend(ncols=3)
    save(drawn, path)


def main() -> int:
    """Lose, measure, compare, record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--losses", type=int, default=10, help="each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--nodes", type=int, default=3, help="hosts of one rank each")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.plot:
        check_drawable(args.plot)
    draw, rows, failed = random.Random(args.seed), [], False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calm = train(folder, "calm", args, [])
        for way in args.ways:
            lost = WAYS[way]
            hosts = [draw.sample(range(args.nodes), lost) for _ in range(args.losses)]
            found = train(folder, way, args, hosts)
            rows.append(_row(way, lost, args, found, calm))
            failed |= not rows[-1]["equal"] or rows[-1]["sources"] != [way]
            record("recovery", rows[-1])
    if args.plot:
        plot(args.plot, rows)
    return int(failed)


def _row(
    way: str, lost: int, args: argparse.Namespace, found: dict[str, Any], calm: dict[str, Any]
) -> dict[str, Any]:
    losses = found["losses"]
    medians = {
        f"{name}_s": round(statistics.median(loss[name] for loss in losses), 3)
        for name in ("total", *PHASES, "rebuild")
    }
    totals = sorted(loss["total"] for loss in losses)
    return {
        "way": way,
        "nodes": args.nodes,
        "lost_at_once": lost,
        "losses": len(losses),
        "width": args.width,
        "equal": found["digests"] == calm["digests"],
        "sources": sorted({source for loss in losses for source in loss["sources"]}),
        **medians,
        "total_s_range": [round(totals[0], 3), round(totals[-1], 3)],
        "steps_again": statistics.median(loss["steps_again"] for loss in losses),
        "rebuilt_bytes": statistics.median(loss["rebuilt_bytes"] for loss in losses),
    }


if __name__ == "__main__":
    sys.exit(main())
