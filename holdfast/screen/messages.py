"""The messages between the runner of a screening and its workers, as picklable values."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from holdfast.screen.difference import Difference
from holdfast.screen.emulation import Emulated
from holdfast.screen.units import Unit


@dataclass(frozen=True)
class Order:
    """The instructions to a worker; without a number of rounds it works until a deadline."""

    unit: Unit
    scale: str
    memory_bytes: int
    rounds: int | None
    faults: tuple[Emulated, ...] = ()


@dataclass(frozen=True)
class Ready:
    """The worker is pinned to its core and has made its inputs.

    ``settings`` is everything besides the inputs that the bits of its results depend on.
    """

    settings: Mapping[str, str]


@dataclass(frozen=True)
class Trouble:
    """The reason why a unit was not screened to the end.

    It is ``suspicious`` if a healthy unit would not fail in this way.
    """

    unit: str
    what: str
    suspicious: bool = False


@dataclass(frozen=True)
class Observation:
    """One execution of a workload, or several with the same result that no check found wrong.

    ``variant`` is the number of the input. ``seconds`` and ``work`` are those of all ``count``
    executions; ``checks`` are messages of the op's own checks. ``differences`` are those from the
    known right result, or without one from this unit's first result.
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
    """The worker has completed this number of rounds since work began."""

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


@dataclass(frozen=True)
class Meet:
    """An order to run collectives as this rank of ``units``, which meet by the file ``store``."""

    rank: int
    units: tuple[str, ...]
    store: str
    elements: int


@dataclass(frozen=True)
class Compared:
    """What rank ``receiver`` got of ``source`` (of all if it is -1), and how it was wrong."""

    op: str
    source: int
    receiver: int
    difference: Difference | None


@dataclass(frozen=True)
class Met:
    """What the worker received in the collectives, or the error that ended them."""

    found: tuple[Compared, ...]
    error: str = ""


Message = Met | Ready | Observation | Round | Done | Result | Trouble
