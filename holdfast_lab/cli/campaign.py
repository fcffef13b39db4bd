"""``holdfast campaign``: inject faults into a script's model, or into products of every kind."""

import argparse
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from holdfast.cli.tables import check_writable, write_json
from holdfast.errors import ConfigError
from holdfast.inject.targets import WHAT
from holdfast.torchrun import interruptible
from holdfast_lab.campaign import (
    DISTRIBUTIONS,
    DTYPES,
    FAULTS,
    FULL,
    OPERATORS,
    QUICK,
    SITES,
    TILE_SITES,
    Filters,
    Plan,
    broken_claims,
    check_parquet,
    finished,
    make_plan,
    plot_bits,
    run_campaign,
    write_results,
)
from holdfast_lab.campaign.plan import Shape
from holdfast_lab.campaign.runner import Watch
from holdfast_lab.cli import say
from holdfast_lab.cli.campaign_report import print_report, report_as_json
from holdfast_lab.cli.campaign_script import run_script

MOST_DIGITS = 5


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``campaign`` to the command line."""
    parser = subparsers.add_parser(
        "campaign",
        description="With a script that defines model and inputs: run the model with one fault at "
        "a time, and count what becomes of its outputs (holdfast.inject.campaign). Without: "
        "inject faults of every kind into matrix products (and, with --operator "
        "attention, into the tiles of fused attention), and report the rates of "
        "detection and repair with their intervals, and what undetected faults do. Results are "
        "kept by cell: the same command with the same --out continues where it was stopped. Exit "
        "code 1 if docs/fault_model.md is contradicted: an event on clean data, an INF or NaN (or "
        "near-INF in an element of a product) that does harm and was not found, or a reported "
        "fault in a product or checksum that was not repaired bit for bit.",
    )
    parser.add_argument(
        "script",
        nargs="?",
        type=Path,
        metavar="SCRIPT.py",
        help="defines model and inputs, and if it wants outcome, faults, run, optimizer",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="small products, 128 faults a cell: the default"
    )
    size.add_argument("--full", action="store_true", help="the paper's sizes, 10,000 faults a cell")
    _add_filters(parser)
    add = parser.add_argument
    add("--trials", metavar="N", type=int, help="faults injected in each cell")
    add("--end-to-end", metavar="N", type=int, help="of these, run through interception and repair")
    add("--seed", type=int, default=0, help="of everything drawn (default 0)")
    add("--workers", metavar="N", type=int, help="processes (default: one a core)")
    add("--out", metavar="DIR", type=Path, help="default: runs/campaign-<date>-<time>")
    add(
        "--parquet",
        action=argparse.BooleanOptionalAction,
        help="the results as Parquet, beside CSV (default: if pyarrow is installed)",
    )
    add("--json", metavar="FILE", type=Path, help="also write the summary to FILE")
    parser.set_defaults(run=run)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("only these (several may follow each)")
    for name, choices in (
        ("dtype", DTYPES),
        ("operator", OPERATORS),
        ("site", TILE_SITES | SITES),
        ("distribution", DISTRIBUTIONS),
    ):
        group.add_argument(
            f"--{name}",
            nargs="+",
            choices=choices,
            default=(),
            metavar="NAME",
            help=", ".join(choices),
        )
    kinds = ", ".join(FAULTS)
    group.add_argument(
        "--fault",
        nargs="+",
        default=(),
        metavar="NAME",
        help=f"{kinds}; flip-BIT, flip-BIT-up, flip-BIT-down or flip-BIT-any for one bit; for a "
        "script also those of docs/campaigns.md",
    )
    group.add_argument(
        "--what", nargs="+", choices=WHAT, metavar="NAME", help=f"of a script: {', '.join(WHAT)}"
    )
    group.add_argument(
        "--shape", nargs="+", type=_shape, default=(), metavar="MxKxN", help="such as 128x1024x256"
    )


def _shape(text: str) -> Shape:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write MxKxN, as 128x1024x256")
    if max(map(len, match.groups())) > MOST_DIGITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too large: at most {MOST_DIGITS} digits each"
        )
    return int(match[1]), int(match[2]), int(match[3])


def plan_of(args: argparse.Namespace) -> Plan:
    """Make the plan that the parsed command line describes."""
    filters = Filters(
        operators=args.operator,
        dtypes=args.dtype,
        sites=args.site,
        faults=args.fault,
        shapes=args.shape,
        distributions=args.distribution,
    )
    return make_plan(
        FULL if args.full else QUICK,
        filters,
        trials=args.trials,
        end_to_end=args.end_to_end,
        seed=args.seed,
    )


def run(args: argparse.Namespace) -> int:
    """Run the campaign to its end; return 1 if it contradicts the fault model, else 0."""
    interruptible()
    check_writable(args.json)
    if args.parquet:
        check_parquet()
    if args.script is not None:
        return run_script(args)
    if args.what:
        raise ConfigError("--what is for the model of a script; name the script, or use --site")
    plan = plan_of(args)
    directory = args.out or Path("runs") / time.strftime("campaign-%Y%m%d-%H%M%S")
    console = Console()
    say(console, f"{len(plan.cells):,} cells of {plan.trials:,} faults; kept in {directory}")
    try:
        with _progress(console) as watch:
            results = run_campaign(plan, directory, workers=args.workers, watch=watch)
    except KeyboardInterrupt:
        done = finished(plan, directory)
        write_results(done, directory, parquet=args.parquet)
        console.print(f"stopped after {len(done):,} cells; the same command continues")
        raise
    files = write_results(results, directory, parquet=args.parquet)
    plots = plot_bits(results, directory)
    broken = broken_claims(results)
    print_report(console, results, broken)
    say(
        console,
        f"results: {', '.join(map(str, files)) or 'none'}; plots: "
        f"{', '.join(path.name for path in plots) or 'none'}",
    )
    if args.json is not None:
        write_json(args.json, report_as_json(plan, directory, results, broken))
    return 1 if broken else 0


@contextmanager
def _progress(console: Console) -> Iterator[Watch]:
    columns = (
        TextColumn("cells"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task("cells", total=None)
        yield lambda done, cells: progress.update(task, completed=done, total=cells)
