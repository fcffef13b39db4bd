"""``holdfast watch``: a run that goes on, shown in the terminal."""

import argparse
import time
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli.progress import describe, sparkline
from holdfast.cli.tables import say, write_json
from holdfast.events import Event
from holdfast.logs import printable
from holdfast.report.quantities import counted, duration, number
from holdfast.report.run import RunReport, gather_run
from holdfast.report.run_sections import tiles_of
from holdfast.report.sources import Ledgers, Record
from holdfast.report.verdict import BAD, GOOD, progress, verdict_of
from holdfast.torchrun import interruptible

EXIT_FAILED = 1
SHOWN_RANKS = 16
LATEST = 8  # events
RECENT = 20  # points of the curve, from which the present pace is known
SILENT_S = 15.0  # three times what a Guard waits at most, between two steps, before it writes
SILENT_STEPS = 3.0


class Look(NamedTuple):
    """What is known of a run at one moment; ``fresh`` are the events since the last look."""

    report: RunReport
    ranks: list[Record]
    latest: list[Event]
    fresh: list[Event]


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``watch`` to the command line."""
    parser = subparsers.add_parser(
        "watch",
        description="Show step, loss, faults, snapshots and ranks of a run until it ends or "
        "Ctrl-C. Without a terminal, a line is printed whenever something has changed. "
        "Exit code 1 if the run failed, else 0.",
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    text = "seconds between two looks (default 2)"
    add("--every", metavar="S", type=_seconds, default=2.0, help=text)
    add("--once", action="store_true", help="look once and end")
    add("--json", metavar="FILE", type=Path, help="also write the state at each look to FILE")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86_400.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.1 to 86400")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Watch the run until it ends; return 1 if it failed, else 0."""
    looks = _looks(args)
    interruptible()
    console = Console(highlight=False)
    try:
        state = _draw(looks, console) if console.is_terminal else _tell(looks)
    except KeyboardInterrupt:
        return 0
    return EXIT_FAILED if state == "failed" else 0


def _looks(args: argparse.Namespace) -> Iterator[Look]:
    """Look at the run again and again, until it has ended."""
    ledgers, events = Ledgers(args.run_dir), list[Event]()
    while True:
        report = gather_run(args.run_dir)
        fresh = list(ledgers.read())
        events = [*events, *fresh][-LATEST:]
        ranks = ranks_of(report.guards, report.curve.seconds)
        write_json(
            args.json, report.as_dict() | {"behind": [r["rank"] for r in ranks if r["late"]]}
        )
        yield Look(report, ranks, events, fresh)
        if args.once or report.state.kind in ("finished", "failed"):
            return
        time.sleep(args.every)


def _draw(looks: Iterator[Look], console: Console) -> str:
    state = ""
    with Live(console=console, auto_refresh=False) as screen:
        for look in looks:
            screen.update(Group(*_parts(look, console.width)), refresh=True)
            state = look.report.state.kind
    return state


def _tell(looks: Iterator[Look]) -> str:
    before, state = "", ""
    for look in looks:
        for event in look.fresh:
            say(describe(event))
        line, state = _headline(look.report), look.report.state.kind
        if line != before:
            say(line, flush=True)
        before = line
    return state


def ranks_of(guards: Sequence[Record], seconds: Sequence[float]) -> list[Record]:
    """Compare what the Guards of the ranks wrote last; those that are late come first.

    To each it adds ``silent_s``, how much longer ago that is than what any other rank wrote, and
    the mean times of a forward and backward pass and of the Guard, ``pass_s`` and ``own_s``.
    """
    newest_s = max((each["time_s"] for each in guards), default=0.0)
    furthest = max((each["step"] for each in guards), default=0)
    patience_s = max(SILENT_S, SILENT_STEPS * median(seconds or [0.0]))
    found = []
    for each in guards:
        silent_s = newest_s - each["time_s"]
        names = {"pass_s": "passes", "own_s": "guard"}
        means = {n: each["seconds"].get(of, 0.0) / max(1, each["steps"]) for n, of in names.items()}
        late = each["step"] < furthest and silent_s > patience_s
        found.append(each | means | {"silent_s": silent_s, "late": late})
    return sorted(found, key=lambda rank: (not rank["late"], -rank["pass_s"]))


def _headline(report: RunReport) -> str:
    kind, recent = report.state.kind, report.curve.seconds[-RECENT:]
    parts = [kind if kind != "unknown" else "end not known", progress(report)]
    if report.curve.loss and isfinite(report.curve.loss[-1]):
        parts.append(f"loss {number(report.curve.loss[-1])}")
    if recent:
        parts.append(f"{duration(mean(recent))} a step")
    if recent and report.steps_wanted and kind == "running":
        left = max(0, report.steps_wanted - report.steps_done)
        parts.append(f"{duration(left * mean(recent))} left")
    return " · ".join([*parts, counted(report.incidents_total, "incident")])


def _parts(look: Look, width: int) -> Iterator[Text | Table]:
    report = look.report
    yield _line(report.name, "bold")
    yield _line(_headline(report))
    said = verdict_of(report)
    for line in (said.headline, *said.lines[:-1]):
        yield _line(line, {GOOD: "green", BAD: "red"}.get(said.level, "yellow"))
    losses = dict(zip(report.curve.steps, report.curve.loss, strict=True))
    if any(map(isfinite, losses.values())):
        yield _line(f"loss {sparkline(losses, max(10, width - 6))}")
    facts = Table.grid(padding=(0, 2))
    for name, *told in tiles_of(report):
        facts.add_row(name, _line(", ".join(str(each) for each in told if each)))
    for smp in (smp for smp in report.smps if "error" not in smp):
        connected = f"{sum(smp['connected'])} of {len(smp['connected'])} ranks connected"
        facts.add_row(f"snapshots of node {smp['node']}", _line(connected))
    yield facts
    if look.ranks:
        yield _ranks(look.ranks)
    for event in look.latest:
        yield _line(describe(event))


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _ranks(ranks: Sequence[Record]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "host", "step", "pass", "guard", ""):
        table.add_column(name, justify="left" if name in ("host", "") else "right")
    for rank in ranks[:SHOWN_RANKS]:
        silent = f"silent for {duration(rank['silent_s'])}" if rank["late"] else ""
        times = (duration(rank[name]) for name in ("pass_s", "own_s"))
        cells = (str(rank["rank"]), rank["host"], f"{rank['step']:,}", *times, silent)
        table.add_row(*(Text(printable(cell)) for cell in cells), style="red" * rank["late"])
    if len(ranks) > SHOWN_RANKS:
        table.caption = f"{len(ranks) - SHOWN_RANKS} more ranks"
    return table
