"""The campaign on attention: it strikes what it says, counts what it sees, and can fail."""

from dataclasses import replace

import pytest
import torch
from case_loops import for_each
from torch import nn

from holdfast import events, native
from holdfast.abft.attention import section_softmax
from holdfast.protection import Protection, protect
from holdfast_lab.campaign import end_to_end
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.study.attnchecker import injected_products
from holdfast_lab.study.attnchecker import injected_tiles as tiles_module
from holdfast_lab.study.attnchecker.injected_products import Replays, computed, injected_rows
from holdfast_lab.study.attnchecker.injected_sections import (
    SITES,
    as_sections,
    injected_probabilities,
)
from holdfast_lab.study.attnchecker.injected_tiles import STAGES, heads_of, injected_tiles
from holdfast_lab.study.attnchecker.models import PAPER_MODELS, TINY, subject
from holdfast_lab.study.attnchecker.probe import TYPES, Strike, named
from holdfast_lab.study.attnchecker.subjects import Subject

pytestmark = pytest.mark.study

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")
fused = pytest.mark.skipif(native.core is None, reason="the fused kernel is native")

SIZE = replace(TINY, layers=1)
FAULTS = 20


def strike(matrix: str, kind: str) -> Strike:
    return Strike(matrix, kind, torch.Generator().manual_seed(0))


def unverified(model: nn.Module, **_: object) -> Protection:
    """Protection that names products and verifies nothing."""
    return protect(model, verify=False)


def products(case: Subject) -> dict[str, injected_products.Computed]:
    return computed(case, {matrix.forward for matrix in case.matrices.values()})


@for_each("name", PAPER_MODELS)
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


@for_each("kind", TYPES)
@for_each("name", ["bert", "gpt2"])
def test_extreme_rows_are_found_and_clean_rows_are_not(name: str, kind: str) -> None:
    case = subject(name, SIZE)
    for block in (case, as_sections(case, SIZE.heads)):
        for site, product in products(block).items():
            assert not product.suspects(product.c).any(), site
        for matrix in "QKVO":
            product = products(block)[block.matrices[matrix].forward]
            counts = injected_rows(product, block.matrices[matrix], strike(matrix, kind), FAULTS)
            assert (counts.trials, counts.detected) == (FAULTS, FAULTS), matrix


@pytest.mark.parametrize("kind", TYPES)
def test_probabilities_are_settled_and_unsettled_they_stay_wrong(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = as_sections(subject("gpt2", SIZE), SIZE.heads)
    probabilities = products(block)[block.matrices["AP"].forward].a
    before = probabilities.clone()
    counts = injected_probabilities(probabilities, strike("AP", kind), FAULTS)
    assert (counts.trials, counts.detected, counts.replayed_corrected) == (FAULTS,) * 3
    assert torch.equal(probabilities, before)
    assert events.recent() == []
    monkeypatch.setattr(section_softmax, "settle", lambda *_: False)
    missed = injected_probabilities(probabilities, strike("AP", kind), FAULTS)
    assert (missed.detected, missed.harmful, missed.replayed_corrected) == (0, FAULTS, 0)


@fused
@pytest.mark.parametrize("matrix", STAGES)
def test_tiles_are_repaired_and_unverified_they_do_harm(
    matrix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = heads_of(subject("bert", SIZE), SIZE.heads)
    assert len(heads) == SIZE.batch * SIZE.heads
    assert [head.mask is None for head in heads] == [True] * SIZE.heads + [False] * SIZE.heads
    counts = injected_tiles(heads, strike(matrix, "nan"), FAULTS)
    assert (counts.trials, counts.detected, counts.replayed_corrected) == (FAULTS,) * 3
    monkeypatch.setattr(tiles_module, "protect", unverified)
    missed = injected_tiles(heads, strike(matrix, "nan"), FAULTS)
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
        monkeypatch.setattr(end_to_end, "protect", unverified)
        missed = Replays(case).strikes(strike("Q", "nan"), 2)
        assert missed == Counts(replayed=2)
