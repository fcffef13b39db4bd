"""Exclusive locks between processes: files that need no clean-up, as a dead holder's is free."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RETRY_S = 0.02


@contextmanager
def locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of ``path``, which is made if it is not there.

    Args:
        deadline: on the clock ``time.monotonic``, in seconds.

    Raises:
        TimeoutError: another process held it until then.
    """
    with open(path, "ab") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is locked by another process")
            time.sleep(_RETRY_S)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
