"""The laboratory's own command line: ``python -m holdfast_lab simulate``."""

import argparse
import sys
from collections.abc import Sequence

from holdfast.errors import ConfigError
from holdfast_lab.cli import simulate


def main(words: Sequence[str] | None = None) -> int:
    """Run a verb; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m holdfast_lab", description=__doc__)
    simulate.register(parser.add_subparsers(dest="verb", metavar="VERB", required=True))
    args = parser.parse_args(words)
    try:
        code: int = args.run(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
