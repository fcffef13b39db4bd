"""The work of ``holdfast screen``: test cores and GPUs, then print and record the results."""

import argparse
from collections import Counter
from pathlib import Path

from holdfast import events
from holdfast.cli.progress import share_progress
from holdfast.cli.quantities import duration_s, shown_duration, size_bytes
from holdfast.cli.screen_report import print_verdict
from holdfast.cli.tables import write_json
from holdfast.errors import ConfigError
from holdfast.report.quantities import counted, size
from holdfast.screen.emulation import parse_fault
from holdfast.screen.judge import FINDERS
from holdfast.screen.runner import Request, screen
from holdfast.screen.units import machine_units

MOST_CORES = 999_999


def run(args: argparse.Namespace) -> int:
    """Test the cores and GPUs, print and record the results; return 0, 1 or 3 as the verdict is."""
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
    """Open the ledger of a run; raise ConfigError before any work if it cannot be written."""
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
        low, high = int(first), int(last if dash else first)
        if high > MOST_CORES:
            raise ConfigError(f"--cores {text}: no core has a number above {MOST_CORES}")
        if low > high:
            raise ConfigError(f"--cores {text}: {part} ends before it begins")
        cores += range(low, high + 1)
    return cores


def _announced(request: Request) -> str:
    kinds = Counter("GPU" if unit.core is None else "core" for unit in request.units)
    named = ", ".join(counted(count, kind) for kind, count in kinds.items())
    rounds = request.rounds
    length = shown_duration(request.seconds) if rounds is None else counted(rounds, "round")
    emulated = f", {counted(len(request.faults), 'emulated fault')}" if request.faults else ""
    memory = size(request.memory_of_each)
    return f"screening {named} for {length}, {memory} of memory each{emulated}"
