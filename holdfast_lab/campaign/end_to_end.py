"""Trials of a fault in a user's program, from interception to repair."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from holdfast import events, sites
from holdfast.abft.gemm.reference import as_batch
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault
from holdfast.protection import protect
from holdfast.sites import Gemm
from holdfast_lab.campaign.programs import Program
from holdfast_lab.campaign.strikes import Edit
from holdfast_lab.campaign.workload import Problem

STAGES = {
    "output": "output",
    "a": "operand",
    "b": "operand",
    "checksum": "checksum",
    "statistics": "checksum",
}


@dataclass(frozen=True)
class Outcome:
    """What happened to one fault injected into a protected program.

    Args:
        detected: it was reported as an event.
        corrected: the program ended, with the result of a clean run bit for bit.
    """

    detected: bool
    corrected: bool


@dataclass(frozen=True)
class CleanRun:
    """The outcome of a run without faults."""

    rows: int
    suspects: int
    alarms: int


def replay(problem: Problem, edit: Edit, *, kept: bool = False) -> Outcome:
    """Run a product's program under protection with one fault; restore the operands afterwards.

    The events of this process are cleared.

    Args:
        problem: The product and its program.
        edit: The fault.
        kept: Whether to run once before, so that the checksums of weights are cached, and once
            after, when the fault counts as corrected only if that run is clean and silent.
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


def clean_run(program: Program) -> CleanRun:
    """Run a program, protected, without faults; events of this process are forgotten."""
    events.clear()
    with protect(program.model) as protection:
        protection.reset_counters()
        with suppress(UncorrectableFault):
            program.run()
        seen = protection.report().sites
    alarms = len(events.recent())
    events.clear()
    return CleanRun(sum(site.rows for site in seen), sum(site.suspects for site in seen), alarms)


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
        # .data: memory that goes wrong moves no version counter.
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
