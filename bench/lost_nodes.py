"""Nodes lost whole at random moments: is every rebuilt state bit-exact, and never older than the
last commit?

    python -m bench.lost_nodes [--losses 52] [--double 20] [--seed 0]

Runs of 2, 3, 4 and 5 nodes (one rank each, data parallel, a snapshot every step) lose a random
node, ranks and SMP together, again and again; runs of 3 and 4 nodes with a second parity lose two
at once. Empty nodes take their place. Every restart digests what it restored, on every rank; the
digests are compared with those of an undisturbed run at the same step.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.nodes import Cluster
from bench.nodes_rank import Work
from bench.rows import record

WIDTH = 512
PACE_S = 0.02
LONGEST_PAUSE_S = 0.5
ENDLESS = 10**9
SINGLE, DOUBLE = (2, 3, 4, 5), (3, 4)


def lose_nodes(folder: Path, nodes: int, parities: int, losses: int, seed: int) -> list[Any]:
    """So many losses of ``parities`` nodes at once; for each what every rank restored."""
    draw = random.Random(f"{nodes}/{parities}/{seed}")
    work = Work(folder / f"{nodes}-{parities}", ENDLESS, parities, WIDTH, PACE_S)
    cluster = Cluster(work, nodes)
    found = []
    try:
        with Progress() as progress:
            cluster.start()
            for _ in progress.track(range(losses), description=f"{nodes} nodes, {parities} lost"):
                found.append(_lose(cluster, draw))
        cluster.kill_trainers()
        _check(cluster, found)
    finally:
        cluster.close()
    return found


def _lose(cluster: Cluster, draw: random.Random) -> dict[str, Any]:
    start = max((line["step"] for line in cluster.said(0) if "step" in line), default=0)
    cluster.until_committed(start + 2)
    time.sleep(draw.uniform(0, LONGEST_PAUSE_S))
    lost = sorted(draw.sample(range(cluster.nodes), cluster.work.parities))
    cluster.lose(lost)
    committed, killed_s = cluster.committed(), time.monotonic()
    cluster.start()
    ranks = range(cluster.world)
    cluster.until(lambda: all(cluster.said(rank) for rank in ranks), "no restore")
    seconds = time.monotonic() - killed_s
    restored = [cluster.said(rank)[0] for rank in ranks]
    return {"lost": lost, "committed": committed, "restored": restored, "seconds": seconds}


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
    parser.add_argument("--losses", type=int, default=52, help="of one node, over 2 to 5 nodes")
    parser.add_argument("--double", type=int, default=20, help="of two nodes, over 3 and 4 nodes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    plans = [(nodes, 1, args.losses // len(SINGLE)) for nodes in SINGLE]
    plans += [(nodes, 2, args.double // len(DOUBLE)) for nodes in DOUBLE]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for nodes, parities, losses in plans:
            found = lose_nodes(Path(folder), nodes, parities, losses, args.seed) if losses else []
            failed |= bool(found) and _report(nodes, parities, found, args.seed)
    raise SystemExit(failed)


def _report(nodes: int, parities: int, found: list[dict[str, Any]], seed: int) -> bool:
    exact, older = (sum(loss[name] for loss in found) for name in ("exact", "older"))
    print(f"{nodes} nodes, {parities} lost at once: {exact} of {len(found)} exact, {older} older")
    record(
        "lost_nodes",
        {
            "nodes": nodes,
            "parities": parities,
            "losses": len(found),
            "exact": exact,
            "older_than_commit": older,
            "differed_before": sum(loss["differed"] for loss in found),
            "restart_s": statistics.median(loss["seconds"] for loss in found),
            "seed": seed,
        },
    )
    return exact != len(found) or older > 0


if __name__ == "__main__":
    main()
