"""A mask of INF in the addend: no fault, and none of the other elements goes unverified."""

from collections.abc import Callable

import pytest
import torch
from case_loops import for_each
from struck import kinds, struck
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft import policy
from holdfast.abft.gemm import suspects
from holdfast.abft.gemm.passes import encode
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm

BATCH, M, K, N = 3, 9, 16, 11
FORMS = ["allocated", "in place", "out"]
OPS: dict[str, Callable[..., torch.Tensor]] = {"addmm": torch.addmm, "baddbmm": torch.baddbmm}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def padding(op: str) -> torch.Tensor:
    """Whole columns of each matrix, one row of the addend for all rows of C."""
    mask = torch.zeros((1, N) if op == "addmm" else (BATCH, 1, N))
    mask[..., -3:] = -torch.inf
    return mask


def causal(op: str) -> torch.Tensor:
    """A mask of its own for every row, and rows with +INF as well."""
    mask = torch.zeros(M, N).masked_fill(torch.ones(M, N).triu(2).bool(), -torch.inf)
    mask[-1, 0] = torch.inf
    return mask if op == "addmm" else mask.expand(BATCH, M, N).clone()


def everything(op: str) -> torch.Tensor:
    """Nothing is left of the product."""
    return torch.full((M, N) if op == "addmm" else (BATCH, M, N), -torch.inf)


MASKS = {"padding": padding, "causal": causal, "everything": everything}


