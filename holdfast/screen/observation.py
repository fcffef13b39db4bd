"""What workers tell the runner, as plain picklable values."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from holdfast.screen.difference import Difference
from holdfast.screen.emulation import Emulated
from holdfast.screen.units import Unit


@dataclass(frozen=True)
class Order:
    """What a worker shall do.

    Args:
        unit: whose worker it is; scale: a name of ``SCALES``; memory_bytes: to walk over.
        rounds: of all workloads, each input once; None works until the deadline of the go-ahead.
        faults: emulated ones, of any unit.
    """

    unit: Unit
    scale: str
    memory_bytes: int
    rounds: int | None
    faults: tuple[Emulated, ...] = ()


@dataclass(frozen=True)
class Ready:
    """The worker is pinned and its inputs are made.

    ``settings`` is what its results' bits depend on, besides the inputs.
    """

    settings: Mapping[str, str]


@dataclass(frozen=True)
class Observation:
    """One execution of a workload, or several in a row that gave the same and nothing to say.

    Args:
        unit, op, variant: who computed what; digest: of the result's bits.
        count: executions; seconds: that they took; work: that they did, in flop or bytes.
        checks: what the op's own check found wrong.
        differences: from this unit's first result, or from what is known to be right.
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
    """A worker has done all workloads once more."""

    rounds: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Done:
    """A worker has done its rounds, and answers questions."""


@dataclass(frozen=True)
class Result:
    """The first result of a workload, asked for to be compared with another unit's."""

    op: str
    variant: int
    parts: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Failed:
    """A worker cannot go on, and why; ``odd`` if a healthy core would not fail so."""

    reason: str
    odd: bool = False


Message = Ready | Observation | Round | Done | Result | Failed
