"""``holdfast report``: one HTML page about a run or a campaign, or a live run's metrics."""

import argparse
import threading
from dataclasses import asdict
from pathlib import Path

from holdfast.cli.tables import say, write_json, write_text
from holdfast.errors import ConfigError
from holdfast.report import gather, page, verdict
from holdfast.torchrun import interruptible

PAGE_NAME = "report.html"
PORTS = range(2**16)


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``report`` to the command line."""
    parser = subparsers.add_parser(
        "report",
        description="Write one HTML page, which needs no network, on a run (also while it goes "
        "on), on both runs of holdfast demo, or on a campaign; or serve a run's counters to "
        "Prometheus. Exit code 0 if that was done, whatever the page says.",
    )
    add = parser.add_argument
    text = "directory of a run, a demo or a campaign, or a file of a campaign's results"
    add("source", metavar="RUN", type=Path, help=text)
    add("--out", metavar="FILE", type=Path, help=f"file of the page (default: RUN/{PAGE_NAME})")
    text = "another run to compare with, such as an unprotected one"
    add("--baseline", metavar="DIR", type=Path, help=text)
    add("--json", metavar="FILE", type=Path, help="also write what the page says to FILE")
    serve = parser.add_argument_group("instead of a page").add_argument
    text = "serve Prometheus metrics on this port until Ctrl-C"
    serve("--serve", metavar="PORT", type=_port, help=text)
    text = "address to serve on (default 127.0.0.1)"
    serve("--address", metavar="A", default="127.0.0.1", help=text)
    parser.set_defaults(run=run)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) not in PORTS:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 (any free one) to {PORTS[-1]}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Write the page, or serve metrics until Ctrl-C or SIGTERM; return 0."""
    if args.serve is not None:
        return _serve(args)
    out = args.out or (args.source if args.source.is_dir() else args.source.parent) / PAGE_NAME
    report = gather(args.source, args.baseline)
    said = verdict(report)
    write_text(out, page(report))
    write_json(args.json, {"verdict": asdict(said), **report.as_dict()})
    for line in (said.headline, *said.lines):
        say(line)
    say(f"report: {out}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    for name in ("out", "baseline", "json"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} goes with a page, not with --serve: give one of them")
    try:
        from holdfast.report.exporter import serving
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--serve needs {error.name}, which is not installed: "
            "pip install 'torch-holdfast[metrics]'"
        ) from error
    try:
        interruptible()
        with serving(args.source, args.serve, args.address) as url:
            say(f"metrics of {args.source}: {url} (Ctrl-C ends)", flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print("ended")
    return 0
