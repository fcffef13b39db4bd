"""holdfast keeps PyTorch computing right and keeps it running.

The public names are loaded on first use, so that ``import holdfast`` costs nothing in processes
that need no tensors (the snapshot management process, ``holdfast --help``).
"""

from typing import TYPE_CHECKING

from holdfast import logs as logs
from holdfast.errors import (
    ConfigError,
    HoldfastError,
    SmpUnavailable,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotLost,
    SnapshotMismatch,
    UncorrectableFault,
)
from holdfast.lazy import on_first_use
from holdfast.version import __version__ as __version__

if TYPE_CHECKING:
    from holdfast import events, inject, nn, planner, replay, thresholds
    from holdfast.abft.gemm.op import matmul
    from holdfast.guard import Guard
    from holdfast.liveness.watchdog import Hang
    from holdfast.optimizers import Optimizers, Schedulers
    from holdfast.protection import Protection, protect
    from holdfast.replay.made_batches import DigestedCollate
    from holdfast.snapshot.client.snapshots import Snapshots

__all__ = [
    "ConfigError",
    "DigestedCollate",
    "Guard",
    "Hang",
    "HoldfastError",
    "Optimizers",
    "Protection",
    "Schedulers",
    "SmpUnavailable",
    "SnapshotCorrupt",
    "SnapshotError",
    "SnapshotLost",
    "SnapshotMismatch",
    "Snapshots",
    "UncorrectableFault",
    "events",
    "inject",
    "matmul",
    "nn",
    "planner",
    "protect",
    "replay",
    "thresholds",
]

_HOME = {
    "DigestedCollate": "holdfast.replay.made_batches",
    "Guard": "holdfast.guard",
    "Hang": "holdfast.liveness.watchdog",
    "Optimizers": "holdfast.optimizers",
    "Protection": "holdfast.protection",
    "Schedulers": "holdfast.optimizers",
    "Snapshots": "holdfast.snapshot.client.snapshots",
    "matmul": "holdfast.abft.gemm.op",
    "protect": "holdfast.protection",
}
_MODULES = ("events", "inject", "nn", "planner", "replay", "thresholds")

logs.set_up()


__getattr__ = on_first_use(__name__, {m: f"holdfast.{m}" for m in _MODULES} | _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
