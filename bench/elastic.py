"""Runs that go on with other nodes and ranks, from memory: is every state the one before, bit for
bit, and never older than the last commit?

    python -m bench.elastic [--changes 12] [--seed 0]

Runs of 2 to 4 nodes (data parallel or FSDP2, a snapshot every step, one parity) are killed at a
random moment and go on with another number of nodes: one node is lost with its SMP, or one or two
empty ones come. Runs of one node go on with another number of ranks. ``--changes`` are made of each
of the four kinds of run.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn

from bench import nodes_rank
from bench.nodes import Cluster
from bench.nodes_rank import Work
from bench.rows import record

WIDTH, PACE_S = 96, 0.02
FEWEST, MOST = 2, 4


class Sharded(nodes_rank.Replica):
    """A model divided by FSDP2 over all ranks."""

    def __init__(self, width: int, rank: int) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
        fully_shard(self.model)
        self.ddp = self.model  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        torch.manual_seed(rank + 1)


class Moving(Cluster):
    """A run whose next life may have other nodes, or other ranks on its only node."""

    def __init__(self, work: Work, nodes: int, local: int = 1) -> None:
        super().__init__(work, nodes, local)
        self.places, self.seen = list(range(nodes)), nodes

    def run_dir(self, node: int) -> Path:
        """Where the node's SMP is; a node keeps its own when its number changes."""
        return self.directory / f"node-{self.places[node]}"

    def change(self, lost: int, added: int, local: int | None = None) -> None:
        """End all ranks, lose the last nodes with their SMPs, and add empty ones."""
        smps = [self.smp(node) for node in range(self.nodes - lost, self.nodes)]
        self.kill_trainers()
        for smp in smps:
            smp.kill()
        self.places = self.places[: self.nodes - lost] + [self.seen + n for n in range(added)]
        self.seen += added
        self.nodes, self.local = len(self.places), local or self.local
        self.replaced = [0] * self.nodes


def _run(
    make: Callable[[int, int], Any], work: Work, attempt: int, place: dict[str, str], log: Path
) -> None:
    nodes_rank.run(work, attempt, place, log, partial(Telling, make))


class Telling:
    """A model of which a rank also says the digest of the whole, by the step of its schedule."""

    def __init__(self, make: Callable[[int, int], Any], width: int, rank: int) -> None:
        self.inner = make(width, rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def digest(self) -> str:
        """The rank's own state, and the whole."""
        return f"{self.inner.digest()} {self.inner.weights()}"


KINDS: dict[str, Callable[[int, int], Any]] = {"ddp": nodes_rank.Replica, "fsdp2": Sharded}


def changes(folder: Path, kind: str, several: bool, count: int, seed: int) -> list[dict[str, Any]]:
    """So many changes of one run; for each what every rank restored."""
    draw = random.Random(f"{kind}/{several}/{seed}")
    work = Work(folder / f"{kind}-{several}", 10**9, int(several), WIDTH, PACE_S)
    run = Moving(work, 3, 1) if several else Moving(work, 1, 3)
    start, found = partial(_run, KINDS[kind]), []
    try:
        with Progress() as progress:
            run.start(start)
            for _ in progress.track(range(count), description=f"{kind}, several={several}"):
                found.append(_change(run, draw, several, start))
    finally:
        run.close()
    return found


def _change(
    run: Moving, draw: random.Random, several: bool, start: Callable[..., None]
) -> dict[str, Any]:
    run.until(lambda: run.said(0), "no start")
    run.until_committed((run.said(0)[0]["restored"] or 0) + 3)
    time.sleep(draw.uniform(0, 0.3))
    before, ranks = run.attempt, run.world
    goal = draw.choice([n for n in range(FEWEST, MOST + 1) if n != ranks])
    # One parity makes up for one node.
    goal = max(goal, ranks - 1) if several else goal
    committed = run.committed()
    if several:
        run.change(max(0, ranks - goal), max(0, goal - ranks))
    else:
        run.change(0, 0, goal)
    killed_s = time.monotonic()
    run.start(start)
    run.until(lambda: all(run.said(rank) for rank in range(run.world)), "no restore")
    seconds = time.monotonic() - killed_s
    restored = [run.said(rank)[0] for rank in range(run.world)]
    told = [_told(run.said(rank, before)) for rank in range(min(ranks, run.world))]
    return _judged(restored, told, committed) | {"from": ranks, "to": goal, "seconds": seconds}


def _told(said: list[dict[str, Any]]) -> dict[int, str]:
    """What a rank said of its state at each step, and at the one that it had restored."""
    return {
        line.get("step", line.get("restored")): line["digest"] for line in said if "digest" in line
    }


def _judged(
    restored: list[dict[str, Any]], told: list[dict[int, str]], committed: int
) -> dict[str, Any]:
    steps = {said["restored"] for said in restored}
    step = steps.pop() if len(steps) == 1 else None
    if step is None:
        return {"exact": False, "older": True}
    # What is divided changes with the ranks; what is whole must not.
    wholes = {said["digest"].split()[1] for said in restored}
    known = {each[step].split()[1] for each in told if step in each}
    return {"exact": bool(known) and wholes == known, "older": step < committed}


def main() -> None:
    """Change, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=12, help="of each kind of run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            for several in (True, False):
                found = changes(Path(folder), kind, several, args.changes, args.seed)
                exact, older = (sum(each[name] for each in found) for name in ("exact", "older"))
                row = {
                    "kind": kind,
                    "nodes": "several" if several else "one",
                    "changes": len(found),
                    "exact": exact,
                    "older_than_commit": older,
                    "moves": [f"{each['from']}>{each['to']}" for each in found],
                    "restart_s": statistics.median(each["seconds"] for each in found),
                    "seed": args.seed,
                }
                record("elastic", row)
                failed |= exact != len(found) or older > 0
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
