"""Showing on standard error what holdfast logs, for the command line and the scripts it runs.

Everywhere else holdfast only logs, under the logger ``holdfast``, and the application decides what
is shown.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

LOG_VARIABLE = "HOLDFAST_LOG"
FORMAT = "%(levelname)s %(name)s: %(message)s"

_logger = logging.getLogger("holdfast")


def _is_wanted(record: logging.LogRecord) -> bool:
    """Leave out what rank 0 says already, and everything if the application shows logs itself."""
    same_on_all_ranks = record.levelno < logging.WARNING and os.environ.get("RANK", "0") != "0"
    return not same_on_all_ranks and not logging.getLogger().handlers


def _handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    return handler


@contextmanager
def shown() -> Iterator[None]:
    """Show what is logged from INFO on, while the context lasts."""
    handler, level = _handler(), _logger.level
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(level)


def set_up() -> None:
    """Log nowhere, or as the environment variable ``HOLDFAST_LOG`` says: the name of a level."""
    _logger.addHandler(logging.NullHandler())
    level = logging.getLevelNamesMapping().get(os.environ.get(LOG_VARIABLE, ""))
    if level is not None:
        handler = _handler()
        handler.addFilter(_is_wanted)
        _logger.addHandler(handler)
        _logger.setLevel(level)
