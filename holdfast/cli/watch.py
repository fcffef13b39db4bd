"""``holdfast watch``: a run that goes on, shown in the terminal."""

import argparse
import time
from collections.abc import Iterator
from math import isfinite
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from holdfast.cli.progress import describe, sparkline
from holdfast.cli.tables import say, write_json
from holdfast.logs import printable
from holdfast.report.live import Live, LiveRun
from holdfast.report.quantities import counted, duration, number
from holdfast.torchrun import interruptible

EXIT_FAILED = 1
SHOWN_RANKS = 16


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
    looks = _looks(LiveRun(args.run_dir), args)
    interruptible()
    console = Console(highlight=False)
    try:
        state = _draw(looks, console) if console.is_terminal else _tell(looks)
    except KeyboardInterrupt:
        return 0
    return EXIT_FAILED if state == "failed" else 0


def _looks(run: LiveRun, args: argparse.Namespace) -> Iterator[Live]:
    """Look at the run again and again, until it has ended."""
    while True:
        live = run.read()
        write_json(args.json, live.as_dict())
        yield live
        if args.once or live.state.kind in ("finished", "failed"):
            return
        time.sleep(args.every)


def _draw(looks: Iterator[Live], console: Console) -> str:
    state = ""
    with Screen(console=console, auto_refresh=False) as screen:
        for live in looks:
            screen.update(Group(*_parts(live, console.width)), refresh=True)
            state = live.state.kind
    return state


def _tell(looks: Iterator[Live]) -> str:
    before, state = "", ""
    for live in looks:
        for event in live.fresh:
            say(describe(event))
        line, state = _headline(live), live.state.kind
        if line != before:
            say(line, flush=True)
        before = line
    return state


def _headline(live: Live) -> str:
    of = f" of {live.steps_wanted:,}" if live.steps_wanted else ""
    parts = [live.state.kind if live.state.kind != "unknown" else "end not known"]
    parts.append(f"step {live.step:,}{of}")
    if live.loss is not None and isfinite(live.loss):
        parts.append(f"loss {number(live.loss)}")
    if live.step_s:
        parts.append(f"{duration(live.step_s)} a step")
    if live.left_s:
        parts.append(f"{duration(live.left_s)} left")
    parts.append(_faults(live))
    return " · ".join(parts)


def _faults(live: Live) -> str:
    total = sum(live.statuses.values())
    if not total:
        return "no faults"
    left = live.statuses.get("open", 0)
    injected = f", {counted(live.injected, 'fault')} injected" if live.injected else ""
    return f"{counted(total, 'incident')}, {left} not repaired{injected}"


def _parts(live: Live, width: int) -> Iterator[Text | Table]:
    yield _line(live.name, "bold")
    yield _line(_headline(live), "red" if live.state.kind == "failed" else "")
    if live.state.reason:
        yield _line(live.state.reason, "red")
    if any(map(isfinite, live.losses.values())):
        yield _line(f"loss {sparkline(live.losses, max(10, width - 6))}")
    yield _facts(live)
    if live.ranks:
        yield _ranks(live)
    for event in live.latest:
        yield _line(describe(event))


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _facts(live: Live) -> Table:
    table = Table.grid(padding=(0, 2))
    for smp in live.smps:
        name = f"snapshots of node {smp['node']}"
        if "error" in smp:
            table.add_row(name, _line(f"no answer: {smp['error']}", "red"))
            continue
        newest = "none yet" if smp["newest"] is None else f"step {smp['newest']:,}"
        age = "" if smp["newest"] is None else f", {duration(smp['age_s'])} old"
        connected = f"{sum(smp['connected'])} of {len(smp['connected'])} ranks connected"
        table.add_row(name, _line(f"{newest}{age}, {connected}"))
    if not live.smps:
        table.add_row("snapshots", _line("no snapshot process runs"))
    if live.coverage is not None:
        sites = live.coverage["sites"]
        covered = sum(site["covered"] for site in sites)
        table.add_row("matmul sites", _line(f"{covered} of {len(sites)} covered"))
    return table


def _ranks(live: Live) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rank", "host", "step", "pass", "guard", ""):
        table.add_column(name, justify="left" if name in ("host", "") else "right")
    behind_first = sorted(live.ranks, key=lambda rank: (not rank.behind, -rank.pass_s))
    for rank in behind_first[:SHOWN_RANKS]:
        silent = f"silent for {duration(rank.silent_s)}" if rank.behind else ""
        cells = (str(rank.rank), rank.host, f"{rank.step:,}", duration(rank.pass_s))
        shown = (*cells, duration(rank.own_s), silent)
        table.add_row(*(Text(printable(cell)) for cell in shown), style="red" * rank.behind)
    if len(behind_first) > SHOWN_RANKS:
        table.caption = f"{len(behind_first) - SHOWN_RANKS} more ranks"
    return table
