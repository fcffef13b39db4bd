"""Exclusive locks between processes, in files; the lock of a process that died is free again."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast import config

_RETRY_S = 0.02


@contextmanager
def locked(path: Path, late: Exception, limit_s: float | None = None) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is created if it does not exist.

    Raise ``late`` if another process holds it for longer than ``limit_s`` (``config.timeout_s()``).
    """
    deadline = time.monotonic() + (config.timeout_s() if limit_s is None else limit_s)
    with open(path, "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise late from None
            time.sleep(_RETRY_S)
        yield
