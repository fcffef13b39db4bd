"""The steps since the oldest clean snapshot, kept so that they can be done again."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from holdfast.replay.rng import RngState


@dataclass(frozen=True)
class PastStep:
    """What a step needs to be done again: its number, its batch, the random state before it."""

    step: int
    batch: Any
    rng: RngState


class History:
    """Batches and random states, back to the oldest snapshot that a roll-back can reach.

    Args:
        keep: how many clean snapshots are held; their number bounds the memory.
    """

    def __init__(self, keep: int = 1) -> None:
        self._clean: deque[int] = deque(maxlen=keep)
        self._steps: list[PastStep] = []

    def remember(self, step: int, batch: Any, *, clean: int | None) -> None:
        """Add the step that is about to be done; ``clean`` is the newest clean snapshot's."""
        if clean is not None and clean not in self._clean:
            self._clean.append(clean)
        oldest = min(self._clean, default=0)
        self._steps = [past for past in self._steps if oldest <= past.step < step]
        self._steps.append(PastStep(step, batch, RngState.capture()))

    def since(self, step: int) -> list[PastStep]:
        """The remembered steps from this one on; empty if it is too old to be among them."""
        steps = [past for past in self._steps if past.step >= step]
        return steps if steps and steps[0].step == step else []

    def rolled_back(self, step: int) -> None:
        """Say that no newer snapshot is left than this step's."""
        older = [clean for clean in self._clean if clean < step]
        self._clean = deque([*older, step], maxlen=self._clean.maxlen)
