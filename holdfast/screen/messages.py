"""The messages between the runner of a screening and its workers, as picklable values."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from holdfast.screen.difference import Difference
from holdfast.screen.emulation import Emulated
from holdfast.screen.units import Unit


@dataclass(frozen=True)
class Order:
    """The instructions to a worker.

    Args:
        unit: The unit that the worker loads.
        scale: Sizes of the workloads, a name of ``SCALES``.
        memory_bytes: Amount of memory that is filled with patterns.
        rounds: Number of rounds of all workloads; None to work until a deadline.
        faults: Emulated faults, of any unit.
    """

    unit: Unit
    scale: str
    memory_bytes: int
    rounds: int | None
    faults: tuple[Emulated, ...] = ()


@dataclass(frozen=True)
class Ready:
    """The worker is pinned to its core and has made its inputs.

    Args:
        settings: Everything besides the inputs that the bits of its results depend on.
    """

    settings: Mapping[str, str]


@dataclass(frozen=True)
class Trouble:
    """The reason why a unit was not screened to the end.

    Args:
        unit: Name of the unit.
        what: The reason, as text for people.
        suspicious: Whether a healthy unit would not fail in this way.
    """

    unit: str
    what: str
    suspicious: bool = False


@dataclass(frozen=True)
class Observation:
    """One execution of a workload, or several with the same result that no check found wrong.

    Args:
        unit: Name of the unit.
        op: Name of the workload.
        variant: Number of the input.
        digest: Digest of the result's bits.
        count: Number of executions.
        seconds: Time that they took.
        work: Work that they did.
        work_unit: Unit of ``work``, "flop" or "B".
        checks: Messages of the op's own checks.
        differences: Differences from this unit's first result, or from the known right one.
    """

    unit: str
    op: str
    variant: int
    digest: str
    count: int = 1
    seconds: float = 0.0
    work: float = 0.0
    work_unit: str = "flop"
    checks: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class Round:
    """The worker has completed a round of all workloads.

    Args:
        rounds: Number of completed rounds.
        wall_s: Time since work began.
        cpu_s: CPU time since work began.
    """

    rounds: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Done:
    """The worker has finished its rounds and answers requests for results."""


@dataclass(frozen=True)
class Result:
    """The first result of a workload, requested to be compared with another unit's."""

    op: str
    variant: int
    parts: Mapping[str, torch.Tensor]


Message = Ready | Observation | Round | Done | Result | Trouble
