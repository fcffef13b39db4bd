"""Every exception holdfast raises.

HoldfastError
├── ConfigError             what the user asked for cannot be done (exit code 2)
├── UncorrectableFault      wrong arithmetic that recomputation did not repair
└── SnapshotError
    ├── SnapshotCorrupt     a stored snapshot does not match its digest
    ├── SnapshotLost        no intact snapshot is left to restore
    ├── SnapshotMismatch    an intact snapshot of another model, optimizer or world size
    └── SmpUnavailable      the snapshot management process cannot be started or reached
"""


class HoldfastError(Exception):
    """Base class of all holdfast errors."""


class ConfigError(HoldfastError):
    """A setting, file or argument is unusable; the message names the value and the remedy."""


class UncorrectableFault(HoldfastError):
    """A fault was confirmed and every bounded attempt to repair it failed."""


class SnapshotError(HoldfastError):
    """Base class of the snapshot errors."""


class SnapshotCorrupt(SnapshotError):
    """A stored snapshot does not match its digest."""


class SnapshotLost(SnapshotError):
    """Snapshots were taken but none that is intact is left."""


class SnapshotMismatch(SnapshotError):
    """The snapshot is intact but belongs to another model, optimizer or world size."""


class SmpUnavailable(SnapshotError):
    """The snapshot management process (SMP) cannot be started or does not answer in time."""
