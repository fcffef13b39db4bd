"""``holdfast``: parse, call, print.

Exit codes: 0 done, 1 the verdict is no, 2 bad input, 3 (``screen``) no verdict.
"""

import argparse
import sys
from collections.abc import Sequence

from holdfast import __version__
from holdfast.cli import (
    calibrate,
    campaign,
    demo,
    events,
    plan,
    report,
    run,
    screen,
    snapshots,
    study,
    train,
)
from holdfast.errors import ConfigError, HoldfastError

VERBS = (demo, train, run, events, snapshots, plan, study, calibrate, screen, campaign, report)
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def make_parser() -> argparse.ArgumentParser:
    """The command line of all verbs."""
    parser = argparse.ArgumentParser(
        prog="holdfast", description="Keeps PyTorch training right and running."
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in VERBS:
        module.register(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; errors that the user can mend are one line on stderr and exit code 2."""
    args = make_parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except ConfigError as error:
        print(f"holdfast {args.verb}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except HoldfastError as error:
        print(f"holdfast {args.verb}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"holdfast {args.verb}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
