"""The detector's triple: silent when clean, repaired when faulty, and not vacuous when off.

Every product, in and out of place, forward and backward, in every dtype.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from case_loops import for_each, fuzz_after
from struck import armed, damages, kinds
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft import policy
from holdfast.abft.gemm.reference import as_batch, verify_rows_reference
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm

EXPONENT_BITS = {torch.float64: 11, torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}
M, K, N = 7, 40, 9

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Damage = Callable[[torch.Tensor], torch.Tensor]

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
    return [(FUNCTIONAL | WRITING)[op](*operands(op, dtype))]


def forward_backward(op: str, dtype: torch.dtype) -> list[torch.Tensor]:
    addend, a, b = (t.requires_grad_() for t in operands(op, dtype))
    output = FUNCTIONAL[op](addend, a, b)
    seed = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(dtype)
    grads = torch.autograd.grad(output, (a, b), seed)
    return [output.detach(), *grads]


def faults(dtype: torch.dtype) -> dict[str, Damage]:
    """Sign, every exponent bit, the two upper mantissa bits, INF, NaN and near-INF."""
    top = 8 * dtype.itemsize - 1
    return damages(dtype, range(top - EXPONENT_BITS[dtype] - 2, top + 1))


@dataclass
class Injection:
    """A hook that damages one element once, and remembers what it did."""

    stage: str
    role: str
    fault: Damage
    place: str  # first, last, or middle
    done: int = 0
    index: list[int] = field(default_factory=list)
    certain: bool = False  # the row's sum moved by more than twice the threshold

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
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
        target[where] = self.fault(old)
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


PLACES = ["first", "last"]
CASES = [
    *((op, "forward") for op in FUNCTIONAL),
    *itertools.product(FUNCTIONAL, ["grad_a", "grad_b"]),
    *((op, "forward") for op in WRITING),
]
all_cases = for_each(("op", "role"), CASES, first=6)
# The formats that training uses most; the others, as thorough, with `fuzz`.
ORDERED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
all_dtypes = pytest.mark.parametrize("dtype", fuzz_after(ORDERED, 2), ids=str)


def healthy(op: str, role: str, dtype: torch.dtype) -> str:
    """The digest of everything that a product computes."""
    return tensors_digest((forward if role == "forward" else forward_backward)(op, dtype))


def run(op: str, role: str, dtype: torch.dtype, *, verify: bool = True) -> str:
    """The same under protection."""
    with holdfast.protect(nn.Identity(), verify=verify):
        return healthy(op, role, dtype)


@all_dtypes
@all_cases
def test_clean_products_are_silent_and_unchanged(op: str, role: str, dtype: torch.dtype) -> None:
    expected = healthy(op, role, dtype)
    with holdfast.protect(nn.Identity()) as protection:
        assert healthy(op, role, dtype) == expected
        assert sum(site.rows for site in protection.report().sites) > 0
    assert events.recent() == []


@all_dtypes
@all_cases
def test_faulty_outputs_are_repaired_bit_for_bit_and_unverified_reach_the_result(
    op: str, role: str, dtype: torch.dtype
) -> None:
    clean, certain = healthy(op, role, dtype), 0
    for (name, fault), place in itertools.product(faults(dtype).items(), PLACES):
        events.clear()
        with armed(Injection("output", role, fault, place)) as injection:
            result = run(op, role, dtype)
        found = events.recent()
        certain += injection.certain
        assert len(found) == 1 or not injection.certain, (name, place)
        assert (result == clean) == (len(found) == 1), (name, place)
        for event in found:
            assert event.kind == "gemm_fault"
            assert event.op.endswith(f"/{role}")
            assert event.detail["index"] == injection.index
        events.clear()
        with armed(Injection("output", role, fault, place)):
            assert run(op, role, dtype, verify=False) != clean, (name, place)
        assert events.recent() == []
    # INF, NaN, near-INF and the uppermost exponent bit at the least
    assert certain >= len(PLACES) * 6


@all_dtypes
@all_cases
@for_each("value", [3e4, torch.inf, torch.nan])
def test_a_damaged_operand_is_raised_or_deferred(
    op: str, role: str, dtype: torch.dtype, value: float
) -> None:
    def fault(old: torch.Tensor) -> torch.Tensor:
        return torch.full_like(old, value)

    with (
        armed(Injection("operand", role, fault, "middle")),
        pytest.raises(UncorrectableFault, match=rf"{role}: B changed in row \d+ after encoding"),
    ):
        run(op, role, dtype)
    with armed(Injection("operand", role, fault, "middle")), policy.collecting() as found:
        run(op, role, dtype)
    assert [event.kind for event in found.unrepaired] == ["operand_fault"]
    assert kinds().count("operand_fault") == 2
    with armed(Injection("operand", role, fault, "middle")):
        assert run(op, role, dtype, verify=False) != healthy(op, role, dtype)


@all_dtypes
@all_cases
def test_a_damaged_checksum_never_harms(op: str, role: str, dtype: torch.dtype) -> None:
    clean, seen = healthy(op, role, dtype), 0
    for (name, fault), place in itertools.product(faults(torch.float64).items(), PLACES):
        events.clear()
        with armed(Injection("checksum", role, fault, place)):
            assert run(op, role, dtype) == clean, (name, place)
        assert kinds() in ([], ["checksum_fault"]), (name, place)
        seen += len(kinds())
    assert seen >= len(PLACES) * 6
