"""``holdfast smp``: keep a run's snapshots in another cgroup than its trainers."""

import argparse
import math
import time
from contextlib import suppress
from pathlib import Path

from holdfast import config
from holdfast.cli.tables import say
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.snapshot.node import host, launch


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``smp`` to the command line."""
    what = "Start the SMPs that trainers ask for, as children of this process, until it is ended; "
    what += "then end them. For a sidecar container, a job step or a unit: docs/howto/deploy.md."
    parser = subparsers.add_parser("smp", description=what)
    add = parser.add_argument
    add("--run-dir", metavar="DIR", type=Path, help="directory of the run, on this node")
    text = "end after S seconds without an SMP (default: never)"
    add("--idle-s", metavar="S", type=float, default=math.inf, help=text)
    text = "only ask whether such a process serves DIR; exit code 1 if none does"
    add("--healthy", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return 0."""
    run_dir = config.run_dir(args.run_dir)
    if args.healthy:
        return 1 if host.ask(run_dir, [], config.timeout_s()) is None else 0
    if not args.idle_s > 0:
        raise ConfigError(f"--idle-s {args.idle_s}: must be more than 0 seconds")
    seen_s = time.monotonic()

    def idle() -> bool:
        nonlocal seen_s
        with suppress(SmpUnavailable):  # it is busy or stopped, but there
            if launch.smp_status(run_dir) is not None:
                seen_s = time.monotonic()
        return bool(time.monotonic() - seen_s > args.idle_s)

    launch.prepare(run_dir)
    say(f"starts the snapshot processes of {run_dir} until it is ended")
    host.serve(run_dir, run_dir / launch.LOG_NAME, idle)
    with suppress(SmpUnavailable):
        launch.stop_smp(run_dir)
    return 0
