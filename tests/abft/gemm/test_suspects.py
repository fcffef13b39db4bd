"""How suspect rows are decided: whose fault it was, and what is no fault at all."""

import itertools
from collections.abc import Callable

import pytest
import torch
from case_loops import for_each
from struck import armed, kinds, same_bits, struck
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft import policy
from holdfast.abft.gemm import suspects
from holdfast.abft.gemm.cpu import encode, verify
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm


def test_the_input_that_was_nan_before_is_named_and_a_fault_beside_it_repaired() -> None:
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    a[2, 3] = torch.nan
    clean = a @ b
    assert same_bits(holdfast.matmul(a, b), clean)
    assert kinds() == ["nonfinite_input"]
    assert events.recent()[0].detail["rows"] == 1
    events.clear()
    with struck((0, 0), 1e9):
        assert same_bits(holdfast.matmul(a, b), clean)
    assert sorted(kinds()) == ["gemm_fault", "nonfinite_input"]


@for_each(("op", "lead"), [(torch.addmm, ()), (torch.baddbmm, (2,))])
def test_a_nan_addend_times_beta_zero_is_not_seen_and_a_fault_beside_it_repaired(
    op: Callable[..., torch.Tensor], lead: tuple[int, ...]
) -> None:
    a, b = torch.randn(*lead, 4, 6), torch.randn(*lead, 6, 5)
    addend = torch.full((*lead, 4, 5), torch.nan)
    with holdfast.protect(nn.Identity()):
        clean = op(addend, a, b, beta=0)
        assert clean.isfinite().all()
        assert kinds() == []
        with struck((0, 3, 1), -1e6):
            assert torch.equal(op(addend, a, b, beta=0), clean)
    assert kinds() == ["gemm_fault"]


def test_an_overflow_is_an_input_problem_and_not_a_fault() -> None:
    a = torch.full((2, 8), 200.0, dtype=torch.float16)
    result = holdfast.matmul(a, a.mT)
    assert result.isinf().all()
    assert kinds() == ["nonfinite_input"]
    assert "overflows" in events.recent()[0].detail["reason"]


@for_each("dtype", [torch.float32, torch.bfloat16])
def test_subnormal_operands_that_a_kernel_flushes_are_no_fault(dtype: torch.dtype) -> None:
    a, b = torch.full((4, 1000), 1e-39).to(dtype), torch.full((1000, 5), 1e30).to(dtype)
    assert torch.equal(holdfast.matmul(a, b), torch.matmul(a, b))
    assert kinds() == []


@for_each("beta", [0, 1, -2.5])
@for_each("alpha", [0, 1, 3])
@for_each("shape", [(), (1,), (5,), (4, 1), (1, 5), (4, 5)])
def test_every_addend_and_factor_is_verified_silently(
    beta: float, alpha: float, shape: tuple[int, ...]
) -> None:
    a, b, addend = torch.randn(4, 6), torch.randn(6, 5), torch.randn(shape)
    expected = torch.addmm(addend, a, b, beta=beta, alpha=alpha)
    before = policy.process.false_alarms
    with holdfast.protect(nn.Identity()):
        assert torch.equal(torch.addmm(addend, a, b, beta=beta, alpha=alpha), expected)
    assert kinds() == []
    assert policy.process.false_alarms == before


@for_each(
    ("part", "index", "value"),
    [
        *itertools.product(["statistics"], [0, 3, 6, 7], [torch.nan, torch.inf]),
        ("row_sum", 5, 1e6),
    ],
)
def test_a_damaged_encoding_of_a_weight_heals_once_and_for_all(
    part: str, index: int, value: float
) -> None:
    a, weight = torch.randn(4, 6), nn.Parameter(torch.randn(6, 5))
    model = nn.ParameterList([weight])
    clean = a @ weight

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if stage == "checksum":
            getattr(gemm, part)[0, index] = value

    with holdfast.protect(model) as protection:
        with armed(hook):
            assert torch.equal(a @ weight, clean)
        assert torch.equal(a @ weight, clean)
        assert kinds() == ["checksum_fault"]  # seen at its use or, at the latest, at the next
        protection.reset_counters()
        assert torch.equal(a @ weight, clean)
        assert kinds() == ["checksum_fault"]
        assert sum(site.suspects for site in protection.report().sites) == 0


@for_each("bit", range(0, 52, 3))
def test_the_lowest_bits_of_a_checksum_are_never_taken_for_a_damaged_operand(bit: int) -> None:
    a = torch.eye(64, dtype=torch.float64)
    b = torch.rand(64, 8, dtype=torch.float64)

    def flipped(sums: torch.Tensor) -> torch.Tensor:
        return (sums.contiguous().view(torch.int64) ^ (1 << bit)).view(torch.float64)

    with struck((0, slice(None, None, 8)), flipped, stage="checksum"):
        assert torch.equal(holdfast.matmul(a, b), b)
    assert kinds() in ([], ["checksum_fault"])


