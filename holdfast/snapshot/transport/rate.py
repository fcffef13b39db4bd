"""A limit of bytes per second."""

_BURST_S = 0.25


class TokenBucket:
    """Allows ``bytes_s`` bytes a second in the mean; without a limit (0) any number.

    What is allowed and not used adds up for a quarter of a second.
    """

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._left = _BURST_S * bytes_s
        self._seen_s = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long to wait before more may be sent, in seconds."""
        if not self._bytes_s:
            return 0.0
        self._left = min(
            _BURST_S * self._bytes_s, self._left + self._bytes_s * (now - self._seen_s)
        )
        self._seen_s = now
        return max(0.0, -self._left / self._bytes_s)

    def take(self, nbytes: int) -> None:
        """Count bytes that are sent."""
        self._left -= nbytes
