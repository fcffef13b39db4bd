"""``holdfast screen``: test this machine's cores and GPUs before a job, e.g. from a prolog."""

import argparse
from pathlib import Path

from holdfast.cli.parser import deferred

# FINDERS of holdfast.screen.judge and the keys of SCALES of its job, which import torch.
FINDERS = ("checksum", "repetition", "reference", "comparison", "collective")
SCALES = ("full", "small")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``screen`` to the command line."""
    parser = subparsers.add_parser(
        "screen",
        description="Load every core and GPU of this machine with the same work, again and again, "
        "and compare all results bit for bit: with the first ones, with stored references, and "
        "between the units. Exit code 0 healthy, 1 suspect (the unit, the op and the wrong bits "
        "are named), 2 bad input, 3 unable to tell.",
    )
    add = parser.add_argument
    text = "time to work, e.g. 30s or 5m (default 30s)"
    add("--for", metavar="TIME", dest="time", default="30s", help=text)
    add("--rounds", metavar="N", type=int, help="rounds of all workloads, instead of a time")
    text = "only these cores, e.g. 0-3,8 (default: all that the process may use)"
    add("--cores", metavar="LIST", help=text)
    add("--no-gpu", action="store_true", help="test cores only")
    text = "cores and GPUs without which the verdict is unable (default 1)"
    add("--units", metavar="N", type=int, default=1, help=text)
    text = "memory that each unit fills with patterns (default: more than the cache)"
    add("--memory", metavar="SIZE", help=text)
    text = "stored results to compare with (default: those in the user's cache)"
    add("--reference", metavar="FILE", type=Path, help=text)
    text = "store the results of a healthy screening as a reference"
    add("--store", metavar="FILE", type=Path, help=text)
    text = f"switch off one of {', '.join(FINDERS)}; may be repeated"
    add("--without", metavar="FINDER", action="append", default=[], choices=FINDERS, help=text)
    add("--stop-at-first", action="store_true", help="end with the first wrong result")
    add("--run-dir", metavar="DIR", type=Path, help="record the findings in this run's ledger")
    add("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    add("--scale", choices=SCALES, default="full", help=argparse.SUPPRESS)
    add("--emulate", metavar="FAULT", action="append", default=[], help=argparse.SUPPRESS)
    parser.set_defaults(run=deferred("screening"))
