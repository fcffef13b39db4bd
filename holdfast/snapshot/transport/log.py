"""The SMP's log, which is its standard error; a full disk costs lines of it and nothing else."""

import sys
from contextlib import suppress


def log(text: str) -> None:
    """Write a line."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
