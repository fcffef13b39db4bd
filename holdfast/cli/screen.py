"""``holdfast screen``: a pre-flight of this machine's cores and GPUs, for a scheduler's prolog."""

import argparse
from pathlib import Path

from holdfast import events
from holdfast.cli.progress import share_progress
from holdfast.cli.quantities import duration_s, shown_duration, shown_size, size_bytes
from holdfast.cli.screen_report import print_verdict
from holdfast.cli.tables import write_json
from holdfast.errors import ConfigError
from holdfast.screen.emulation import parse_fault
from holdfast.screen.job import SCALES
from holdfast.screen.judge import FINDERS
from holdfast.screen.runner import Request, screen
from holdfast.screen.units import machine_units


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``screen`` to the command line."""
    parser = subparsers.add_parser(
        "screen",
        help="load every core and GPU, and say healthy or suspect",
        description="Load every core and GPU of this machine with the same work, again and again, "
        "and compare all results bit for bit: with the first ones, with stored references, between "
        "the units. Exit code 0 healthy, 1 suspect (the unit, the op and the wrong bits are "
        "named), 2 bad input, 3 unable to tell.",
    )
    add = parser.add_argument
    add("--for", metavar="TIME", dest="time", default="30s", help="e.g. 30s, 5m (default 30s)")
    add("--rounds", metavar="N", type=int, help="so many rounds of all workloads, not a time")
    add("--cores", metavar="LIST", help="only these, e.g. 0-3,8 (default: all it may use)")
    add("--no-gpu", action="store_true", help="cores only")
    add("--units", metavar="N", type=int, default=1, help="unable with fewer cores and GPUs")
    add("--memory", metavar="SIZE", help="walked over by each (default: above the cache)")
    add("--reference", metavar="FILE", type=Path, help="stored results (default: your own)")
    add("--store", metavar="FILE", type=Path, help="store the results, if healthy, as reference")
    add("--without", metavar="FINDER", action="append", default=[], choices=FINDERS,
        help=f"switch off one of {', '.join(FINDERS)}; may be repeated")  # fmt: skip
    add("--stop-at-first", action="store_true", help="end with the first wrong result")
    add("--run-dir", metavar="DIR", type=Path, help="put the findings into this run's ledger")
    add("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    add("--scale", choices=SCALES, default="full", help=argparse.SUPPRESS)
    add("--emulate", metavar="FAULT", action="append", default=[], help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Test the cores and GPUs, print and record results; 0 healthy, 1 suspect, 3 no verdict.

    Raises:
        ConfigError: an argument is unusable, or the reference does not fit; nothing was screened.
    """
    request = _request(args)
    request.check()
    if args.run_dir is not None:
        _open_ledger(args.run_dir)
    print(_announced(request), flush=True)
    with share_progress("starting the workers") as show:
        verdict = screen(request, on_progress=show)
    verdict.record()
    events.close_ledger()
    print_verdict(verdict)
    write_json(args.json, verdict.as_dict())
    return verdict.exit_code


def _open_ledger(run_dir: Path) -> None:
    """Open the ledger of a run; refuse one that cannot be written, before any work."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {run_dir}: {error.strerror}") from error
    events.Ledger(run_dir / events.LEDGER_NAME).close()
    events.open_ledger(run_dir)


def _request(args: argparse.Namespace) -> Request:
    cores = None if args.cores is None else _cores(args.cores)
    if args.units < 1:
        raise ConfigError(f"--units {args.units}: give at least 1")
    return Request(
        units=machine_units(cores, gpus=not args.no_gpu),
        seconds=duration_s(args.time, "--for"),
        rounds=args.rounds,
        scale=args.scale,
        memory_bytes=None if args.memory is None else int(size_bytes(args.memory, "--memory")),
        finders=[finder for finder in FINDERS if finder not in args.without],
        reference=args.reference,
        store=args.store,
        need=args.units,
        stop_at_first=args.stop_at_first,
        faults=[parse_fault(text) for text in args.emulate],
    )


def _cores(text: str) -> list[int]:
    """Parse a list of cores: ``0-3,8`` has five."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--cores {text}: give numbers and ranges like 0-3,8")
        cores += range(int(first), int(last if dash else first) + 1)
    return cores


def _announced(request: Request) -> str:
    cores = sum(unit.core is not None for unit in request.units)
    gpus = len(request.units) - cores
    named = ", ".join(
        f"{count} {what}{'s' if count > 1 else ''}"
        for count, what in ((cores, "core"), (gpus, "GPU"))
        if count
    )
    length = (
        shown_duration(request.seconds) if request.rounds is None else f"{request.rounds} rounds"
    )
    emulated = f", {len(request.faults)} emulated faults" if request.faults else ""
    memory = shown_size(request.memory_of_each)
    return f"screening {named} for {length}, {memory} of memory each{emulated}"
