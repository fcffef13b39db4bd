"""The fault that most tests put into a running product."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, nan
from typing import TypeVar

import torch

from holdfast import events, sites
from holdfast.digest.tensors import tensors_digest
from holdfast.inject.faults import flip_bit
from holdfast.sites import Gemm

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

Index = tuple[int | slice | list[int], ...]
Value = float | torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
Hook = TypeVar("Hook", bound=sites.Hook)


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


def damages(
    dtype: torch.dtype, bits: Iterable[int]
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """INF, NaN and near-INF of either sign, and flips of some bits, made of the old elements."""
    near = torch.finfo(dtype).max * 0.9
    values = {"inf": inf, "-inf": -inf, "nan": nan, "near": near, "-near": -near}
    return {
        **{name: lambda old, v=value: torch.full_like(old, v) for name, value in values.items()},
        **{f"bit{bit}": lambda old, bit=bit: flip_bit(old, bit) for bit in bits},
    }


def kinds() -> list[str]:
    """The kinds of the events so far."""
    return [event.kind for event in events.recent()]


Tensors = torch.Tensor | Iterable[torch.Tensor]


def same_bits(left: Tensors, right: Tensors) -> bool:
    """Whether tensors are equal in shape, dtype and every bit, those of NaN included."""
    digests = [
        tensors_digest([side] if isinstance(side, torch.Tensor) else side) for side in (left, right)
    ]
    return digests[0] == digests[1]


@contextmanager
def armed(hook: Hook) -> Iterator[Hook]:
    """Within the block a site hook runs; one that counts its faults in ``done`` makes one."""
    with sites.injecting(hook):
        yield hook
    assert getattr(hook, "done", 1) == 1, hook


@contextmanager
def struck(index: Index, value: Value, **options: object) -> Iterator[Strike]:
    """Within the block one product is damaged, as ``Strike`` says."""
    with armed(Strike(index, value, **options)) as strike:  # type: ignore[arg-type]
        yield strike
