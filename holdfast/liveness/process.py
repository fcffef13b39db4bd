"""What the kernel says about a process of this host."""

import threading
from pathlib import Path

_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a device", "Z": "ended"}


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def started(pid: int) -> int:
    """Return when a process started, in ticks since the machine did; 0 if it has ended."""
    try:
        return int(_stat(pid)[19])
    except OSError:
        return 0


def state(pid: int) -> str:
    """Return the state of a process in words: stopped, ended, waiting for a device, or runs."""
    try:
        return _STATES.get(_stat(pid)[0], "runs and does not answer")
    except OSError:
        return "ended"


def computed_s() -> float:
    """Return the seconds in which the main thread has computed, or waited for a core to do so."""
    text = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat").read_text()
    computed, delayed, _ = map(int, text.split())
    return (computed + delayed) / 1e9


def moved_bytes() -> int:
    """Return the bytes that this process has read and written so far, by files or sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines[:2])
