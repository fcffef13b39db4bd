"""The fault that most tests put into a running product."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from holdfast import events, sites
from holdfast.sites import Gemm

Index = tuple[int | slice | list[int], ...]
Value = float | torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Strike:
    """A site hook that damages elements of one product, or of every one.

    Counts the products whose site ends with ``site``, and strikes the one of number ``nth``; with
    ``always`` those after it as well. A ``value`` that is a function is given the old elements.
    """

    index: Index
    value: Value
    site: str = ""
    stage: str = "output"
    nth: int = 0
    always: bool = False
    seen: list[str] = field(default_factory=list)

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""
        if stage != self.stage or not site.endswith(self.site):
            return
        number = len(self.seen)
        self.seen.append(site)
        if number != self.nth and not (self.always and number > self.nth):
            return
        target = gemm.b if stage == "operand" else gemm.row_sum if stage == "checksum" else output
        assert target is not None
        target = target.data
        index = self.index[-target.dim() :]
        target[index] = self.value(target[index]) if callable(self.value) else self.value


def kinds() -> list[str]:
    """The kinds of the events so far."""
    return [event.kind for event in events.recent()]


@contextmanager
def struck(index: Index, value: Value, **options: object) -> Iterator[Strike]:
    """Within the block one product is damaged, as ``Strike`` says."""
    strike = Strike(index, value, **options)  # type: ignore[arg-type]
    sites.arm(strike)
    try:
        yield strike
    finally:
        sites.disarm()
