"""Loops with the structure of public ones: calm, struck and killed, with the bits of the bare loop.

One seed for each loop and fault; ``python -m holdfast_lab.zoo`` runs more.
"""

from typing import Any

import pytest
import torch

from holdfast import Guard, Snapshots, protect
from holdfast_lab.zoo.cases import DIFFERENT, EQUAL, REFUSED, Outcome, run_case
from holdfast_lab.zoo.catalogue import LOOPS
from holdfast_lab.zoo.clock import observe
from holdfast_lab.zoo.loop import FaultKind, Form, Loop
from holdfast_lab.zoo.loops_vision import Diffusion

pytestmark = pytest.mark.processes

SEED = 3
FIRST = ("nanogpt", "ema")  # of two forms; the others are for `make test-rest`
# What happens to the others, in turn; the campaign (`bench.zoo`) has each loop with each fault.
IN_TURN = (
    (FaultKind.CALM, FaultKind.FORWARD, FaultKind.OUTSIDE),
    (FaultKind.CALM, FaultKind.BACKWARD, FaultKind.REST, FaultKind.KILL),
)


def marked(name: str) -> Any:
    """The parameter of a loop with its marks."""
    marks = [pytest.mark.representative] if name in FIRST else []
    marks += [pytest.mark.compile, pytest.mark.timeout(300)] if LOOPS[name].compiles else []
    return pytest.param(name, marks=marks)


def outcomes_of(kind: type[Loop], *faults: FaultKind, seed: int = SEED) -> list[Outcome]:
    """What comes of a loop with each of these faults that it can have."""
    if kind.form is Form.REFUSED:
        return [run_case(kind, FaultKind.CALM, seed, None)]  # type: ignore[arg-type]
    calm = observe(kind)
    return [run_case(kind, fault, seed, calm) for fault in faults if fault in kind.faults]


@pytest.mark.parametrize("name", [marked(name) for name in LOOPS])
def test_a_loop_ends_with_the_bits_of_its_bare_run_whatever_happens(name: str) -> None:
    kind = LOOPS[name]
    if name == "huggingface":
        pytest.importorskip("transformers", "5.23", reason="the extra 'lab' is not installed")
    # Each run of a compiled loop compiles anew.
    some = (FaultKind.BACKWARD,) if kind.compiles else IN_TURN[list(LOOPS).index(name) % 2]
    found = outcomes_of(kind, *(FaultKind if name in FIRST else some))
    expected = REFUSED if kind.form is Form.REFUSED else EQUAL
    assert [outcome for outcome in found if outcome.result != expected] == []
    struck = [outcome.harmful for outcome in found if outcome.harmful is not None]
    assert sum(struck) >= len(struck) // 2


class Unaudited(Diffusion):
    """The loop whose Guard computes no step twice."""

    def guarded(self) -> None:
        self.protection = protect(self.model)
        self.snapshots = Snapshots(self.model, self.optimizer, extra=self.average)
        with Guard(
            self.model, self.optimizer, snapshots=self.snapshots, clip_grad_norm=1.0, audit=0.0
        ) as guard:
            for images in guard.batches(self.batches, steps=self.steps):
                guard.step(self.forward_backward, images, after=self.update_average)


class Unseeded(Diffusion):
    """A loop that draws from a generator of which nobody knows."""

    drawn = 0.0

    def forward_backward(self, images: torch.Tensor) -> torch.Tensor:
        type(self).drawn += 1.0
        return super().forward_backward(images + 1e-3 * self.drawn)


@pytest.mark.representative
def test_with_the_audit_off_a_finite_error_gets_through_and_is_seen() -> None:
    """The same seed is repaired by the loop's own Guard."""
    calm = observe(Diffusion)
    found = (run_case(Unaudited, FaultKind.OUTSIDE, seed, calm) for seed in range(20))
    wrong = next(outcome for outcome in found if outcome.result == DIFFERENT)
    assert not wrong.good
    outcome = run_case(Diffusion, FaultKind.OUTSIDE, wrong.seed, calm)
    assert (outcome.result, outcome.harmful, outcome.place) == (EQUAL, True, wrong.place)


def test_a_loop_that_does_not_repeat_itself_is_no_loop_of_the_zoo() -> None:
    with pytest.raises(AssertionError, match="ema is not deterministic"):
        observe(Unseeded)
