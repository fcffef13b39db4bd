"""Probes: the matrices are those of the model, and a strike changes one element as it should."""

import pytest
import torch
from case_loops import for_each

from holdfast_lab.study.attnchecker.models import PAPER_MODELS, TINY, subject
from holdfast_lab.study.attnchecker.patterns import ELEMENT, pattern
from holdfast_lab.study.attnchecker.probe import MATRICES, STRUCK, TYPES, Strike, named

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")

HEAD = TINY.width // TINY.heads


def heads(matrix: torch.Tensor) -> torch.Tensor:
    """[sequences · length, width] → [sequences · heads, length, head]."""
    split = matrix.view(TINY.batch, TINY.length, TINY.heads, HEAD)
    return split.transpose(1, 2).flatten(0, 1)


@for_each("name", PAPER_MODELS)
def test_the_matrices_are_those_of_attention(name: str) -> None:
    with named(subject(name)) as forward:
        found = forward(None).matrices
    assert sorted(found) == sorted(MATRICES)
    query, key, value = (heads(found[matrix]) for matrix in "QKV")
    assert torch.allclose(found["AS"], query @ key.mT, atol=1e-6)
    assert torch.allclose(found["CL"], found["AP"] @ value, atol=1e-6)
    assert torch.allclose(found["AP"].sum(-1), torch.ones(()), atol=1e-6)
    assert found["O"].shape == (TINY.batch * TINY.length, TINY.width)


@for_each("kind", TYPES)
@for_each("matrix", STRUCK)
@for_each("name", PAPER_MODELS)
def test_a_strike_changes_one_element_of_its_matrix_alone(
    name: str, matrix: str, kind: str
) -> None:
    case = subject(name)
    strike = Strike(matrix, kind, torch.Generator().manual_seed(1))
    with named(case) as forward:
        clean, struck = forward(None).matrices, forward(strike)
        again = forward(None).matrices
    assert struck.struck
    found = pattern(clean[matrix], struck.matrices[matrix])
    sign = {"inf": "∞", "nan": "Θ", "near_inf": "N"}[kind]
    assert (found.shape, found.kind) == (ELEMENT, sign)
    others = {"Q": "KV", "K": "QV", "V": ("Q", "K", "AS", "AP"), "AS": "QKV", "CL": "QKV"}[matrix]
    for other in others:
        assert str(pattern(clean[other], struck.matrices[other])) == "-", other
    assert all(str(pattern(clean[other], again[other])) == "-" for other in MATRICES)


def test_near_inf_strikes_only_what_becomes_near_inf() -> None:
    values = torch.tensor([[0.0, 1.5, 3.0, 0.25]])  # the top bit makes 2, NaN, tiny and 8.5e37
    Strike("Q", "near_inf", torch.Generator()).into(values)
    assert values.tolist() == [[0.0, 1.5, 3.0, 0.25 * 2.0**128]]