def operands(op: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, the same every time."""
    generator = torch.Generator().manual_seed(5)
    lead = () if op == "addmm" else (BATCH,)
    shapes = (*lead, M, K), (*lead, K, N)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return a, b


def form(
    name: str, op: str, addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """The product, allocated, in place, or into columns of something larger."""
    whole = addend.expand(*a.shape[:-1], N).clone()
    if name == "in place":
        return whole.addmm_(a, b, alpha=2) if op == "addmm" else whole.baddbmm_(a, b, alpha=2)
    if name == "out":
        out = torch.empty(*whole.shape[:-1], 2 * N, dtype=a.dtype)[..., :N]
        return OPS[op](whole, a, b, alpha=2, out=out)
    return OPS[op](addend, a, b, alpha=2)


@for_each("name", FORMS)
@for_each("dtype", DTYPES)
@for_each("mask", MASKS)
@for_each("op", OPS)
def test_a_mask_is_silent_and_the_bits_are_torchs(
    op: str, mask: str, dtype: torch.dtype, name: str
) -> None:
    a, b = operands(op, dtype)
    addend = MASKS[mask](op).to(dtype)
    expected = form(name, op, addend, a, b)
    dismissed = policy.process.false_alarms
    with holdfast.protect(nn.Identity()) as protection:
        assert tensors_digest([form(name, op, addend, a, b)]) == tensors_digest([expected])
        (site,) = protection.report().sites
    assert events.recent() == []
    assert (site.covered, site.rows, site.suspects) == (True, expected.numel() // N, 0)
    assert policy.process.false_alarms == dismissed


@for_each("name", FORMS)
@for_each("dtype", DTYPES)
@for_each("mask", ["padding", "causal"])
@for_each("op", OPS)
@for_each("value", [3e3, torch.nan, -torch.inf])
def test_a_fault_beside_a_mask_is_repaired(
    op: str, mask: str, dtype: torch.dtype, name: str, value: float
) -> None:
    a, b = operands(op, dtype)
    addend = MASKS[mask](op).to(dtype)
    expected = form(name, op, addend, a, b)
    outcomes = []
    for verify in (False, True):
        with holdfast.protect(nn.Identity(), verify=verify), struck((1, 4, 1), value):
            outcomes.append(form(name, op, addend, a, b))
    harmed, repaired = outcomes
    assert tensors_digest([harmed]) != tensors_digest([expected])
    assert tensors_digest([repaired]) == tensors_digest([expected])
    (event,) = events.recent()
    assert (event.kind, event.detail["rows"]) == ("gemm_fault", 1)
    assert event.detail["index"] == [0 if op == "addmm" else 1, 4, 1]


def test_of_two_rows_one_masked_both_are_repaired() -> None:
    a, b = operands("addmm", torch.float32)
    addend = torch.zeros(M, N)
    addend[2, 3] = -torch.inf
    expected = torch.addmm(addend, a, b)
    with holdfast.protect(nn.Identity()), struck(([2, 7], [4, 0]), 50.0):
        assert torch.equal(torch.addmm(addend, a, b), expected)
    (event,) = events.recent()
    assert (event.kind, event.detail["rows"]) == ("gemm_fault", 2)


def test_a_fault_far_below_the_threshold_is_seen_beside_a_mask() -> None:
    a, b = operands("baddbmm", torch.float32)
    addend = padding("baddbmm")
    expected = torch.baddbmm(addend, a, b)
    with holdfast.protect(nn.Identity()), struck((1, 4, 1), lambda old: old * (1 + 2**-22)):
        assert torch.equal(torch.baddbmm(addend, a, b), expected)
    assert kinds() == ["gemm_fault"]


def unmasked(a: torch.Tensor, b: torch.Tensor) -> float:
    """The product itself, where the mask should be."""
    return float(torch.baddbmm(torch.zeros(N), a, b)[1, 4, -1])


@for_each("value", [unmasked, 0.5, torch.inf, torch.nan])
def test_an_element_that_lost_its_mask_is_masked_again(
    value: float | Callable[[torch.Tensor, torch.Tensor], float],
) -> None:
    a, b = operands("baddbmm", torch.float32)
    addend = padding("baddbmm")
    expected = torch.baddbmm(addend, a, b)
    wrong = value(a, b) if callable(value) else value
    outcomes = []
    for verify in (False, True):
        with holdfast.protect(nn.Identity(), verify=verify), struck((1, 4, N - 1), wrong):
            outcomes.append(torch.baddbmm(addend, a, b))
    assert not torch.equal(outcomes[0], expected)
    assert torch.equal(outcomes[1], expected)
    (event,) = events.recent()
    assert (event.kind, event.detail["method"]) == ("gemm_fault", "mask")
    assert event.detail["index"] == [1, 4, N - 1]
    assert event.detail["repaired"] == -torch.inf
    assert tensors_digest([torch.tensor(event.detail["corrupted"])]) == tensors_digest(
        [torch.tensor(wrong)]
    )


def test_a_kernel_that_repeats_its_error_beside_a_mask_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = operands("baddbmm", torch.float32)
    correct = torch.baddbmm

    def wrong(*args: torch.Tensor, **options: object) -> torch.Tensor:
        result = correct(*args, **options)  # type: ignore[call-overload]
        result[1, 4, 1] = 50.0
        return result

    monkeypatch.setattr(torch, "baddbmm", wrong)
    with (
        holdfast.protect(nn.Identity()),
        struck((1, 4, 1), 50.0, always=True),
        pytest.raises(UncorrectableFault, match="repeats"),
    ):
        correct(padding("baddbmm"), a, b)
    assert kinds() == ["gemm_persistent"]


@for_each("column", [1, N - 1])
def test_detection_alone_changes_nothing(column: int) -> None:
    a, b = operands("baddbmm", torch.float32)
    with (
        struck((1, 4, column), 50.0),
        holdfast.protect(nn.Identity(), correction="detect"),
        pytest.raises(UncorrectableFault, match="row 4"),
    ):
        torch.baddbmm(padding("baddbmm"), a, b)
    assert kinds() == ["gemm_fault"]


def test_checksums_rebuild_an_element_beside_a_mask() -> None:
    a, b = operands("baddbmm", torch.float32)
    expected = torch.baddbmm(padding("baddbmm"), a, b)
    with holdfast.protect(nn.Identity(), correction="checksum"), struck((1, 4, 1), 50.0):
        result = torch.baddbmm(padding("baddbmm"), a, b)
    torch.testing.assert_close(result, expected)
    (event,) = events.recent()
    assert event.detail["method"] == "checksum"


def test_a_nan_operand_beside_a_mask_is_still_named() -> None:
    a, b = operands("baddbmm", torch.float32)
    a[1, 4, 0] = torch.nan
    expected = torch.baddbmm(padding("baddbmm"), a, b)
    with holdfast.protect(nn.Identity()), struck((0, 0, 0), 50.0):
        result = torch.baddbmm(padding("baddbmm"), a, b)
    assert tensors_digest([result]) == tensors_digest([expected])
    assert sorted(event.kind for event in events.recent()) == ["gemm_fault", "nonfinite_input"]


def test_a_nan_in_the_mask_is_still_named() -> None:
    a, b = operands("addmm", torch.float32)
    addend = causal("addmm")
    addend[3, 2] = torch.nan
    with holdfast.protect(nn.Identity()):
        torch.addmm(addend, a, b)
    (event,) = events.recent()
    assert (event.kind, event.detail["rows"]) == ("nonfinite_input", 1)


def test_a_damaged_operand_beside_a_mask_is_found() -> None:
    a, b = operands("baddbmm", torch.float32)
    with (
        holdfast.protect(nn.Identity()),
        struck((1, 3, 2), lambda old: old + 20.0, stage="operand"),
        pytest.raises(UncorrectableFault, match="changed in row"),
    ):
        torch.baddbmm(padding("baddbmm"), a, b)
    assert kinds() == ["operand_fault"]


def test_a_masked_product_that_overflows_is_an_input_problem() -> None:
    a, b = torch.full((2, 8), 200.0, dtype=torch.float16), torch.full((8, 3), 200.0).half()
    addend = torch.tensor([0.0, 0.0, -torch.inf]).half()
    expected = torch.addmm(addend, a, b)
    assert expected.isfinite().sum() == 0
    with holdfast.protect(nn.Identity()):
        assert tensors_digest([torch.addmm(addend, a, b)]) == tensors_digest([expected])
    assert kinds() == ["nonfinite_input"]


def test_a_mask_times_zero_is_none() -> None:
    a, b = operands("addmm", torch.float32)
    with holdfast.protect(nn.Identity()):
        result = torch.addmm(everything("addmm"), a, b, beta=0)
    assert torch.equal(result, torch.addmm(torch.zeros(N), a, b))
    assert events.recent() == []


def test_a_kernel_that_never_masks_is_found() -> None:
    a, b = operands("baddbmm", torch.float32)
    addend, correct = padding("baddbmm"), torch.baddbmm(torch.zeros(N), a, b)
    gemm = Gemm(addend, a, b, 1.0, 1.0, *encode(b))
    rows = torch.full((3, BATCH, M), torch.nan).double()
    suspicion = suspects.SuspectProduct(
        (0, "baddbmm", 0, 0), gemm, correct.clone(), rows, False, correct.clone
    )
    with pytest.raises(UncorrectableFault, match="row 0 is not masked"):
        suspects.resolve(suspicion)
    assert kinds() == ["gemm_persistent"]


@for_each("dtype", DTYPES)
@for_each("op", OPS)
def test_a_mask_of_a_negative_share_or_a_transposed_one_is_silent(
    op: str, dtype: torch.dtype
) -> None:
    a, b = operands(op, dtype)
    addend = causal(op).to(dtype)
    transposed = addend.mT.contiguous().mT
    expected = OPS[op](addend, a, b, beta=-0.5)
    with holdfast.protect(nn.Identity()) as protection:
        for mask in (addend, transposed):
            assert tensors_digest([OPS[op](mask, a, b, beta=-0.5)]) == tensors_digest([expected])
        (site,) = protection.report().sites
    assert events.recent() == []
    assert site.suspects == 0
