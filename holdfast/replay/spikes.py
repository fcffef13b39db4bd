"""When a loss or a gradient norm is out of line with its recent past."""

import math
import statistics
from collections import deque

SCALE_OF_MAD = 1.4826  # makes the median absolute deviation estimate a normal σ


class SpikeDetector:
    """Flags values far above the running median of their logarithms.

    A value x spikes if ``log x > median + factor · max(1.4826·MAD, floor)`` over the last
    ``window`` accepted values; MAD is the median absolute deviation. Logarithms, because losses
    and gradient norms vary by factors; median and MAD, because an undetected outlier in the
    window must not hide the next one.

    Args:
        window: how many past values count.
        warmup: how many are needed before anything is flagged.
        factor: how many robust standard deviations make a spike.
        floor: smallest standard deviation of the logarithm assumed (0.05 is 5 %).

    Not covered: faults that change the value by less; they need an audit.
    """

    def __init__(
        self, *, window: int = 64, warmup: int = 8, factor: float = 8.0, floor: float = 0.05
    ) -> None:
        if not 2 <= warmup <= window:
            raise ValueError(f"warmup = {warmup} must be between 2 and window = {window}")
        self.warmup, self.factor, self.floor = warmup, factor, floor
        self._logs: deque[float] = deque(maxlen=window)

    def is_spike(self, value: float) -> bool:
        """Whether a finite value is out of line with those accepted so far."""
        if len(self._logs) < self.warmup or value <= 0:
            return False
        median = statistics.median(self._logs)
        deviation = statistics.median(abs(log - median) for log in self._logs)
        spread = max(SCALE_OF_MAD * deviation, self.floor)
        return math.log(value) > median + self.factor * spread

    def accept(self, value: float) -> None:
        """Add a verified value to the past; non-finite and non-positive ones do not enter."""
        if math.isfinite(value) and value > 0:
            self._logs.append(math.log(value))

    def state_dict(self) -> dict[str, list[float]]:
        """The accepted past, as plain values."""
        return {"logs": list(self._logs)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Take over a saved past."""
        self._logs.clear()
        self._logs.extend(state["logs"])
