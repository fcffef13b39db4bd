"""The command line, which finds the verb, calls it and turns exceptions into exit codes.

Exit codes: 0 done, 1 the verdict is negative, 2 bad input, 3 (``screen``) no verdict.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import entry_points

from holdfast import __version__, logs
from holdfast.cli import calibrate, events, plan, report, run, screen, snapshots
from holdfast.cli.plots import check_drawable
from holdfast.cli.tables import check_writable
from holdfast.errors import ConfigError, HoldfastError

VERBS = (run, events, snapshots, plan, calibrate, screen, report)
# Verbs of the laboratory: each is an entry point that names a module with a ``register`` function.
LABORATORY = "holdfast.verbs"
LABORATORY_VERBS = ("demo", "train", "study", "campaign")
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """Build the command line of all verbs."""
    parser = argparse.ArgumentParser(
        prog="holdfast", description="Keeps PyTorch training right and running."
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in VERBS:
        module.register(verbs)
    for name in LABORATORY_VERBS:
        _register_laboratory(verbs, name)
    return parser


def _register_laboratory(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str
) -> None:
    """Add a verb of the laboratory, or without the laboratory one that says how to install it."""
    reason, remedy = (
        "the package holdfast_lab is not installed",
        "pip install 'torch-holdfast[lab]'",
    )
    try:
        for entry in entry_points(group=LABORATORY, name=name):
            entry.load().register(verbs)
            return
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"

    def run_missing(args: argparse.Namespace) -> int:
        raise ConfigError(f"{reason}; install it with: {remedy}")

    parser = verbs.add_parser(name, help=f"not available: {reason} ({remedy})", add_help=False)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run_missing)


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise ConfigError if a file that an option names cannot be written."""
    for name in ("json", "write", "out"):
        check_writable(getattr(args, name, None))
    if getattr(args, "plot", None) is not None:
        check_drawable(args.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; errors that the user can correct are one line on stderr and exit code 2."""
    args = make_parser().parse_args(arguments)

    def complain(error: object) -> None:
        print(f"holdfast {args.verb}: {logs.printable(str(error))}", file=sys.stderr)

    # The verbs of the laboratory check their own outputs, and report the thousands of faults that
    # they inject themselves, instead of in the log.
    laboratory = args.verb in LABORATORY_VERBS
    try:
        with nullcontext() if laboratory else logs.shown():
            if not laboratory:
                _check_outputs(args)
            code: int = args.run(args)
    except ConfigError as error:
        complain(error)
        return EXIT_BAD_INPUT
    except OSError as error:
        if isinstance(error, BrokenPipeError | ConnectionError) or error.filename is None:
            raise
        complain(f"cannot use {error.filename}: {error.strerror}; name another path")
        return EXIT_BAD_INPUT
    except HoldfastError as error:
        complain(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
