"""Seeds of the simulated cluster, of several sizes in turn, for as long as there is time.

    python -m bench.simulation [--minutes M] [--first SEED] [--seeds N] [--nodes N …] [--steps N]
        [--jobs N]

``--seeds`` ends after so many seeds of each size, ``--jobs`` is the number of processes. One row a
size, also if the bench is interrupted (SIGINT, SIGTERM): seeds, events, violations; each minute a
line tells how far it is. Deliberate bugs: ``--planted``, one row. A seed that takes longer than
``SEED_S`` breaks an invariant. Exit code 1 if one is broken or a bug is not found.
"""

import argparse
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, TypeVar

from bench.rows import record
from holdfast_lab.simulation import planted, runs
from holdfast_lab.simulation.runs import Outcome, Totals
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
SEED_S = 900

Given = TypeVar("Given")
Made = TypeVar("Made")


def planned(sizes: tuple[Size, ...], first: int, most: int) -> Iterator[tuple[Size, int]]:
    """Yield sizes and seeds: some of one size, then as many of the next."""
    for begins in range(first, first + most, TURN):
        for size in sizes:
            for seed in range(begins, min(begins + TURN, first + most)):
                yield size, seed


def one_seed(given: tuple[Size, int]) -> tuple[Size, Outcome]:
    size, seed = given
    signal.setitimer(signal.ITIMER_PROF, SEED_S)
    outcome = runs.simulate(seed, size)
    signal.setitimer(signal.ITIMER_PROF, 0)
    outcome.story.clear()
    return size, outcome


def _took_too_long(*_: object) -> None:
    # No OSError, which the code that runs may handle.
    raise RuntimeError(f"the seed has not ended within {SEED_S} s of CPU time")


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began this one ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, _took_too_long)
    runs.use_one_core()


def in_processes(
    work: Callable[[Given], Made], given: Iterable[Given], jobs: int, minutes: float
) -> Iterator[Made]:
    """Yield results as they come, until the time is up or the bench is interrupted."""
    ends_s, signals = time.monotonic() + 60 * minutes, list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: signals.append(got))
    with multiprocessing.Pool(jobs, _begin_process) as pool:
        results = pool.imap_unordered(work, given)
        while not signals and time.monotonic() < ends_s:
            try:
                yield results.next(0.2)
            except multiprocessing.TimeoutError:
                continue
            except StopIteration:
                return
    print("interrupted" if signals else f"{minutes:g} minutes are over", flush=True)


def campaign(seeds: Iterator[tuple[Size, int]], first: int, jobs: int, minutes: float) -> int:
    totals: dict[Size, Totals] = {}
    started_s = told_s = time.monotonic()
    for size, outcome in in_processes(one_seed, seeds, jobs, minutes):
        totals.setdefault(size, Totals()).add(outcome)
        if outcome.violation:
            print(f"seed {outcome.seed}, {size}: {outcome.violation}", flush=True)
        now_s = time.monotonic()
        if now_s - told_s > PROGRESS_S:
            told_s, done = now_s, [(each.nodes, each.ranks, t.seeds) for each, t in totals.items()]
            print(f"{now_s - started_s:.0f} s: nodes, ranks and seeds {done}", flush=True)
    for size, found in totals.items():
        about = {"size": asdict(size), "first_seed": first, "jobs": jobs}
        record(CLAIM, {**about, **found.summary(size)})
    return int(any(found.violations for found in totals.values()))


def find_bug(given: tuple[str, int]) -> tuple[str, list[Any]]:
    """Return how many seeds, and seconds, it took until a deliberate bug was found."""
    (name, first), started_s = given, time.process_time()
    for seed in range(first, first + MOST_SEEDS):
        if runs.simulate(seed, planted.BUGS[name].size, bug=name).violation:
            break
    else:
        seed = first + MOST_SEEDS  # not found
    return name, [seed - first + 1, round(time.process_time() - started_s, 2)]


def bugs(first: int, jobs: int, minutes: float) -> int:
    given = [(name, first) for name in planted.BUGS]
    rows = dict(in_processes(find_bug, given, jobs, minutes))
    missed = [name for name in planted.BUGS if rows.get(name, [MOST_SEEDS + 1])[0] > MOST_SEEDS]
    found = {"planted": len(given), "missed": missed, "seeds_and_cpu_s": rows}
    record(CLAIM, {"size": asdict(Size(3)), **found})
    return int(bool(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=10**6, help="at most so many of each size")
    parser.add_argument("--nodes", type=int, nargs="+", help="other sizes, one rank a node")
    parser.add_argument("--steps", type=int, help="of all sizes")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--planted", action="store_true")
    args = parser.parse_args()
    if args.planted:
        return bugs(args.first, args.jobs, args.minutes)
    sizes = tuple(map(Size, args.nodes or ())) or SIZES
    if args.steps:
        sizes = tuple(replace(size, steps=args.steps) for size in sizes)
    return campaign(planned(sizes, args.first, args.seeds), args.first, args.jobs, args.minutes)


if __name__ == "__main__":
    sys.exit(main())
