"""The command line, which finds the verb, calls it and turns exceptions into exit codes.

Exit codes: 0 done, 1 the verdict is negative, 2 bad input, 3 (``screen``) no verdict, 70 a defect
of holdfast, 130 interrupted, 141 the reader of standard output is gone.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import entry_points

from holdfast import __version__, logs
from holdfast.cli import calibrate, devices, events, plan, report, run, screen, snapshots, watch
from holdfast.cli.parser import new_parser
from holdfast.cli.plots import check_drawable
from holdfast.cli.stdout import OutputLost, checked_stdout
from holdfast.cli.tables import check_writable
from holdfast.errors import ConfigError, HoldfastError

VERBS = (run, watch, events, devices, snapshots, plan, calibrate, screen, report)
# Verbs of the laboratory: each is an entry point that names a module with a ``register`` function.
LABORATORY = "holdfast.verbs"
LABORATORY_VERBS = ("demo", "train", "study", "campaign")
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DEFECT = 70  # EX_SOFTWARE of sysexits.h: must not be taken for a verdict
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def make_parser() -> argparse.ArgumentParser:
    """Build the command line of all verbs."""
    parser = new_parser("holdfast", "Keeps PyTorch training right and running.")
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
    """Run a verb and return its exit code.

    An error that the user can correct is one line on standard error. Any other exception is a
    defect of holdfast: it is shown whole, and its exit code is not that of a verdict.
    """
    args = make_parser().parse_args(arguments)

    def complain(error: object) -> None:
        print(f"holdfast {args.verb}: {logs.printable(str(error))}", file=sys.stderr)

    try:
        with checked_stdout():
            return _run(args)
    except ConfigError as error:
        complain(error)
        return EXIT_BAD_INPUT
    except HoldfastError as error:
        complain(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except OutputLost as lost:
        if isinstance(lost.error, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        complain(f"cannot write the output: {lost.error.strerror}")
        return EXIT_FAILED
    except OSError as error:
        if isinstance(error, ConnectionError) or error.filename is None:
            return _defect(args.verb)
        complain(f"cannot use {error.filename}: {error.strerror}; name another path")
        return EXIT_BAD_INPUT
    except Exception:
        return _defect(args.verb)


def _run(args: argparse.Namespace) -> int:
    """Run a verb, whose outputs are checked first."""
    # The verbs of the laboratory check their own outputs, and report the thousands of faults that
    # they inject themselves, instead of in the log.
    laboratory = args.verb in LABORATORY_VERBS
    with nullcontext() if laboratory else logs.shown():
        if not laboratory:
            _check_outputs(args)
        code: int = args.run(args)
        return code


def _defect(verb: str) -> int:
    """Show the exception that is being handled, which is nobody's input; return its exit code."""
    traceback.print_exc()
    print(
        f"holdfast {verb}: this is a defect of holdfast {__version__}, not a verdict; please "
        "report it with the traceback above",
        file=sys.stderr,
    )
    return EXIT_DEFECT


if __name__ == "__main__":
    sys.exit(main())
