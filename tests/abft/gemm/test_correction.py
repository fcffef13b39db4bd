"""The three ways to correct: from checksums alone, by computing again, not at all."""

import pytest
import torch
from case_loops import for_each
from struck import DTYPES, struck
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft import policy
from holdfast.errors import UncorrectableFault

M, K, N = 40, 96, 70
dtypes = for_each("dtype", DTYPES)


def product(
    dtype: torch.dtype, faults: dict[tuple[int, int], float], correction: str, verify: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """C with faults and with correction, and C without."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((M, K), (K, N)))
    bias = torch.randn(N, generator=generator).to(dtype)
    clean = torch.addmm(bias, a, b, beta=0.5, alpha=2.0)
    rows, columns = ([place[i] for place in faults] for i in (0, 1))
    wrong = torch.tensor(list(faults.values())).to(dtype)
    with (
        holdfast.protect(nn.Identity(), verify=verify, correction=correction),
        struck((rows, columns), wrong),
    ):
        return torch.addmm(bias, a, b, beta=0.5, alpha=2.0), clean


def error_of(repaired: torch.Tensor, clean: torch.Tensor) -> float:
    """Largest error of an element, in roundings of its row's norm."""
    scale = clean.double().norm(dim=1, keepdim=True) * torch.finfo(clean.dtype).eps
    return float(((repaired.double() - clean.double()).abs() / scale).max())


ONE_EACH = {(3, 5): torch.inf, (4, 5): torch.nan, (17, 69): 3e4, (39, 0): -torch.inf}


@dtypes
def test_checksums_rebuild_one_element_a_row_without_a_second_product(dtype: torch.dtype) -> None:
    repaired, clean = product(dtype, ONE_EACH, "checksum")
    wrong = repaired != clean
    assert {tuple(place) for place in wrong.nonzero().tolist()} <= set(ONE_EACH)
    assert error_of(repaired, clean) <= 16
    assert [event.detail["method"] for event in events.recent()] == ["checksum"]
    assert events.recent()[0].detail["rows"] == len(ONE_EACH)


@dtypes
def test_rows_with_several_faults_are_computed_again(dtype: torch.dtype) -> None:
    repaired, clean = product(dtype, {(3, 5): 3e4, (3, 8): 2e4, (9, 1): torch.nan}, "checksum")
    assert torch.equal(repaired[3], clean[3])
    methods = [event.detail["method"] for event in events.recent()]
    assert methods == ["checksum", "recompute"]


@dtypes
def test_detection_alone_raises_and_changes_nothing(dtype: torch.dtype) -> None:
    with pytest.raises(UncorrectableFault, match="row 3 differs from its recomputation"):
        product(dtype, ONE_EACH, "detect")
    with policy.collecting() as found:
        result, _ = product(dtype, ONE_EACH, "detect")
    assert [event.kind for event in found.unrepaired] == ["gemm_fault"]
    assert result[3, 5].isinf()
    assert result[4, 5].isnan()


@dtypes
@for_each("correction", policy.CORRECTIONS)
def test_clean_products_are_silent_and_with_the_detector_off_faults_stay(
    dtype: torch.dtype, correction: str
) -> None:
    assert torch.equal(*product(dtype, {}, correction))
    assert not torch.equal(*product(dtype, ONE_EACH, correction, verify=False))
    assert events.recent() == []


def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute, checksum, detect, got 'repair'"):
        holdfast.protect(nn.Identity(), correction="repair")
