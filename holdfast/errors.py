"""Exceptions that holdfast raises.

HoldfastError
├── ConfigError             what the user asked for cannot be done (exit code 2)
├── UncorrectableFault      wrong arithmetic that recomputation did not repair
└── SnapshotError
    ├── SnapshotCorrupt     a stored snapshot does not match its digest
    ├── SnapshotLost        no intact snapshot is left to restore
    ├── SnapshotMismatch    an intact snapshot of another run, model, optimizer or world size
    └── SmpUnavailable      the snapshot management process cannot be started or reached
"""


class HoldfastError(Exception):
    """Base class of all holdfast errors."""


class ConfigError(HoldfastError):
    """An unusable setting, file or argument; the message names the value and the remedy."""


class UncorrectableFault(HoldfastError):
    """A confirmed fault that a limited number of recomputations could not repair."""


class SnapshotError(HoldfastError):
    """Base class of the snapshot errors."""


class SnapshotCorrupt(SnapshotError):
    """A stored snapshot that does not match its digest."""


class SnapshotLost(SnapshotError):
    """No intact snapshot is left, although snapshots were taken."""


class SnapshotMismatch(SnapshotError):
    """An intact snapshot of another run, model, optimizer or world size."""


class SmpUnavailable(SnapshotError):
    """The snapshot management process (SMP) cannot be started or does not answer in time."""
