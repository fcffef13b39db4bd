"""Memory still available to this process, and how far a fault in memory reaches.

This module does not import torch.
"""

import os
from collections.abc import Iterator
from pathlib import Path

# A fault in memory reaches no further than a page; a wider change is an edit of the program.
WIDEST_FAULT_BYTES = 4096
_CGROUP = Path("/sys/fs/cgroup")
_PROC_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Return the bytes that can be allocated now without swapping or an OOM kill.

    It is the minimum of the kernel's MemAvailable and the room left in the memory cgroups (v1 or
    v2) of this process and their ancestors; reclaimable page cache counts as free. Outside Linux
    the machine's total memory is returned, which is an upper bound.
    """
    return max(0, min([_system_available(), *_cgroup_rooms()]))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _system_available() -> int:
    for line in _lines(_MEMINFO):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms() -> Iterator[int]:
    for line in _lines(_PROC_CGROUP):
        _, controllers, path = line.split(":", 2)
        inner = Path(path.strip("/"))
        for group in (inner, *inner.parents):
            if not controllers:
                room = _room(_CGROUP / group, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                room = _room(_CGROUP / "memory" / group, *names)
            else:
                break
            if room is not None:
                yield room


def _room(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root cgroup has no limit; containers may hide ancestors
        return None
    return None if limit == "max" else int(limit) - usage + int(stat.get(cache_name, 0))
