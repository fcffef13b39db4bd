"""A mask of INF in the addend: no fault, and none of the other elements goes unverified."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from case_loops import for_each
from struck import DTYPES, kinds, same_bits, struck
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft import policy
from holdfast.abft.gemm import suspects
from holdfast.abft.gemm.cpu import encode
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm

BATCH, M, K, N = 3, 9, 16, 11
FORMS = ["allocated", "in place", "out"]
OPS: dict[str, Callable[..., torch.Tensor]] = {"addmm": torch.addmm, "baddbmm": torch.baddbmm}


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
    return torch.full((M, N) if op == "addmm" else (BATCH, M, N), -torch.inf)


MASKS = {"padding": padding, "causal": causal, "everything": everything}


def operands(op: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
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
        assert equal([form(name, op, addend, a, b), expected])
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
    assert not equal([harmed, expected])
    assert equal([repaired, expected])
    (event,) = events.recent()
    assert (event.kind, event.detail["rows"]) == ("gemm_fault", 1)
    assert event.detail["index"] == [0 if op == "addmm" else 1, 4, 1]


def masked(
    index: tuple[int, int, int],
    value: float | Callable[[torch.Tensor], torch.Tensor] = 50.0,
    *,
    a: torch.Tensor | None = None,
    stage: str = "output",
    always: bool = False,
    **settings: object,
) -> list[torch.Tensor]:
    """A padded batch of products with an element struck, and what torch makes of it."""
    given, b = operands("baddbmm", torch.float32)
    a = given if a is None else a
    expected = torch.baddbmm(padding("baddbmm"), a, b)
    with (
        holdfast.protect(nn.Identity(), **settings),  # type: ignore[arg-type]
        struck(index, value, stage=stage, always=always),
    ):
        return [torch.baddbmm(padding("baddbmm"), a, b), expected]


def equal(tensors: list[torch.Tensor]) -> bool:
    return same_bits(tensors[:1], tensors[1:])


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
    assert equal(masked((1, 4, 1), lambda old: old * (1 + 2**-22)))
    assert kinds() == ["gemm_fault"]


def unmasked() -> float:
    """The product itself, where the mask should be."""
    return float(torch.bmm(*operands("baddbmm", torch.float32))[1, 4, -1])


@for_each("value", [unmasked(), 0.5, torch.inf, torch.nan])
def test_an_element_that_lost_its_mask_is_masked_again(value: float) -> None:
    place = (1, 4, N - 1)
    assert not equal(masked(place, value, verify=False))
    assert equal(masked(place, value))
    (event,) = events.recent()
    assert (event.kind, event.detail["method"]) == ("gemm_fault", "mask")
    assert event.detail["index"] == [*place]
    assert event.detail["repaired"] == -torch.inf
    assert repr(event.detail["corrupted"]) == repr(value)


@pytest.mark.parametrize(
    ("dtype", "mask", "value"),
    [
        (torch.float64, torch.finfo(torch.float64).min, 1000.0),  # bounds of it would be INF
        (torch.float16, -60000.0, -torch.inf),  # no sum of these comes near the largest fp16
        (torch.float32, -1e9, -1e9 - 4096),
    ],
)
def test_an_element_that_lost_a_finite_mask_is_masked_again(
    dtype: torch.dtype, mask: float, value: float
) -> None:
    a, b = operands("baddbmm", dtype)
    addend = torch.zeros(BATCH, 1, N, dtype=dtype)
    addend[..., -3:] = mask
    expected = torch.baddbmm(addend, a, b)
    outcomes = []
    for verify in (False, True):
        with holdfast.protect(nn.Identity(), verify=verify):
            assert equal([torch.baddbmm(addend, a, b), expected])
            assert "gemm_fault" not in kinds()
            with struck((1, 4, N - 1), value):
                outcomes.append(torch.baddbmm(addend, a, b))
    harmed, repaired = outcomes
    assert not equal([harmed, expected])
    assert equal([repaired, expected])
    assert "gemm_fault" in kinds()


def test_a_kernel_that_repeats_its_error_beside_a_mask_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = operands("baddbmm", torch.float32)
    resolve = suspects.resolve

    def repeated(suspect: suspects.SuspectProduct) -> None:
        def wrong(addend: torch.Tensor | None = None) -> torch.Tensor:
            assert suspect.with_addend is not None
            result = suspect.rerun() if addend is None else suspect.with_addend(addend)
            result[1, 4, 1] = 50.0
            return result

        resolve(replace(suspect, rerun=wrong, with_addend=wrong))

    monkeypatch.setattr(suspects, "resolve", repeated)
    with (
        holdfast.protect(nn.Identity()),
        struck((1, 4, 1), 50.0),
        pytest.raises(UncorrectableFault, match="repeats"),
    ):
        torch.baddbmm(padding("baddbmm"), a, b)
    assert kinds() == ["gemm_persistent"]


@for_each("column", [1, N - 1])
def test_detection_alone_raises(column: int) -> None:
    with pytest.raises(UncorrectableFault, match="row 4"):
        masked((1, 4, column), correction="detect")
    assert kinds() == ["gemm_fault"]


def test_checksums_rebuild_an_element_beside_a_mask() -> None:
    torch.testing.assert_close(*masked((1, 4, 1), correction="checksum"))
    (event,) = events.recent()
    assert event.detail["method"] == "checksum"


def test_a_nan_operand_beside_a_mask_is_still_named() -> None:
    a, _ = operands("baddbmm", torch.float32)
    a[1, 4, 0] = torch.nan
    assert equal(masked((0, 0, 0), a=a))
    assert sorted(kinds()) == ["gemm_fault", "nonfinite_input"]


def test_a_nan_in_the_mask_is_still_named() -> None:
    addend = causal("addmm")
    addend[3, 2] = torch.nan
    with holdfast.protect(nn.Identity()):
        torch.addmm(addend, *operands("addmm", torch.float32))
    (event,) = events.recent()
    assert (event.kind, event.detail["rows"]) == ("nonfinite_input", 1)


def test_a_damaged_operand_beside_a_mask_is_found() -> None:
    with pytest.raises(UncorrectableFault, match="changed in row"):
        masked((1, 3, 2), lambda old: old + 20.0, stage="operand")
    assert kinds() == ["operand_fault"]


def test_a_masked_product_that_overflows_is_an_input_problem() -> None:
    a, b = torch.full((2, 8), 200.0, dtype=torch.float16), torch.full((8, 3), 200.0).half()
    addend = torch.tensor([0.0, 0.0, -torch.inf]).half()
    expected = torch.addmm(addend, a, b)
    assert expected.isfinite().sum() == 0
    with holdfast.protect(nn.Identity()):
        assert equal([torch.addmm(addend, a, b), expected])
    assert kinds() == ["nonfinite_input"]


def test_a_kernel_that_never_masks_is_found() -> None:
    a, b = operands("baddbmm", torch.float32)
    addend, correct = padding("baddbmm"), torch.bmm(a, b)
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
    expected = OPS[op](addend, a, b, beta=-0.5)
    with holdfast.protect(nn.Identity()) as protection:
        for mask in (addend, addend.mT.contiguous().mT):
            assert equal([OPS[op](mask, a, b, beta=-0.5), expected])
        (site,) = protection.report().sites
    assert events.recent() == []
    assert site.suspects == 0


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_a_long_sum_of_narrow_elements_hides_no_more_under_a_mask(dtype: torch.dtype) -> None:
    """It is accumulated in fp32, so that its roundings are far smaller than those of the mask."""
    a, b = torch.randn(8, 4096).to(dtype), (torch.randn(4096, 16) / 64).to(dtype)
    addend = torch.randn(8, 16).to(dtype)
    addend[:, 7] = 5000.0
    expected = torch.addmm(addend, a, b)
    with holdfast.protect(nn.Identity()), struck((3, 7), lambda old: 0.95 * old):
        assert same_bits(torch.addmm(addend, a, b), expected)
    assert kinds() == ["gemm_fault"]


@for_each("dtype", DTYPES)
@for_each("mask", [-torch.inf, -1e4])
@for_each("by_columns", [False, True])
def test_strided_vectors_keep_torchs_bits(
    dtype: torch.dtype, mask: float, by_columns: bool
) -> None:
    matrix, vector = torch.randn(129, 300).to(dtype), torch.randn(600).to(dtype)[::2]
    matrix = matrix.t().contiguous().t() if by_columns else matrix
    addend = torch.zeros(258, dtype=dtype)[::2]
    addend[::3] = mask
    expected = torch.addmv(addend, matrix, vector)
    with holdfast.protect(nn.Identity()):
        assert same_bits(torch.addmv(addend, matrix, vector), expected)
        assert kinds() == []
        with struck((0, 1), torch.nan):
            assert same_bits(torch.addmv(addend, matrix, vector), expected)
    assert kinds() == ["gemm_fault"]


@for_each("masked", [False, True])
def test_results_anywhere_in_memory_keep_torchs_bits(masked: bool) -> None:
    """Kernels of vectors round by the address of their result, if two threads divide them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows, inner, offset in itertools.product((65, 128), (127, 257), (1, 3, 9)):
            a, b = torch.randn(1, inner, rows).mT, torch.randn(1, inner, 1)
            addend = torch.randn(1, rows, 1)
            if masked:
                addend[:, ::3] = -torch.inf
            memory = torch.zeros(rows + offset)[offset:].view(1, rows, 1)
            expected = torch.baddbmm(addend, a, b, out=memory).clone()
            with holdfast.protect(nn.Identity()):
                assert same_bits(torch.baddbmm(addend, a, b, out=memory), expected)
                assert kinds() == []
                with struck((0, 1, 0), torch.nan):
                    assert same_bits(torch.baddbmm(addend, a, b, out=memory), expected)
            assert kinds() == ["gemm_fault"]
            events.clear()
    finally:
        torch.set_num_threads(threads)
