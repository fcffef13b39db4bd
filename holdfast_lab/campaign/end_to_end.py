"""Trials of a fault in a whole program: interception, detection and repair."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from holdfast import events, sites
from holdfast.abft.gemm.reference import as_batch
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault
from holdfast.protection import protect
from holdfast.sites import Gemm, Hook
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.programs import Compute, Program
from holdfast_lab.campaign.strikes import Edit
from holdfast_lab.campaign.workload import Problem

Result = TypeVar("Result")

STAGES = {
    "output": "output",
    "a": "operand",
    "b": "operand",
    "checksum": "checksum",
    "statistics": "checksum",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a protected program with one fault.

    Attributes:
        detected: True if an event was recorded.
        corrected: True if the program ended with the result of a clean run, bit for bit.
    """

    detected: bool
    corrected: bool


def replay(problem: Problem, edit: Edit, *, kept: bool = False) -> Outcome:
    """Run a product's program under protection with one fault, and restore the operands afterwards.

    With ``kept`` the program first runs once without the fault, so that the checksums of weights
    are cached. It also runs once afterwards, and the fault counts as corrected only if that run is
    clean and records no event. The events of this process are cleared.
    """
    program = problem.program
    events.clear()
    with protect(program.model):
        if kept:
            program.run()
        digest = _struck(program, edit)
        detected = bool(events.recent())
        corrected = digest == problem.clean_digest
        if kept:
            events.clear()
            corrected &= tensors_digest(program.run()) == digest and not events.recent()
    events.clear()
    return Outcome(detected, corrected)


def clean_run(model: nn.Module, run: Compute) -> Counts:
    """Run a program under protection without faults; the events of this process are cleared."""
    events.clear()
    with protect(model) as protection:
        protection.reset_counters()
        with suppress(UncorrectableFault):
            run()
        seen = protection.report().sites
    alarms = len(events.recent())
    events.clear()
    rows, suspects = sum(site.rows for site in seen), sum(site.suspects for site in seen)
    return Counts(clean_rows=rows, clean_suspects=suspects, false_alarms=alarms)


def observed(
    model: nn.Module, run: Callable[[], list[Result]], hook: Hook, *, verify: bool = True
) -> tuple[list[Result], int]:
    """Run a program under protection with a site hook; return its results and count its events.

    There are no results if an error stopped it. The events of this process are cleared.
    """
    events.clear()
    results: list[Result] = []
    with protect(model, verify=verify), sites.injecting(hook), suppress(UncorrectableFault):
        results = run()
    count = len(events.recent())
    events.clear()
    return results, count


def _struck(program: Program, edit: Edit) -> str:
    """Return the digest of the results with the fault; empty if an error stopped the program."""
    with _armed(program.role, edit), suppress(UncorrectableFault):
        return tensors_digest(program.run())
    return ""


@contextmanager
def _armed(role: str, edit: Edit) -> Iterator[None]:
    """Inject the fault once while the context is open; restore the operand afterwards."""
    blow = _Blow(role, edit)
    try:
        with sites.injecting(blow):
            yield
    finally:
        blow.restore()
    assert blow.struck, f"no product of role {role} was computed"


class _Blow:
    def __init__(self, role: str, edit: Edit) -> None:
        self._role, self._edit = role, edit
        self._undo: tuple[torch.Tensor, torch.Tensor] | None = None
        self.struck = False

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """Inject the fault when its site is reached, as a hook given to ``sites.arm``."""
        if not site.endswith(f"/{self._role}"):
            return
        if stage == STAGES[self._edit.target] and not self.struck:
            self._write(gemm, output)
        if stage == "output" and not self._edit.lasting:
            self.restore()

    def _write(self, gemm: Gemm, output: torch.Tensor | None) -> None:
        self.struck = True
        target = {
            "output": output,
            "a": gemm.a,
            "b": gemm.b,
            "checksum": gemm.row_sum,
            "statistics": gemm.statistics,
        }[self._edit.target]
        assert target is not None
        # .data is written, because wrong memory does not change the version counter.
        struck = as_batch(target.data) if self._edit.target in ("output", "a", "b") else target
        place = struck[self._edit.index]
        if self._edit.target in ("a", "b"):
            self._undo = place, place.clone()
        place.copy_(self._edit.values)

    def restore(self) -> None:
        """Write an operand's original values back."""
        if self._undo is not None:
            place, values = self._undo
            place.copy_(values)
            self._undo = None
