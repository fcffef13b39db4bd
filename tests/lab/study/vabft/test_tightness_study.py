"""The paper's thresholds, recomputed at its own sizes, and the e_max of its own protocol."""

import pytest
import torch

from holdfast.abft.thresholds.protocol import Product
from holdfast_lab.distributions import RANDOM
from holdfast_lab.study import Row, Settings, Unwatched
from holdfast_lab.study.vabft import emax, paper, tightness
from holdfast_lab.study.vabft.residuals import DTYPES, Margins, residuals


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("size", [128, 512])
def test_both_published_thresholds_are_the_tables_to_five_percent(
    precision: str, size: int
) -> None:
    draw = RANDOM[tightness.PAPER_DISTRIBUTION[precision]]
    generator, margins = torch.Generator().manual_seed(0), Margins()
    for _ in range(3):
        a, b = draw(64, size, size, DTYPES[precision], generator)
        c = a @ b
        members = tightness.PAPER_MEMBERS[precision]
        margins.add(Product(a, b, c, c.dtype), residuals(a, b, c), members)
    published = paper.tightness(precision, size)
    for column, name in (("T of A-ABFT", "aabft"), ("T of V-ABFT", "vabft")):
        threshold = margins[name].threshold
        assert published[column].meets(threshold, threshold), (name, threshold)


def test_a_size_that_the_paper_lacks_has_no_published_values() -> None:
    assert paper.tightness("fp64", 100) == {}
    assert set(paper.tightness("fp64", 128)) == set(paper.TIGHTNESS_COLUMNS)


@pytest.mark.parametrize(
    ("precision", "ours", "words"),
    [
        ("fp64", 7.5, ""),
        ("bf16", 7.5, "7.5 × the largest error, over 5"),
        ("fp64", 0.9, "0.9 × a clean row's error"),
        ("fp16", 40.0, "40 × the largest"),
    ],
)
def test_the_verdict_is_on_our_own_claim(precision: str, ours: float, words: str) -> None:
    case = {"precision": precision}
    row = Row(tightness.SIDE_BY_SIDE, case, {"rounding": ours, "vabft": 1e6})
    verdict = tightness.STUDIES[0].verdict([row])
    assert words in verdict
    assert bool(verdict) == bool(words)


def test_growth_is_that_of_the_tables() -> None:
    assert paper.growth("fp64", 1).value == pytest.approx(1.5, abs=0.01)  # √(n³)
    assert paper.growth("bf16", 1).value == pytest.approx(2.5, abs=0.05)  # with y = Σ_j B_kj


def test_wrong_sums_raise_e_max() -> None:
    a, b = emax.positive_operands(64, torch.float32, torch.Generator().manual_seed(0))
    clean = emax.relative_errors(a, b)
    assert 0 < clean.wide <= clean.apart < 40
    assert clean.joined(emax.RelativeErrors(apart=99.0)).apart == 99.0


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_the_protocols_operands_are_positive_and_their_checksums_finite(dtype: torch.dtype) -> None:
    a, b = emax.positive_operands(512, dtype, torch.Generator().manual_seed(0))
    assert a.dtype == b.dtype == dtype
    assert min(float(a.min()), float(b.min())) >= 0
    assert (a @ b).sum(-1).isfinite().all()


def test_other_platforms_are_shown_as_not_measured() -> None:
    rows = list(emax.STUDY.run(Settings("tiny"), Unwatched()))
    foreign = [row for row in rows if row.case["platform"] != "CPU"]
    assert {row.case["platform"] for row in foreign} == {"GPU H100", "NPU 910B"}
    assert {(row.agreement, row.note) for row in foreign} == {("paper only", "not measured")}
    assert not any(row.measured for row in foreign)
