"""Standard output that may be full, closed, or of an encoding that lacks characters."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO


class OutputLost(Exception):
    """Standard output cannot be written any more; ``error`` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class _Checked:
    """Standard output whose failures are told apart from those of any other file.

    Characters that its encoding lacks, such as parts of odd paths, are shown as escapes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        with _told():
            return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        with _told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputLost(error) from error


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Raise OutputLost if standard output cannot be written before the context has ended."""
    stream: Any = _Checked(sys.stdout)
    try:
        with redirect_stdout(stream):
            yield
            stream.flush()
    except OutputLost:
        _drop(sys.stdout)
        raise


def _drop(stream: TextIO) -> None:
    """Let what a stream still holds go to the null device, as it would be written at the end."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
