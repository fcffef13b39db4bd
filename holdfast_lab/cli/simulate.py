"""``simulate``: a simulated cluster of snapshot processes, many seeds, every invariant checked."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast.cli.tables import check_writable, print_table, write_json
from holdfast.errors import ConfigError
from holdfast.planner.parity_groups import GROUP_NODES
from holdfast_lab.cli import say

if TYPE_CHECKING:
    from holdfast_lab.simulation.runs import Outcome
    from holdfast_lab.simulation.world import Size

ALL = "all"
SHOWN_LINES = 40
MOST_FAILURES = 5  # after so many seeds that break an invariant no more are run


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb ``simulate`` to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a cluster under faults and check every invariant",
        description="Run the snapshot processes of many nodes in one process on a virtual clock, "
        "with faults drawn from each seed, and check every invariant after every event. Exit code "
        "1 if one is broken (with --planted: if a bug is not found).",
    )
    add = parser.add_argument
    add("--nodes", type=_number, default=3, metavar="N", help="default 3")
    add("--ranks", type=_number, default=1, metavar="N", help="ranks on each node, default 1")
    add("--parities", type=_number, default=1, metavar="N", help="1 or 2, default 1")
    text = f"largest number of nodes of a parity group, default {GROUP_NODES}"
    add("--group-nodes", type=_number, default=GROUP_NODES, metavar="N", help=text)
    text = "training steps during which faults happen, default 100"
    add("--steps", type=_number, default=100, metavar="N", help=text)
    add("--seeds", type=_range, default=range(1, 101), metavar="A-B", help="default 1-100")
    text = "only these faults of the seed, as a violation's message names them"
    add("--faults", type=_numbers, metavar="A,B,…", help=text)
    text = f"put in a deliberate bug by name, or {ALL}, and count the seeds until it is found"
    add("--planted", metavar="NAME", default="", help=text)
    add("--jobs", type=_number, default=1, metavar="N", help="cores to use, default 1")
    add("--json", type=Path, metavar="FILE", help="also write the results")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate the seeds; return the exit code."""
    from holdfast_lab.simulation.runs import Totals
    from holdfast_lab.simulation.world import Size

    if not 1 <= args.parities <= 2 or args.nodes <= args.parities:
        raise ConfigError(
            f"--parities {args.parities} with --nodes {args.nodes}: 1 or 2, and more nodes than "
            "parities"
        )
    check_writable(args.json)
    size = Size(args.nodes, args.ranks, args.parities, args.steps, args.group_nodes)
    if args.planted:
        return _planted(args, size)
    outcomes, totals = _outcomes(args, size), Totals()
    for outcome in outcomes:
        totals.add(outcome)
    failed = [outcome for outcome in outcomes if outcome.violation]
    for outcome in failed:
        _explain(outcome, args, size)
    found = totals.summary(size)
    print_table(["", ""], [[name, str(value)] for name, value in found.items()])
    described = [_described(outcome) for outcome in failed]
    write_json(args.json, {**found, "size": asdict(size), "failed": described})
    return 1 if failed else 0


def _outcomes(args: argparse.Namespace, size: Size) -> list[Outcome]:
    from holdfast_lab.simulation import runs

    if args.faults is not None:
        return [runs.simulate(seed, size, args.faults) for seed in args.seeds]
    outcomes: list[Outcome] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("seeds", total=len(args.seeds))
        for outcome in runs.simulate_all(args.seeds, size, args.jobs):
            outcomes.append(outcome)
            progress.advance(task)
            if sum(bool(each.violation) for each in outcomes) >= MOST_FAILURES:
                break
    return outcomes


def _explain(outcome: Outcome, args: argparse.Namespace, size: Size) -> None:
    """Print the violation of a seed, with as few faults as possible, and how to repeat it."""
    from holdfast_lab.simulation import minimise, runs

    kept = args.faults
    if kept is None:
        again = lambda some: bool(runs.simulate(outcome.seed, size, some).violation)  # noqa: E731
        kept = minimise.minimised(range(outcome.faults), again)
        outcome = runs.simulate(outcome.seed, size, kept)
    console = Console(stderr=True)
    say(console, f"seed {outcome.seed}: {outcome.violation}")
    for line in outcome.story[-SHOWN_LINES:]:
        say(console, line)
    options = f"--nodes {size.nodes} --ranks {size.ranks} --parities {size.parities}"
    options += f" --group-nodes {size.group_nodes}"
    chosen = ",".join(map(str, kept)) or "none"
    say(
        console,
        f"repeat with: python -m holdfast_lab simulate {options} --steps {size.steps} "
        f"--seeds {outcome.seed} --faults {chosen}",
    )


def _described(outcome: Outcome) -> dict[str, Any]:
    return {"seed": outcome.seed, "violation": outcome.violation, "story": outcome.story}


def _planted(args: argparse.Namespace, size: Size) -> int:
    from holdfast_lab.simulation import planted, runs

    names = list(planted.BUGS) if args.planted == ALL else [args.planted]
    rows, found = [], []
    for name in names:
        started_s = time.process_time()
        for outcome in runs.simulate_all(args.seeds, planted.size_for(name, size), bug=name):
            if outcome.violation:
                break
        seeds = outcome.seed - args.seeds[0] + 1
        seconds = time.process_time() - started_s
        row = {"bug": name, "found": bool(outcome.violation), "seeds": seeds, "seconds": seconds}
        found.append({**row, "violation": outcome.violation})
        told = outcome.violation.splitlines()[0][:60] if outcome.violation else "NOT FOUND"
        rows.append([name, str(seeds), f"{seconds:.1f}", told])
    print_table(["bug", "seeds", "CPU s", "violation"], rows, right=["seeds", "CPU s"])
    write_json(args.json, {"size": asdict(size), "bugs": found})
    return 0 if all(row["found"] for row in found) else 1


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _range(text: str) -> range:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds; write 1-100, or 91")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _numbers(text: str) -> list[int]:
    if text == "none":
        return []
    if not re.fullmatch(r"\d{1,5}(,\d{1,5})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of faults; write 2,5,7 or none")
    return list(map(int, text.split(",")))
