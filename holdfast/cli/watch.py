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
from holdfast.report.sources import Ledgers, Record
from holdfast.torchrun import interruptible

EXIT_FAILED = 1
SHOWN_RANKS = 16
LATEST = 8  # events
RECENT = 20  # points of the curve, from which the present pace is known
SILENT_S = 15.0  # three times what a Guard waits at most, between two steps, before it writes
SILENT_STEPS = 3.0


class Rank(NamedTuple):
    """What the Guard of a rank wrote last, and how much longer ago than the rank that wrote last.

    ``pass_s`` and ``own_s`` are the mean times of a forward and backward pass and of the Guard.
    """

    rank: int
    host: str
    step: int
    silent_s: float
    pass_s: float
    own_s: float
    behind: bool


class Look(NamedTuple):
    """What is known of a run at one moment."""

    report: RunReport
    ranks: list[Rank]
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
        write_json(args.json, report.as_dict() | {"behind": [r.rank for r in ranks if r.behind]})
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


def ranks_of(guards: Sequence[Record], seconds: Sequence[float]) -> list[Rank]:
    """Compare the ranks by what their Guards wrote last, those behind first."""
    newest_s = max((each["time_s"] for each in guards), default=0.0)
    furthest = max((each["step"] for each in guards), default=0)
    patience_s = max(SILENT_S, SILENT_STEPS * median(seconds or [0.0]))
    found = []
    for each in guards:
        steps, silent_s = max(1, each["steps"]), newest_s - each["time_s"]
        pass_s, own_s = (each["seconds"].get(name, 0.0) / steps for name in ("passes", "guard"))
        behind = each["step"] < furthest and silent_s > patience_s
        found.append(
            Rank(each["rank"], each["host"], each["step"], silent_s, pass_s, own_s, behind)
        )
    return sorted(found, key=lambda rank: (not rank.behind, -rank.pass_s))


def _headline(report: RunReport) -> str:
    of = f" of {report.steps_wanted:,}" if report.steps_wanted else ""
    kind, recent = report.state.kind, report.curve.seconds[-RECENT:]
    parts = [kind if kind != "unknown" else "end not known", f"step {report.steps_done:,}{of}"]
    if report.curve.loss and isfinite(report.curve.loss[-1]):
        parts.append(f"loss {number(report.curve.loss[-1])}")
    if recent:
        parts.append(f"{duration(mean(recent))} a step")
    if recent and report.steps_wanted and kind == "running":
        left = max(0, report.steps_wanted - report.steps_done)
        parts.append(f"{duration(left * mean(recent))} left")
    return " · ".join([*parts, _faults(report)])


def _faults(report: RunReport) -> str:
    total = sum(report.statuses.values())
    if not total:
        return "no faults"
    left, struck = report.statuses.get("open", 0), report.tally["by_kind"].get("injected", 0)
    injected = f", {counted(struck, 'fault')} injected" if struck else ""
    return f"{counted(total, 'incident')}, {left} not repaired{injected}"


def _parts(look: Look, width: int) -> Iterator[Text | Table]:
    report = look.report
    yield _line(report.name, "bold")
    yield _line(_headline(report), "red" if report.state.kind == "failed" else "")
    if report.state.reason:
        yield _line(report.state.reason, "red")
    losses = dict(zip(report.curve.steps, report.curve.loss, strict=True))
    if any(map(isfinite, losses.values())):
        yield _line(f"loss {sparkline(losses, max(10, width - 6))}")
    yield _facts(report)
    if look.ranks:
        yield _ranks(look.ranks)
    for event in look.latest:
        yield _line(describe(event))


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _facts(report: RunReport) -> Table:
    table = Table.grid(padding=(0, 2))
    for smp in report.smps:
        name = f"snapshots of node {smp['node']}"
        if "error" in smp:
            table.add_row(name, _line(f"no answer: {smp['error']}", "red"))
            continue
        newest = "none yet" if smp["newest"] is None else f"step {smp['newest']:,}"
        age = "" if smp["newest"] is None else f", {duration(smp['age_s'])} old"
        connected = f"{sum(smp['connected'])} of {len(smp['connected'])} ranks connected"
        table.add_row(name, _line(f"{newest}{age}, {connected}"))
    if not report.smps:
        table.add_row("snapshots", _line("no snapshot process runs"))
    if report.coverage is not None:
        sites = report.coverage["sites"]
        covered = sum(site["covered"] for site in sites)
        table.add_row("matmul sites", _line(f"{covered} of {len(sites)} covered"))
    return table


def _ranks(ranks: Sequence[Rank]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "host", "step", "pass", "guard", ""):
        table.add_column(name, justify="left" if name in ("host", "") else "right")
    for rank in ranks[:SHOWN_RANKS]:
        silent = f"silent for {duration(rank.silent_s)}" if rank.behind else ""
        cells = (str(rank.rank), rank.host, f"{rank.step:,}", duration(rank.pass_s))
        shown = (*cells, duration(rank.own_s), silent)
        table.add_row(*(Text(printable(cell)) for cell in shown), style="red" * rank.behind)
    if len(ranks) > SHOWN_RANKS:
        table.caption = f"{len(ranks) - SHOWN_RANKS} more ranks"
    return table
