"""``holdfast events``: print the events of a run from its ledger."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from holdfast import config
from holdfast.cli.tables import print_table, say, write_json
from holdfast.events import LEDGER_NAME, Event, read_ledger

_COLUMNS = ("time_s", "step", "rank", "kind", "op", "detector", "rung", "ms", "detail")
_NUMBERS = ("time_s", "step", "rank", "ms")
_DETAIL_LENGTH = 60


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``events`` to the command line."""
    parser = subparsers.add_parser(
        "events",
        description="List the fault events of a run, oldest first. The run may be going on.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    parser.add_argument("--step", metavar="N", type=int, help="only this training step")
    parser.add_argument("--rank", metavar="R", type=int, help="only this rank")
    parser.add_argument("--kind", metavar="K", help="only this kind of event")
    parser.add_argument("--op", metavar="TEXT", help="only ops whose name contains TEXT")
    parser.add_argument("--limit", metavar="N", type=_count, help="only the latest N")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the events to FILE")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of events")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the events that match and return exit code 0, also if there are none."""
    ledger = config.run_dir(args.run_dir) / LEDGER_NAME
    matching = list(read_ledger(ledger, step=args.step, rank=args.rank, kind=args.kind, op=args.op))
    shown = matching[-args.limit :] if args.limit else matching
    write_json(args.json, [{"id": identifier} | event.as_dict() for identifier, event in shown])
    _print_events([event for _, event in shown], matched=len(matching), ledger=ledger)
    return 0


def _print_events(shown: list[Event], *, matched: int, ledger: Path) -> None:
    if not shown:
        say(f"no matching events in {ledger}")
        return
    _, first = next(read_ledger(ledger))
    print_table(_COLUMNS, [_row(event, first.time_s) for event in shown], right=_NUMBERS)
    hidden = matched - len(shown)
    print(f"{len(shown)} events" + (f", {hidden} older ones not shown" if hidden else ""))


def _row(event: Event, start_s: float) -> tuple[str, ...]:
    return (
        _thousandths(event.time_s - start_s),
        _known(event.step),
        _known(event.rank),
        event.kind,
        event.op,
        event.detector,
        event.rung,
        _thousandths(event.duration_s * 1000),
        _short(event.detail),
    )


def _thousandths(number: float) -> str:
    return f"{round(number, 3) + 0.0:.3f}"  # + 0.0 so that zero has no minus sign


def _known(number: int) -> str:
    return str(number) if number >= 0 else ""


def _short(detail: Mapping[str, object]) -> str:
    text = " ".join(f"{key}={value}" for key, value in detail.items())
    return text if len(text) <= _DETAIL_LENGTH else text[: _DETAIL_LENGTH - 1] + "…"
