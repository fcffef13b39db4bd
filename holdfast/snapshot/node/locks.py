"""Exclusive locks between processes: files that need no clean-up, as a dead holder's is free."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast import config

_RETRY_S = 0.02


@contextmanager
def locked(path: Path, late: Exception) -> Iterator[None]:
    """Hold the lock of ``path``, which is made if it is not there.

    Args:
        path: of the file.
        late: raised if another process holds the lock for longer than ``config.timeout_s()``.
    """
    deadline = time.monotonic() + config.timeout_s()
    with open(path, "ab") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise late
            time.sleep(_RETRY_S)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
