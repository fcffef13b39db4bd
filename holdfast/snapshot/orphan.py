"""Whether this process ends at once when its parent does (Linux: PR_SET_PDEATHSIG)."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent(on: bool = True) -> None:
    """From now on be sent SIGTERM when the parent ends, or not; stays so across ``exec``."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM) if on else 0, 0, 0, 0)
