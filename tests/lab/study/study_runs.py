"""Every study at its smallest size, run once however many tests look at it."""

from dataclasses import dataclass
from functools import cache

from holdfast_lab.study import REGISTRY, Row, Settings

TINY = Settings("tiny")


@dataclass
class Recorded:
    """Remembers how far a study says it is."""

    total: float = 0.0
    done: float = 0.0

    def begin(self, total: float) -> None:
        """Take the amount of work, which is told once."""
        assert self.total == 0
        assert total > 0
        self.total = total

    def advance(self, amount: float) -> None:
        """Add to what is done."""
        self.done += amount


@cache
def run_of(name: str) -> tuple[list[Row], Recorded]:
    """The rows of a study, and its progress."""
    progress = Recorded()
    return list(REGISTRY[name].run(TINY, progress)), progress


def rows_of(name: str) -> list[Row]:
    """The rows of a study."""
    return run_of(name)[0]
