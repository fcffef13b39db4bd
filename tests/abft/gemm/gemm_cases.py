"""The products under test, and the faults put into them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from holdfast import sites
from holdfast.abft.gemm.reference import as_batch, verify_rows_reference
from holdfast.inject.faults import flip_bit
from holdfast.sites import Gemm

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EXPONENT_BITS = {torch.float64: 11, torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}
M, K, N = 7, 40, 9

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

FUNCTIONAL: dict[str, Product] = {
    "mm": lambda _, a, b: torch.mm(a, b),
    "addmm": lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
    "bmm": lambda _, a, b: torch.bmm(a, b),
    "baddbmm": lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
}
WRITING: dict[str, Product] = {
    "mm.out": lambda c, a, b: torch.mm(a, b, out=torch.empty_like(c)),
    "addmm.out": lambda c, a, b: torch.addmm(c, a, b, out=torch.empty_like(c)),
    "addmm.out_self": lambda c, a, b: torch.addmm(c, a, b, beta=0.5, out=c),
    "addmm_": lambda c, a, b: c.addmm_(a, b, beta=-1),
    "bmm.out": lambda c, a, b: torch.bmm(a, b, out=torch.empty_like(c)),
    "baddbmm.out": lambda c, a, b: torch.baddbmm(c, a, b, out=torch.empty_like(c)),
    "baddbmm_": lambda c, a, b: c.baddbmm_(a, b, beta=-1),
}


def operands(op: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The addend, A and B of a product; the same values every time."""
    generator = torch.Generator().manual_seed(3)
    lead = (3,) if "bmm" in op else ()
    shapes = ((*lead, M, N), (*lead, M, K), (*lead, K, N))
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def forward(op: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The product alone."""
    return [(FUNCTIONAL | WRITING)[op](*operands(op, dtype))]


def forward_backward(op: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The product and the gradients of its operands."""
    addend, a, b = (t.requires_grad_() for t in operands(op, dtype))
    output = FUNCTIONAL[op](addend, a, b)
    seed = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(dtype)
    grads = torch.autograd.grad(output, (a, b), seed)
    return [output.detach(), *grads]


@dataclass(frozen=True)
class Fault:
    """What becomes of an element: one of its bits flips, or it is replaced."""

    name: str
    bit: int | None = None
    value: float = 0.0

    def apply(self, element: torch.Tensor) -> torch.Tensor:
        """The damaged scalar."""
        if self.bit is None:
            return torch.tensor(self.value, dtype=element.dtype)
        return flip_bit(element, self.bit)


def faults(dtype: torch.dtype) -> list[Fault]:
    """Sign, every exponent bit, the two upper mantissa bits, INF, NaN and near-INF."""
    top = 8 * dtype.itemsize - 1
    flips = [Fault(f"bit{bit}", bit) for bit in range(top - EXPONENT_BITS[dtype] - 2, top + 1)]
    near = torch.finfo(dtype).max * 0.9
    values = [math.inf, -math.inf, math.nan, near, -near]
    return flips + [Fault(str(value), value=value) for value in values]


@dataclass
class Injection:
    """A hook that damages one element once, and remembers what it did."""

    stage: str
    role: str
    fault: Fault
    place: str  # first, last, or middle
    done: int = 0
    index: list[int] = field(default_factory=list)
    certain: bool = False  # the row's sum moved by more than twice the threshold

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""
        if self.done or stage != self.stage or not site.endswith(self.role):
            return
        self.done += 1
        target = {"output": output, "operand": gemm.b, "checksum": gemm.row_sum}[stage]
        assert target is not None
        target = target.data
        where = tuple(
            {"first": 0, "last": s - 1, "middle": s // 2}[self.place] for s in target.shape
        )
        old = target[where].clone()
        target[where] = self.fault.apply(old)
        self.index = [0] * (3 - len(where)) + list(where)
        if stage == "output":
            self.certain = _certain(gemm, target, self.index, old)


def _certain(gemm: Gemm, output: torch.Tensor, index: list[int], old: torch.Tensor) -> bool:
    healthy = as_batch(output.clone())
    moved = (healthy[tuple(index)].double() - old.double()).abs()
    healthy[tuple(index)] = old
    problem = (gemm.a, gemm.row_sum, gemm.statistics, gemm.addend, gemm.beta, gemm.alpha)
    threshold = verify_rows_reference(healthy.reshape(output.shape), *problem)[1]
    return not bool(moved <= 2 * threshold[index[0], index[1]])


class Counting(Protocol):
    """A hook that counts its faults."""

    done: int

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""


Hook = TypeVar("Hook", bound=Counting)


@contextmanager
def armed(injection: Hook) -> Iterator[Hook]:
    """The injection in place; it must have found its target."""
    sites.arm(injection)
    try:
        yield injection
    finally:
        sites.disarm()
    assert injection.done == 1
