"""Seeds of the simulated cluster, of several sizes in turn, for as long as there is time.

    python -m bench.simulation [--minutes M] [--first SEED] [--seeds N] [--nodes N …] [--steps N]

``--seeds`` ends after so many seeds of each size. One row a size: seeds, events, violations; each
minute a line tells how far it is. Deliberate bugs: ``--planted``, one row. Exit code 1 if an
invariant is broken or a bug is not found.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict

from bench.rows import record
from holdfast_lab.cli.simulate import summary
from holdfast_lab.simulation import planted, runs
from holdfast_lab.simulation.world import Size

CLAIM = "simulation"
SIZES = (
    Size(3),
    Size(4, ranks=2, parities=2),
    Size(3, ranks=2),
    Size(5, parities=2),
    Size(8),
    Size(6, group_nodes=3),
    Size(9, ranks=2, parities=2, group_nodes=4),
    Size(12, parities=2, steps=60),
)
TURN = 25  # seeds of a size before the next size
MOST_SEEDS = 400  # until a deliberate bug must be found
PROGRESS_S = 60.0


def planned(sizes: tuple[Size, ...], first: int, most: int) -> Iterator[tuple[Size, int]]:
    """Yield sizes and seeds: some of one size, then as many of the next."""
    for begins in range(first, first + most, TURN):
        for size in sizes:
            for seed in range(begins, min(begins + TURN, first + most)):
                yield size, seed


def campaign(sizes: tuple[Size, ...], first: int, minutes: float, most: int) -> int:
    outcomes: dict[Size, list[runs.Outcome]] = defaultdict(list)
    started_s = told_s = time.monotonic()
    for size, seed in planned(sizes, first, most):
        outcome = runs.simulate(seed, size)
        outcomes[size].append(outcome)
        if outcome.violation:
            print(f"seed {seed}, {size}: {outcome.violation}", flush=True)
        outcome.story.clear()
        now_s = time.monotonic()
        if now_s - told_s > PROGRESS_S:
            told_s, done = now_s, {each.nodes: len(found) for each, found in outcomes.items()}
            print(f"{now_s - started_s:.0f} s: seeds by nodes {done}", flush=True)
        if now_s - started_s > 60 * minutes:
            break
    for size, found in outcomes.items():
        record(CLAIM, {"size": asdict(size), "first_seed": first, **summary(found, size)})
    return int(any(each.violation for found in outcomes.values() for each in found))


def bugs(first: int) -> int:
    rows = {}
    for name in planted.BUGS:
        started_s = time.process_time()
        for seed in range(first, first + MOST_SEEDS):
            if runs.simulate(seed, Size(3), bug=name).violation:
                break
        else:
            seed = first + MOST_SEEDS  # not found
        rows[name] = [seed - first + 1, round(time.process_time() - started_s, 2)]
    missed = [name for name, (seeds, _) in rows.items() if seeds > MOST_SEEDS]
    found = {"planted": len(rows), "missed": missed, "seeds_and_cpu_s": rows}
    record(CLAIM, {"size": asdict(Size(3)), **found})
    return int(bool(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=10**6, help="at most so many of each size")
    parser.add_argument("--nodes", type=int, nargs="+", help="other sizes, one rank a node")
    parser.add_argument("--steps", type=int, default=100, help="of these sizes")
    parser.add_argument("--planted", action="store_true")
    args = parser.parse_args()
    runs.use_one_core()
    if args.planted:
        return bugs(args.first)
    chosen = tuple(Size(nodes, steps=args.steps) for nodes in args.nodes or ())
    return campaign(chosen or SIZES, args.first, args.minutes, args.seeds)


if __name__ == "__main__":
    sys.exit(main())
