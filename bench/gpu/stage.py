"""A stage of ``bench.gpu``: its rows, its goals, and the machine that it runs on."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from holdfast.abft.gemm import devices
from holdfast.abft.gemm.interception import interception
from holdfast.protection import Protection, protect
from holdfast_lab.emulation.stand_in import cpu_as_device

Row = dict[str, Any]  # "case" names it within its stage


class WrongResult(Exception):
    """Something was computed or judged wrong, so that no figure that follows could be trusted."""


def demand(holds: bool, message: str) -> None:
    """Raise WrongResult with the message unless a statement holds."""
    if not holds:
        raise WrongResult(message)


@dataclass(frozen=True)
class Machine:
    """The device that is measured; in a rehearsal CPU stands in for it, at toy sizes."""

    rehearsed: bool

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        return torch.device("cpu") if self.rehearsed else torch.device("cuda", 0)

    @property
    def key(self) -> str:
        """The dispatch key of the device's products."""
        return "CPU" if self.rehearsed else "CUDA"

    @cached_property
    def backend(self) -> str:
        """The name of the backend that verifies the device's products."""
        return "aten" if self.rehearsed else devices.prepared_backend(self.device)

    @contextmanager
    def protected(self, model: nn.Module) -> Iterator[Protection]:
        """Verify a model's products on the device; raise WrongResult if that is not done."""
        with ExitStack() as stack:
            if self.rehearsed:
                stack.enter_context(cpu_as_device())
            else:
                devices.intercept(self.device)
            protection = stack.enter_context(protect(model))
            verified = devices.is_intercepted(self.device.type)
            demand(verified, f"products on {self.device.type} are not verified: no backend")
            yield protection

    def largest_ratio(self) -> float:
        """Return the largest ``|D| / T`` in the ledger, and empty it; it waits for the device."""
        values, _ = interception().ledger(self.device)
        ratio = values.view(torch.float32).max().item() if len(values) else 0.0
        values.zero_()
        return ratio

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.rehearsed:
            torch.cuda.synchronize()


@contextmanager
def unchecked(protection: Protection) -> Iterator[None]:
    """Verify nothing in the block."""
    assert protection._interception is not None
    protection._interception.verify(False)
    try:
        yield
    finally:
        protection._interception.verify(True)


def unverified(protection: Protection) -> list[str]:
    """List the products that are not covered, other than those of fused attention."""
    sites = [row.site for row in protection.report().sites if not row.covered]
    ops = {site: site.split("/")[-2] if "/" in site else site for site in sites}
    return [site for site, op in ops.items() if "attention" not in op]


@dataclass(frozen=True)
class Goal:
    """A bound on one column of a stage's rows.

    Args:
        name: What is bounded.
        case: Beginning of the ``case`` of the rows that count.
        column: Column of the rows.
        limit: Largest value that meets the goal; the smallest, with ``at_least``.
        shown: Format of the values.
        contains: Text that ``case`` contains.
    """

    name: str
    case: str
    column: str
    limit: float
    shown: str = "{:.3f}"
    at_least: bool = False
    contains: str = ""

    def found(self, rows: Sequence[Row]) -> float | None:
        """Return the worst value; None if there is none."""
        ours = (row for row in rows if row["case"].startswith(self.case))
        values = [r[self.column] for r in ours if self.contains in r["case"] and self.column in r]
        return (min if self.at_least else max)(values, default=None)

    def met(self, rows: Sequence[Row]) -> bool:
        """Return whether the worst value is there, and within the limit."""
        found = self.found(rows)
        if found is None:
            return False
        return found >= self.limit if self.at_least else found <= self.limit


@dataclass(frozen=True)
class Stage:
    """A part of the sequence, which runs in a process of its own.

    ``run`` yields its rows, and may leave out the cases that it is given, which an earlier call
    recorded. ``unrehearsed`` is the reason why it cannot run without a CUDA device.
    """

    number: int
    name: str
    limit_s: float
    run: Callable[[Machine, Collection[str]], Iterator[Row]]
    goals: tuple[Goal, ...] = ()
    unrehearsed: str = ""
