"""Whether a step went wrong: the harm in the state that it left, and what was said about it.

**Harmful**, defined before any trial: after the struck step and two more, an element of the
parameters, the buffers or the optimizer's state, or one of the three losses, is not finite or
differs from the run without a fault by more than ``MULTIPLE`` times the largest difference in that
tensor that rounding makes. This is measured in ``NOISE_RUNS`` runs of the same steps before which
each parameter was rounded up, down or not, by one unit in the last place, at random.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from holdfast import events
from holdfast.digest.tensors import tensors_digest
from holdfast.events import EventKind
from holdfast.events.kinds import Role
from holdfast_lab.step_faults.training import State

WARMUP, STEPS = 10, 3  # steps before the fault, and with it
MULTIPLE, NOISE_RUNS = 4.0, 8


@torch.no_grad()
def round_anew(model: nn.Module, seed: int) -> None:
    """Round each parameter to a neighbour at random; leave the program's random state alone."""
    draw = torch.Generator().manual_seed(seed)
    for each in model.parameters():
        way = torch.randint(-1, 2, each.shape, generator=draw)
        each.mul_(1 + torch.finfo(each.dtype).eps * way)


class Judge:
    """Compares states with the clean one, and tells harm from rounding by others of it."""

    def __init__(self, clean: State, others: Iterable[State]) -> None:
        self._clean, self._digest = clean, tensors_digest(clean.values())
        self._tolerances = dict.fromkeys(clean, torch.zeros((), dtype=torch.float64))
        for state in others:
            for name, away in self._away(state):
                largest = torch.maximum(self._tolerances[name], MULTIPLE * away.max())
                self._tolerances[name] = largest

    def is_equal(self, state: State) -> bool:
        """Return whether a state has the bits of the clean one."""
        return tensors_digest(state.values()) == self._digest

    def is_harmful(self, state: State) -> bool:
        """Return whether a state is further from the clean one than rounding makes it."""
        # Written so that what is not finite is harmful.
        return state["losses"].shape != self._clean["losses"].shape or not all(
            bool((away <= self._tolerances[name]).all()) for name, away in self._away(state)
        )

    def _away(self, state: State) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in state.items():
            yield name, (each.double() - self._clean[name].double()).abs()


@contextmanager
def alarms() -> Iterator[list[str]]:
    """Collect the kinds of the events that say that something is wrong, or was put right."""
    heard: list[str] = []

    def listen(event: events.Event) -> None:
        kind = EventKind(event.kind)
        if kind.role is Role.FOUND or event.rung or kind is EventKind.NONFINITE_GENUINE:
            heard.append(event.kind)

    stop = events.subscribe(listen)
    try:
        yield heard
    finally:
        stop()
