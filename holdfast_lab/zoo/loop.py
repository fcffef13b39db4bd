"""The base of the zoo's training loops: a loop as its author wrote it, and the same with holdfast.

A loop is seeded when it is made. ``bare`` trains it without holdfast. ``guarded`` trains it with
the few lines that a user adds; its run directory and the share of audited steps come from the
environment, as ``holdfast.config`` reads them.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast import Protection, Snapshots
from holdfast.digest.tensors import state_digest


class Form(StrEnum):
    """How a loop uses a Guard; a string as ``docs/loops.md`` shows it."""

    STEP = "`guard.step`"
    MICRO_STEP = "`guard.micro_step`"
    ATTACH = "`Guard.attach`"
    REFUSED = "refused"


class FaultKind(StrEnum):
    """What happens to a run of a loop."""

    CALM = "calm"
    FORWARD = "forward"  # in a matrix product of the forward pass
    BACKWARD = "backward"  # in a matrix product of the backward pass
    OUTSIDE = "outside"  # in an activation or a gradient, outside matrix products
    REST = "rest"  # a bit of a weight or of the optimizer's state, between two steps
    KILL = "kill"  # SIGKILL of the process, which is started again


class Loop:
    """A small training run with the structure of a well-known public one.

    Attributes:
        name: Its name on the command line.
        like: What it is modelled on, and what is special in it.
        form: How it uses a Guard.
        repeated: What a Guard repeats if a step is in doubt.
        remember: What its user has to do, or what to do instead if it is refused.
        faults: What can happen to it without changing its result.
        compiles: True if it uses ``torch.compile``.
        model: The module that is trained; one that holds several models if there are several.
        optimizers: The optimizers, in the order in which they are made.
        protection, snapshots: What ``guarded`` made.
    """

    name: ClassVar[str]
    like: ClassVar[str]
    form: ClassVar[Form]
    repeated: ClassVar[str]
    remember: ClassVar[str]
    faults: ClassVar[Sequence[FaultKind]] = tuple(FaultKind)
    compiles: ClassVar[bool] = False

    model: nn.Module
    optimizers: Sequence[Optimizer]
    protection: Protection | None = None
    snapshots: Snapshots | None = None

    def bare(self) -> None:
        """Train as the author of the loop wrote it, without holdfast."""
        raise NotImplementedError

    def guarded(self) -> None:
        """Train with holdfast, continuing from a snapshot if there is one."""
        raise NotImplementedError

    def parts(self) -> Sequence[Any]:
        """Return everything besides model and optimizers whose state belongs to the result."""
        return ()

    def digest(self) -> str:
        """Return the digest of the states of the model, the optimizers and the other parts."""
        held = (self.model, *self.optimizers, *self.parts())
        return state_digest([each.state_dict() for each in held])


def made(kind: type[Loop]) -> Loop:
    """Make a loop; a compiled one is compiled anew, as in a process of its own."""
    if kind.compiles:
        torch.compiler.reset()
    return kind()


def draw(*shape: int, seed: int) -> torch.Tensor:
    """Return standard normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_tokens(*shape: int, below: int, seed: int) -> torch.Tensor:
    """Return token numbers that depend on the seed alone."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))
