"""A saved random state, which can be restored as often as a step is repeated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.rng import rng_state, set_rng_state


@dataclass(frozen=True)
class RngState:
    """The random state of all generators (Python, NumPy, torch) at one moment."""

    state: Mapping[str, Any]

    @classmethod
    def capture(cls) -> "RngState":
        """Save the present random state of all generators."""
        return cls(rng_state())

    def restore(self) -> None:
        """Set all generators to the saved state."""
        set_rng_state(self.state)
