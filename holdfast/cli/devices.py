"""``holdfast devices``: the faults of each device over several runs."""

import argparse
import time
from pathlib import Path

from holdfast.cli.tables import print_table, write_json
from holdfast.report.devices import History, histories
from holdfast.report.quantities import number

EXIT_STANDS_OUT = 1
_COLUMNS = ("host", "place", "runs", "faults", "of", "by chance", "named", "screened", "last", "")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``devices`` to the command line."""
    parser = subparsers.add_parser(
        "devices",
        description="List devices, which are places among the ranks of a host, with the faults "
        "found on them in some runs, and a bound of the probability that any of equal devices has "
        "so many. Exit code 1 if one stands out, else 0.",
    )
    text = "directories of the runs"
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path, help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write them to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the devices; return 1 if one stands out, else 0."""
    found = histories(args.run_dirs)
    write_json(args.json, [each.as_dict() for each in found])
    if not found:
        print("no event of these runs names a device: nothing was found on any")
        return 0
    print_table(_COLUMNS, [_row(each) for each in found], right=_COLUMNS[1:8])
    named = sum(each.stands_out for each in found)
    print(f"{named} of {len(found)} devices stand out; at most one list in twenty accuses an")
    print("equal device by chance. `holdfast screen` tests a device before it is replaced.")
    return EXIT_STANDS_OUT if named else 0


def _row(each: History) -> tuple[object, ...]:
    last = time.strftime("%Y-%m-%d %H:%M", time.gmtime(each.last_s)) if each.last_s else ""
    counts = each.runs, each.faults, each.of, number(each.chance), each.evicted, each.screened
    return (each.host, each.place, *counts, last, "stands out" if each.stands_out else "")