def resolve(wrong: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
    """Judge a product of two matrices, all of it suspect, with its recomputation given."""
    a = b = torch.eye(len(wrong))
    gemm = Gemm(None, a, b, 1.0, 1.0, *encode(b))
    rows = verify(wrong, a, gemm.row_sum, gemm.statistics)
    suspects.resolve(suspects.SuspectProduct((0, "mm", 0, 0), gemm, wrong, rows, False, again))


def test_a_product_that_never_repeats_is_given_up() -> None:
    calls = itertools.count(1)
    with pytest.raises(UncorrectableFault, match="no two recomputations agree"):
        resolve(torch.full((2, 2), -5.0), lambda: torch.full((2, 2), 1e6 * next(calls)))
    assert next(calls) == policy.RECOMPUTATIONS + 1
    assert kinds() == ["gemm_persistent"]


def test_a_value_that_is_wrong_every_time_is_given_up() -> None:
    wrong = torch.eye(3)
    wrong[1, 2] += 1
    with pytest.raises(UncorrectableFault, match="row 1, column 2 repeats a wrong value"):
        resolve(wrong, wrong.clone)


ALIASES = {
    "mm(out=a)": lambda a, b: torch.mm(a, b, out=a),
    "mm(out=b)": lambda a, b: torch.mm(a, b, out=b),
    "addmm(out=a)": lambda a, b: torch.addmm(a, a, b, out=a),
    "addmm_": lambda a, b: a.addmm_(a, b),
}


@for_each("name", ALIASES)
def test_an_output_that_overlaps_an_operand_is_passed_and_reported(name: str) -> None:
    make = lambda: [torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) for _ in "ab"]  # noqa: E731
    expected = ALIASES[name](*make())
    with holdfast.protect(nn.Identity()) as protection:
        protection.reset_counters()
        assert torch.equal(ALIASES[name](*make()), expected)
        reasons = {site.reason for site in protection.report().sites if site.calls}
    assert reasons == {"its output overlaps an operand"}
    assert kinds() == []


def test_an_output_next_to_an_operand_in_the_same_storage_is_verified() -> None:
    memory = torch.randn(3, 8, 8)
    with holdfast.protect(nn.Identity()) as protection:
        protection.reset_counters()
        torch.mm(memory[0], memory[1], out=memory[2])
        assert [site.covered for site in protection.report().sites if site.calls] == [True]


def test_a_hook_may_multiply_and_may_fail() -> None:
    def multiply(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    def fail(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        raise KeyError("from the hook")

    a = torch.randn(3, 3)
    with armed(multiply):
        assert torch.equal(holdfast.matmul(a, a), a @ a)
    with armed(fail), pytest.raises(KeyError, match="from the hook"):
        holdfast.matmul(a, a)
    assert torch.equal(holdfast.matmul(a, a), a @ a)


M, K, N = 96, 64, 80  # large enough for oneDNN's kernels
SHAPES = {"baddbmm": ((2, M, N), (2, M, K), (2, K, N)), "addmv": ((M,), (M, K), (K,))}


@for_each("beta", [0, 0.5, 1])
@for_each("op", SHAPES)
@for_each("correction", ["recompute", "checksum", "detect"])
@for_each("dtype", [torch.bfloat16, torch.float16])
@for_each("mask", [0.0, -1e4])
def test_what_torch_leaves_unwritten_in_16_bits_is_no_fault_of_the_machine(
    op: str, beta: float, correction: str, dtype: torch.dtype, mask: float
) -> None:
    torch.manual_seed(1)  # of other vectors the signed sum may move by less than the threshold
    addend, a, b = (torch.randn(shape, dtype=dtype) for shape in SHAPES[op])
    addend[..., :3] += mask
    result = torch.full_like(addend, 3.0)  # known memory, as torch may leave it as it was
    expected = getattr(torch, op)(addend, a, b, beta=beta, alpha=0, out=result.clone())
    model = nn.Identity()
    with holdfast.protect(model, correction=correction) as protection:
        found = getattr(torch, op)(addend, a, b, beta=beta, alpha=0, out=result)
        is_left = not torch.equal(expected, beta * addend)  # which kernel runs decides that
        if not mask:  # rows of a mask are judged by the product without it
            assert (protection.report().false_alarms > 0) == is_left
    assert same_bits(found, expected)
    assert kinds() == []


@for_each(("op", "beta"), [("baddbmm", 0.5), ("baddbmm", 1), ("addmv", 0.5)])
def test_a_fault_beside_what_torch_leaves_unwritten_is_repaired(op: str, beta: float) -> None:
    addend, a, b = (torch.randn(shape, dtype=torch.bfloat16) for shape in SHAPES[op])
    expected = getattr(torch, op)(addend, a, b, beta=beta, alpha=0)
    with struck((1, 3, 7) if op == "baddbmm" else (0, 3), 1e4, always=True):
        assert not same_bits(getattr(torch, op)(addend, a, b, beta=beta, alpha=0), expected)
        assert kinds() == []
        with holdfast.protect(nn.Identity()):
            found = getattr(torch, op)(addend, a, b, beta=beta, alpha=0)
    assert same_bits(found, expected)
    assert kinds() == ["gemm_fault"]
