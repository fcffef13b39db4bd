"""The zoo's campaign on the command line.

    python -m holdfast_lab.zoo [--loops NAME …] [--seeds A-B] [--json FILE] [--table]

Every loop runs calm, with each kind of fault, and with a SIGKILL; its result is compared bit for
bit with that of the same loop without holdfast and without faults. Exit code 1 if one differs.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast import ConfigError
from holdfast.cli.tables import check_writable, print_table, write_json
from holdfast.torchrun import interruptible
from holdfast_lab.cli import say
from holdfast_lab.zoo import campaign
from holdfast_lab.zoo.cases import Outcome
from holdfast_lab.zoo.catalogue import LOOPS, chosen, table


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; return the exit code."""
    args = parsed(words)
    if args.table:
        sys.stdout.write(table())
        return 0
    interruptible()
    try:
        check_writable(args.json)
        cases = campaign.cases(chosen(args.loops), args.seeds)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # as the models are too small for more, and rounding depends on it
    outcomes = run(cases)
    print_table(campaign.COLUMNS, campaign.rows(outcomes), right=campaign.COLUMNS[2:])
    write_json(
        args.json,
        {**campaign.summary(outcomes), "outcomes": campaign.described(outcomes)},
    )
    return 0 if all(outcome.good for outcome in outcomes) else 1


def run(cases: Sequence[campaign.Case]) -> list[Outcome]:
    """Run cases with a bar on standard error; print what is wrong at once."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    outcomes = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("zoo", total=len(cases))
        for outcome in campaign.run(cases):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=f"{outcome.loop} {outcome.fault}")
            if not outcome.good:
                words = f"{outcome.loop}, {outcome.fault}, seed {outcome.seed}: {outcome.result}"
                say(console, f"{words}; {outcome.place}; {outcome.said}")
    return outcomes


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m holdfast_lab.zoo", description=__doc__)
    parser.add_argument("--loops", nargs="+", default=(), metavar="NAME", help=", ".join(LOOPS))
    parser.add_argument(
        "--seeds", type=_seeds, default=range(1, 4), metavar="A-B", help="default 1-3"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every outcome")
    parser.add_argument("--table", action="store_true", help="print docs/loops.md's table instead")
    return parser.parse_args(words)


def _seeds(text: str) -> range:
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds; write 1-5, or 3")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


if __name__ == "__main__":
    sys.exit(main())
