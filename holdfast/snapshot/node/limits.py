"""What the kernel grants this process: file descriptors, and its place among those it may kill."""

import resource
from contextlib import suppress
from pathlib import Path

from holdfast.snapshot.transport.log import log

_OOM_FILE = Path("/proc/self/oom_score_adj")
_OOM_STEP = 500  # of 1000: what is subtracted from the trainer's score
_LEAST_SCORE = -999  # -1000 would mean never


def raise_descriptor_limit() -> int:
    """Allow this process as many file descriptors as it may have; return their number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def lower_oom_score() -> int | None:
    """Have the kernel prefer other processes when memory runs out; return the score in force."""
    try:
        inherited = int(_OOM_FILE.read_text())
    except (OSError, ValueError):
        return None
    wanted = max(_LEAST_SCORE, inherited - _OOM_STEP)
    try:
        _OOM_FILE.write_text(str(wanted))
    except OSError as error:
        log(
            f"oom_score_adj stays {inherited} ({error.strerror}): when memory runs out the kernel "
            "may end this process before the trainer; CAP_SYS_RESOURCE permits to lower it"
        )
        return inherited
    return wanted
