"""The command line, which finds the verb, calls it and turns exceptions into exit codes.

Exit codes: 0 done, 1 the verdict is negative, 2 bad input, 3 (``screen``) no verdict, 70 a defect
of holdfast, 130 interrupted, 141 the reader of standard output is gone.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from holdfast import __version__, logs
from holdfast.cli.parser import new_parser
from holdfast.cli.plots import check_drawable
from holdfast.cli.stdout import OutputLost, checked_stdout
from holdfast.cli.tables import check_writable
from holdfast.errors import ConfigError, HoldfastError

# What each verb does. Its module is imported only when it is asked for, as most need torch.
VERBS = {
    "run": "torchrun, with an SMP that outlives the ranks",
    "spare": "compute steps of a run beside it, to find ranks that err",
    "watch": "show a run that goes on in the terminal",
    "events": "list the fault events of a run",
    "devices": "list the faults of each device over several runs",
    "smp": "keep the snapshots of a node apart from its trainers",
    "snapshots": "look at, verify, save and export a run's snapshots",
    "plan": "compute how often to check, to snapshot and to persist",
    "calibrate": "measure the rounding errors of this device",
    "screen": "load every core and GPU to find those that compute wrong results",
    "report": "one HTML page on a run or a campaign; or a live run's metrics",
}
# Verbs of the laboratory: each is an entry point that names a module with a ``register`` function.
LABORATORY = "holdfast.verbs"
LABORATORY_VERBS = {
    "demo": "train through a storm of faults and end with the same weights",
    "train": "train the byte-level GPT on your own text",
    "study": "reproduce a paper's table or figure",
    "campaign": "inject faults and count what is found and repaired",
    "simulate": "simulate a cluster under faults and check every invariant",
}
NO_LABORATORY = "the package holdfast_lab is not installed"
INSTALL_LABORATORY = "pip install 'torch-holdfast[lab]'"
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DEFECT = 70  # EX_SOFTWARE of sysexits.h: must not be taken for a verdict
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the command line of all verbs; of the others than ``only``, without their options."""
    parser = new_parser("holdfast", "Keeps PyTorch training right and running.")
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, action=_Verbs)
    for name in (*VERBS, *LABORATORY_VERBS):
        if only not in (None, name):
            verbs.add_parser(name)
        elif name in VERBS:
            import_module(f"holdfast.cli.{name}").register(verbs)
        else:
            _register_laboratory(verbs, name)
    return parser


class _Verbs(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The verbs, with what each does."""

    def add_parser(self, name: str, **options: Any) -> Any:
        """Add a verb, described by the tables above."""
        text = (VERBS | LABORATORY_VERBS)[name]
        if name in LABORATORY_VERBS and find_spec("holdfast_lab") is None:
            text = f"not available: {NO_LABORATORY} ({INSTALL_LABORATORY})"
        return super().add_parser(name, **({"help": text} | options))


def _register_laboratory(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str
) -> None:
    """Add a verb of the laboratory, or without the laboratory one that says how to install it."""
    reason = NO_LABORATORY
    try:
        for entry in entry_points(group=LABORATORY, name=name):
            entry.load().register(verbs)
            return
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"

    def run_missing(args: argparse.Namespace) -> int:
        raise ConfigError(f"{reason}; install it with: {INSTALL_LABORATORY}")

    parser = verbs.add_parser(name, add_help=False)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run_missing)


def _complete() -> None:
    """If a shell asks argcomplete for completions, print them and end the process."""
    if "_ARGCOMPLETE" in os.environ:
        from argcomplete import autocomplete

        autocomplete(make_parser("".join(os.environ.get("COMP_LINE", "").split()[1:2])))


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
    words = sys.argv[1:] if arguments is None else arguments
    _complete()
    args = make_parser(next((word for word in words if word[:1] != "-"), "")).parse_args(words)

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
