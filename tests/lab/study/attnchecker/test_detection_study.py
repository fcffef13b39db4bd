"""The campaign on attention: it strikes what it says, counts what it sees, and can fail."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from holdfast import events, native
from holdfast.abft.attention import section_softmax
from holdfast.protection import Protection, protect
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.study.attnchecker import detection, struck_products
from holdfast_lab.study.attnchecker import struck_tiles as tiles_module
from holdfast_lab.study.attnchecker.models import PAPER_MODELS, TINY, subject
from holdfast_lab.study.attnchecker.probe import TYPES, Strike, named
from holdfast_lab.study.attnchecker.struck_products import Replays, computed, struck_rows
from holdfast_lab.study.attnchecker.struck_sections import SITES, as_sections, struck_probabilities
from holdfast_lab.study.attnchecker.struck_tiles import STAGES, heads_of, struck_tiles
from holdfast_lab.study.attnchecker.subjects import Subject

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
fused = pytest.mark.skipif(native.core is None, reason="the fused kernel is native")

SIZE = replace(TINY, layers=1)
FAULTS = 20


def strike(matrix: str, kind: str) -> Strike:
    return Strike(matrix, kind, torch.Generator().manual_seed(0))


def unverified(model: nn.Module) -> Protection:
    """Protection that names products and verifies nothing."""
    return protect(model, verify=False)


def products(case: Subject) -> dict[str, struck_products.Computed]:
    return computed(case, {matrix.forward for matrix in case.matrices.values()})


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_sections_compute_what_the_models_block_does(name: str) -> None:
    case = subject(name, SIZE)
    block = as_sections(case, SIZE.heads)
    with named(case) as forward:
        theirs = forward(None).matrices
    ours = products(block)
    for matrix in ("AS", "V", "CL", "O"):
        product = ours[block.matrices[matrix].forward].c.reshape(theirs[matrix].shape)
        factor = (SIZE.width / SIZE.heads) ** 0.5 if name == "gpt-neo" and matrix == "AS" else 1.0
        assert torch.allclose(product, theirs[matrix] * factor, rtol=1e-4, atol=1e-6), matrix
    probabilities = ours[block.matrices["AP"].forward].a
    assert torch.allclose(probabilities, theirs["AP"], rtol=1e-4, atol=1e-6)
    assert events.recent() == []


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_extreme_rows_are_found_and_clean_rows_are_not(name: str, kind: str) -> None:
    case = subject(name, SIZE)
    for block in (case, as_sections(case, SIZE.heads)):
        for site, product in products(block).items():
            assert not product.suspects(product.c).any(), site
        for matrix in "QKVO":
            product = products(block)[block.matrices[matrix].forward]
            counts = struck_rows(product, block.matrices[matrix], strike(matrix, kind), FAULTS)
            assert (counts.trials, counts.detected) == (FAULTS, FAULTS), matrix


def test_a_strike_changes_the_columns_of_its_matrix_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = subject("gpt2", SIZE)  # one product for Q, K and V
    matrix = case.matrices["K"]
    product = products(case)[matrix.forward]
    shown: list[torch.Tensor] = []

    def suspects(self: object, c: torch.Tensor) -> torch.Tensor:
        shown.append(c.clone())
        return torch.ones(c.shape[:2], dtype=torch.bool)

    monkeypatch.setattr(struck_products.Computed, "suspects", suspects)
    struck_rows(product, matrix, strike("K", "inf"), 5)
    changed = shown[0] != product.c
    assert changed.sum() == 5
    assert changed.any(-1).sum() == 5
    assert matrix.of(changed).sum() == 5


def test_what_is_missed_is_counted_by_its_effect() -> None:
    case = subject("bert", SIZE)
    matrix = case.matrices["V"]
    counts = struck_rows(products(case)[matrix.forward], matrix, strike("V", "flip-0-up"), FAULTS)
    assert counts.trials == FAULTS
    assert counts.detected == counts.harmful == 0
    assert counts.below_rounding + counts.harmless == FAULTS


def test_a_fault_that_no_element_can_have_is_not_counted() -> None:
    case = subject("bert", SIZE)
    product = products(case)[case.matrices["AS"].forward]
    counts = struck_rows(product, case.matrices["AS"], strike("AS", "flip-30-down"), FAULTS)
    assert counts == Counts()  # no score is 2 or more


@pytest.mark.parametrize("kind", TYPES)
def test_probabilities_are_settled_and_unsettled_they_stay_wrong(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = as_sections(subject("gpt2", SIZE), SIZE.heads)
    probabilities = products(block)[block.matrices["AP"].forward].a
    before = probabilities.clone()
    counts = struck_probabilities(probabilities, strike("AP", kind), FAULTS)
    assert (counts.trials, counts.detected, counts.replayed_corrected) == (FAULTS,) * 3
    assert torch.equal(probabilities, before)
    assert events.recent() == []
    monkeypatch.setattr(section_softmax, "settle", lambda *_: False)
    missed = struck_probabilities(probabilities, strike("AP", kind), FAULTS)
    assert (missed.detected, missed.harmful, missed.replayed_corrected) == (0, FAULTS, 0)


@fused
@pytest.mark.parametrize("matrix", STAGES)
def test_tiles_are_repaired_and_unverified_they_do_harm(
    matrix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = heads_of(subject("bert", SIZE), SIZE.heads)
    assert len(heads) == SIZE.batch * SIZE.heads
    assert [head.mask is None for head in heads] == [True] * SIZE.heads + [False] * SIZE.heads
    counts = struck_tiles(heads, strike(matrix, "nan"), FAULTS)
    assert (counts.trials, counts.detected, counts.replayed_corrected) == (FAULTS,) * 3
    monkeypatch.setattr(tiles_module, "protect", unverified)
    missed = struck_tiles(heads, strike(matrix, "nan"), FAULTS)
    assert (missed.trials, missed.detected) == (FAULTS, 0)
    assert missed.harmful > 0


@pytest.mark.parametrize("sections", [False, True])
def test_a_replay_is_repaired_and_unverified_it_leaves_a_trace(
    sections: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = subject("bert", SIZE)
    case = as_sections(case, SIZE.heads) if sections else case
    for matrix in SITES if sections else ("Q", "AS", "O"):
        counts = Replays(case).strikes(strike(matrix, "nan"), 2)
        assert counts == Counts(replayed=2, replayed_detected=2, replayed_corrected=2), matrix
    if not sections:  # they check themselves, protected or not
        monkeypatch.setattr(struck_products, "protect", unverified)
        missed = Replays(case).strikes(strike("Q", "nan"), 2)
        assert missed == Counts(replayed=2)


def tallied(detected: int = 10, right: int = 2) -> dict[detection.Key, Counts]:
    """What two models' counts may be."""
    extreme = Counts(trials=10, detected=detected, replayed=2, replayed_corrected=right)
    flip = Counts(trials=10, detected=7, masked=1, below_rounding=1, harmless=1)
    found = {}
    for model in ("bert", "gpt2"):
        place = detection.PRODUCTS, model, "Q"
        found |= {(*place, kind): extreme for kind in TYPES}
        found[*place, "flip-27-down"] = flip
    return found


def test_flips_are_summed_over_models_and_extremes_are_not() -> None:
    rows = list(detection.rows_of(tallied()))
    assert [row.table for row in rows] == [detection.EXTREMES] * 2 + [detection.FLIPS]
    *extremes, flips = rows
    assert [row.case["model"] for row in extremes] == ["bert", "gpt2"]
    assert {row.agreement for row in extremes} == {"within"}
    assert extremes[0].case["faults"] == 30
    assert flips.case["faults"] == 20
    assert flips.case["flipped"] == "1 → 0"
    assert flips.measured[detection.FOUND] == 70
    assert flips.measured[detection.BELOW] == 20
    low, high = flips.intervals[detection.FOUND]
    assert 45 < low < 70 < high < 90


@pytest.mark.parametrize(("detected", "right"), [(9, 2), (10, 1)])
def test_a_missed_or_unrepaired_extreme_breaks_the_verdict(detected: int, right: int) -> None:
    assert detection.verdict(list(detection.rows_of(tallied()))) == ""
    rows = list(detection.rows_of(tallied(detected, right)))
    assert "in Q of bert, by each product, is missed or remains" in detection.verdict(rows)
