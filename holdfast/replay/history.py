"""The steps since the oldest clean snapshot, kept so that they can be repeated."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.rng import rng_state


@dataclass(frozen=True)
class PastStep:
    """A step that can be repeated: its number, what the Guard keeps of it, the random state."""

    step: int
    record: Any
    rng: Mapping[str, Any]


class History:
    """Steps and their random states back to the oldest snapshot that a roll-back can reach.

    Args:
        keep: Number of clean snapshots that are held, which bounds the memory used here.
    """

    def __init__(self, keep: int = 1) -> None:
        self._clean: deque[int] = deque(maxlen=keep)
        self._steps: list[PastStep] = []

    def remember(self, step: int, record: object, *, clean: int | None) -> None:
        """Add the step that is about to run; ``clean`` is the step of the newest clean snapshot."""
        if clean is not None and clean not in self._clean:
            self._clean.append(clean)
        oldest = min(self._clean, default=0)
        self._steps = [past for past in self._steps if oldest <= past.step < step]
        self._steps.append(PastStep(step, record, rng_state()))

    def since(self, step: int) -> list[PastStep]:
        """Return the remembered steps from this one on; none if it is no longer remembered."""
        steps = [past for past in self._steps if past.step >= step]
        return steps if steps and steps[0].step == step else []

    def rolled_back(self, step: int) -> None:
        """Forget the snapshots that are newer than this step's, to which training returned."""
        older = [clean for clean in self._clean if clean < step]
        self._clean = deque([*older, step], maxlen=self._clean.maxlen)
