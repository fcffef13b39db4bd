"""The units of a machine that are screened: the cores that this process may use, and GPUs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.errors import ConfigError
from holdfast.memory import available_bytes

LEAST_MEMORY_BYTES = 64 << 20
_CPU = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
# Files with quota and period in microseconds, of control groups of version 2 and of version 1.
_QUOTAS = (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"])


class PinRefused(Exception):
    """The operating system does not let a worker run on its core."""


@dataclass(frozen=True)
class Unit:
    """A core or a GPU.

    Args:
        name: Name in findings, e.g. "core 3" or "cuda:0".
        core: Number of the core to which its worker is pinned; None for a GPU.
        device: Name of the torch device that it computes on.
        kind: Units of the same kind must give equal results, bit for bit.
    """

    name: str
    core: int | None = None
    device: str = "cpu"
    kind: str = "cpu"


def machine_units(cores: Sequence[int] | None = None, *, gpus: bool = True) -> list[Unit]:
    """List the cores in this process's affinity mask (which respects cpusets) and all GPUs.

    Args:
        cores: Numbers of the cores to list; by default all.
        gpus: True to list CUDA devices too.

    Raises:
        ConfigError: This process may not use one of the cores; the message lists those it may.
    """
    allowed = sorted(os.sched_getaffinity(0))
    wanted = allowed if cores is None else list(dict.fromkeys(cores))
    if not wanted or not set(wanted) <= set(allowed):
        raise ConfigError(
            f"--cores {_listed(wanted) or 'none'}: this process may run on {_listed(allowed)}; "
            "name some of these, or widen its affinity or cpuset"
        )
    units = [Unit(f"core {core}", core) for core in wanted]
    return units + (_gpu_units() if gpus else [])


def _gpu_units() -> list[Unit]:
    if not torch.cuda.is_available():
        return []
    names = (f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return [Unit(n, None, n, f"cuda {torch.cuda.get_device_name(n)}") for n in names]


def pin(core: int) -> None:
    """Pin this process to one core; raise PinRefused if the operating system does not allow it."""
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise PinRefused(f"cannot be pinned to core {core}: {error.strerror}") from error
    if os.sched_getaffinity(0) != {core}:
        raise PinRefused(f"was pinned to core {core} and runs on {os.sched_getaffinity(0)}")


def quota_cores() -> float | None:
    """Return the CPU quota of this process's control group, in cores; None without a limit."""
    for names in _QUOTAS:
        try:
            words = " ".join((_CGROUP / name).read_text() for name in names).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


def cache_sizes(core: int) -> list[str]:
    """List a core's caches, by which kernels choose their blocks, e.g. "32K", "512K", "32768K"."""
    paths = sorted((_CPU / f"cpu{core}/cache").glob("index*/size"))
    return [path.read_text().strip() for path in paths]


def _bytes(size: str) -> int:
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(size.rstrip("KMG")) * scale.get(size[-1:], 1)


def default_memory_bytes(units: Sequence[Unit]) -> int:
    """Return the memory that a unit fills with patterns: 64 MiB, or twice the largest cache.

    It is less if all units together would need more than a quarter of the available memory.
    """
    cores = [unit.core for unit in units if unit.core is not None]
    largest = max((_bytes(size) for core in cores for size in cache_sizes(core)), default=0)
    limit = available_bytes() // (4 * max(1, len(units)))
    return max(1 << 20, min(max(LEAST_MEMORY_BYTES, 2 * largest), limit))


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))
