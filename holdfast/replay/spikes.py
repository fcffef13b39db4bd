"""Detection of spikes: values of the loss or the gradient norm far above their recent past."""

import math
import statistics
from collections import deque

from holdfast.errors import UncorrectableFault

MAX_NONFINITE = 10  # steps in a row whose loss or gradient is not finite, also when repeated
ABSURD = 1e6  # no batch of a healthy run has a loss so many times its median
SCALE_OF_MAD = 1.4826  # makes the median absolute deviation estimate a normal σ


class SpikeDetector:
    """Flags values far above the running median of their logarithms.

    A value x is a spike if ``log x > median + factor · max(1.4826·MAD, floor)`` over the logarithms
    of the last ``window`` accepted values; MAD is their median absolute deviation. Logarithms are
    used because losses and gradient norms vary by factors, median and MAD because an undetected
    outlier in the window must not hide the next one.

    Args:
        window: Number of past values that count.
        warmup: Number of values before anything is flagged.
        factor: Number of robust standard deviations that make a spike.
        floor: Smallest standard deviation of the logarithm that is assumed (0.05 is 5 %).

    Not covered: faults that change the value by less; they need an audit.
    """

    def __init__(
        self, *, window: int = 64, warmup: int = 8, factor: float = 8.0, floor: float = 0.05
    ) -> None:
        if not 2 <= warmup <= window:
            raise ValueError(f"warmup = {warmup} must be between 2 and window = {window}")
        self.warmup, self.factor, self.floor = warmup, factor, floor
        self._logs: deque[float] = deque(maxlen=window)

    def is_absurd(self, value: float) -> bool:
        """Return whether a finite value is ``ABSURD`` times the median of those accepted so far."""
        if len(self._logs) < self.warmup or value <= 0:
            return False
        return math.log(value) > statistics.median(self._logs) + math.log(ABSURD)

    def is_spike(self, value: float) -> bool:
        """Return whether a finite value is a spike over those accepted so far."""
        if len(self._logs) < self.warmup or value <= 0:
            return False
        median = statistics.median(self._logs)
        deviation = statistics.median(abs(log - median) for log in self._logs)
        spread = max(SCALE_OF_MAD * deviation, self.floor)
        return math.log(value) > median + self.factor * spread

    def accept(self, value: float) -> None:
        """Add a verified value to the past; non-finite and non-positive values are ignored."""
        if math.isfinite(value) and value > 0:
            self._logs.append(math.log(value))

    def state_dict(self) -> dict[str, list[float]]:
        """Return the accepted values as plain numbers."""
        return {"logs": list(self._logs)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Replace the accepted values by saved ones."""
        self._logs.clear()
        self._logs.extend(state["logs"])


class NonFiniteStreak:
    """Counts steps in a row that are not finite although repetition confirms them.

    Each of them costs several passes, and nothing is trained any more.
    """

    def __init__(self) -> None:
        self._first, self._steps, self._newest = 0, 0, -1

    def ended(self) -> None:
        """Note a finite step."""
        self._steps = 0

    def count(self, step: int) -> None:
        """Note a step that is not finite; the same on all ranks.

        Raises:
            UncorrectableFault: There were ``MAX_NONFINITE`` of them in a row.
        """
        if step <= self._newest:
            return  # done again after a roll-back
        self._first = step if not self._steps else self._first
        self._steps, self._newest = self._steps + 1, step
        if self._steps >= MAX_NONFINITE:
            raise UncorrectableFault(
                f"step {step}: loss or gradient was not finite in each of {self._steps} steps "
                f"since step {self._first}, and repetition gave the same: the model diverges, the "
                "hardware is not the cause; go back to a checkpoint before that step with a lower "
                "learning rate, clip_grad_norm or other data"
            )
