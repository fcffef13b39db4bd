"""Log output on standard error, for the ``holdfast`` command and the scripts that it runs.

As a library, holdfast only logs to the logger ``holdfast``; the application chooses the handlers.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

LOG_VARIABLE = "HOLDFAST_LOG"
FORMAT = "%(levelname)s %(name)s: %(message)s"

_logger = logging.getLogger("holdfast")


def printable(text: str) -> str:
    """Replace what a terminal would obey instead of show: controls, escapes and line breaks."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode()
        for each in text
    )


class _OneLine(logging.Formatter):
    """Formats a record such that values in its message cannot write to the terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)


def _is_wanted(record: logging.LogRecord) -> bool:
    """Drop records that rank 0 shows already, and all if the application has log handlers."""
    same_on_all_ranks = record.levelno < logging.WARNING and os.environ.get("RANK", "0") != "0"
    return not same_on_all_ranks and not logging.getLogger().handlers


def _handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine(FORMAT))
    return handler


@contextmanager
def shown() -> Iterator[None]:
    """Show log records of level INFO and above while the context is open.

    With ``HOLDFAST_LOG`` they are shown already, from the level that it names.
    """
    if any(isinstance(each, logging.StreamHandler) for each in _logger.handlers):
        yield
        return
    handler, level = _handler(), _logger.level
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        _logger.removeHandler(handler)
        _logger.setLevel(level)


def set_up() -> None:
    """Show records from the level that ``HOLDFAST_LOG`` names; show none if it is not set."""
    _logger.addHandler(logging.NullHandler())
    level = logging.getLevelNamesMapping().get(os.environ.get(LOG_VARIABLE, ""))
    if level is not None:
        handler = _handler()
        handler.addFilter(_is_wanted)
        _logger.addHandler(handler)
        _logger.setLevel(level)
