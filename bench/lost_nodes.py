"""Nodes lost whole at random moments: is every rebuilt state bit-exact, and never older than the
last commit?

    python -m bench.lost_nodes [--losses 208] [--across 40] [--double 20] [--seed 0]

Runs of 2 to 9 nodes (one rank each, data parallel, a snapshot every step) in parity groups of at
most 3 and 4 nodes lose a random node, ranks and SMP together, again and again. Runs of 6 to 9 nodes
lose two nodes of different groups at once, and runs of 3 and 4 nodes with a second parity any two.
Empty nodes take their place. Every restart digests what it restored, on every rank; the digests are
compared with those of an undisturbed run at the same step.
"""

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.nodes import Cluster
from bench.nodes_rank import Work
from bench.rows import record
from holdfast.snapshot.node import launch

WIDTH = 512
PACE_S = 0.02
LONGEST_PAUSE_S = 0.5
ENDLESS = 10**9
GROUPS = (3, 4)
SINGLE, ACROSS, DOUBLE = range(2, 10), range(6, 10), (3, 4)


@dataclass(frozen=True)
class Plan:
    """What one run loses: ``lost`` nodes at once, of one group or each of another one."""

    nodes: int
    group_nodes: int
    parities: int
    lost: int
    losses: int


def plans(single: int, across: int, double: int) -> list[Plan]:
    """Divide the numbers of losses evenly among the runs."""
    found = [(nodes, group, 1, 1, single, SINGLE) for nodes in SINGLE for group in GROUPS]
    found += [(nodes, group, 1, 2, across, ACROSS) for nodes in ACROSS for group in GROUPS]
    found += [(nodes, 4, 2, 2, 2 * double, DOUBLE) for nodes in DOUBLE]
    made = [Plan(*what, total // (2 * len(among))) for *what, total, among in found]
    return [plan for plan in made if plan.losses]


def lose_nodes(folder: Path, plan: Plan, seed: int) -> list[Any]:
    """Lose nodes as planned; return for each loss what every rank restored."""
    draw = random.Random(f"{plan}/{seed}")
    name = f"{plan.nodes}-{plan.group_nodes}-{plan.parities}-{plan.lost}"
    work = Work(folder / name, ENDLESS, plan.parities, WIDTH, PACE_S, group_nodes=plan.group_nodes)
    cluster = Cluster(work, plan.nodes)
    found = []
    try:
        with Progress() as progress:
            cluster.start()
            for _ in progress.track(range(plan.losses), description=str(plan)):
                found.append(_lose(cluster, plan, draw))
        cluster.kill_trainers()
        _check(cluster, found)
    finally:
        cluster.close()
    return found


def _lose(cluster: Cluster, plan: Plan, draw: random.Random) -> dict[str, Any]:
    start = max((line["step"] for line in cluster.said(0) if "step" in line), default=0)
    cluster.until_committed(start + 2)
    time.sleep(draw.uniform(0, LONGEST_PAUSE_S))
    lost = _drawn(cluster, plan, draw)
    cluster.lose(lost)
    committed, killed_s = cluster.committed(), time.monotonic()
    cluster.start()
    ranks = range(cluster.world)
    cluster.until(lambda: all(cluster.said(rank) for rank in ranks), "no restore")
    seconds = time.monotonic() - killed_s
    restored = [cluster.said(rank)[0] for rank in ranks]
    return {"lost": lost, "committed": committed, "restored": restored, "seconds": seconds}


def _drawn(cluster: Cluster, plan: Plan, draw: random.Random) -> list[int]:
    nodes = range(cluster.nodes)
    if plan.lost == plan.parities:
        return sorted(draw.sample(nodes, plan.lost))
    first = draw.randrange(cluster.nodes)
    status = launch.smp_status(cluster.run_dir(first))
    assert status is not None, f"node {first} has no SMP"
    others = sorted(set(nodes).difference(status["cluster"]["group"]))
    return sorted([first, draw.choice(others)])


def _check(cluster: Cluster, found: list[dict[str, Any]]) -> None:
    """Note for every loss whether each rank's state is that of an undisturbed run."""
    newest = max(rank["restored"] or 0 for loss in found for rank in loss["restored"])
    work = Work(cluster.directory / "calm", newest, 0, WIDTH)
    calm = Cluster(work, 1, cluster.world)
    try:
        calm.start()
        calm.finish()
    finally:
        calm.close()
    digests = [calm.digests(rank) for rank in range(cluster.world)]
    for loss in found:
        pairs = zip(loss["restored"], digests, strict=True)
        loss["exact"] = all(said["digest"] == known.get(said["restored"]) for said, known in pairs)
        steps = {said["restored"] for said in loss["restored"]}
        loss["older"] = (
            len(steps) != 1 or (min(steps, key=lambda s: s or -1) or -1) < loss["committed"]
        )
        loss["differed"] = all(said["before"] != said["digest"] for said in loss["restored"])


def main() -> None:
    """Lose, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=208, help="of one node, over 2 to 9 nodes")
    parser.add_argument("--across", type=int, default=40, help="of two nodes of different groups")
    parser.add_argument("--double", type=int, default=20, help="of two nodes, with two parities")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for plan in plans(args.losses, args.across, args.double):
            failed |= _report(plan, lose_nodes(Path(folder), plan, args.seed), args.seed)
    raise SystemExit(failed)


def _report(plan: Plan, found: list[dict[str, Any]], seed: int) -> bool:
    exact, older = (sum(loss[name] for loss in found) for name in ("exact", "older"))
    print(f"{plan}: {exact} of {len(found)} exact, {older} older", flush=True)
    counts = {
        "exact": exact,
        "older_than_commit": older,
        "differed_before": sum(loss["differed"] for loss in found),
        "restart_s": statistics.median(loss["seconds"] for loss in found),
    }
    record("lost_nodes", {**asdict(plan), **counts, "seed": seed})
    return exact != len(found) or older > 0


if __name__ == "__main__":
    main()
