"""The sizes of one attention: flops, what checks read, what they cost."""

import re

import pytest
from case_loops import for_each

from holdfast.errors import ConfigError
from holdfast.planner.attention import (
    GEMMS,
    MODELS,
    SECTIONS,
    AttentionSize,
    CheckCosts,
    check_reads,
    gemm_flops,
    modelled_costs,
    parse_costs,
)

SMALL = AttentionSize(batch=2, length=3, width=10, heads=4, kv_heads=2, head_size=5)


def test_flops_are_those_of_each_product_written_out() -> None:
    """X [6, 10], Wq [10, 20], Wk and Wv [10, 10], 8 score matrices [3, 3], Wo [20, 10]."""
    assert gemm_flops(SMALL) == {
        "Q": 2 * 6 * 10 * 20,
        "K": 2 * 6 * 10 * 10,
        "AS": 8 * (2 * 3 * 5 * 3),
        "V": 2 * 6 * 10 * 10,
        "CL": 8 * (2 * 3 * 3 * 5),
        "O": 2 * 6 * 20 * 10,
    }


def test_what_the_checks_of_each_section_read_written_out() -> None:
    x, q, kv, scores = 60, 120, 60, 72
    assert check_reads(SMALL) == {
        "S_AS": x + (200 + 100) + kv + q + scores,
        "S_CL": 100 + scores + x + kv + scores + q,
        "S_O": 200 + x,
    }


def test_every_gemm_is_in_one_section_and_has_flops() -> None:
    assert sorted(GEMMS) == sorted(gemm_flops(SMALL))
    assert len(set(GEMMS)) == 6


def test_heads_are_derived_and_models_have_their_published_sizes() -> None:
    size = AttentionSize.of_model("bert-base", 16, 128)
    assert (size.kv_heads, size.head_size, size.query_width) == (12, 64, 768)
    # 8 T d² for the four projections, 4 B L² d for the two products of attention
    assert sum(gemm_flops(size).values()) == 8 * 2048 * 768**2 + 4 * 16 * 128**2 * 768
    assert all(width % heads == 0 for _, width, heads in MODELS.values())


@for_each(
    ("sizes", "message"),
    [
        ((0, 1, 8, 2), "batch = 0 must be at least 1"),
        ((1, 0, 8, 2), "length = 0 must be at least 1"),
        ((1, 1, 8, 2, -1), "kv_heads = -1 must be positive, or 0"),
        ((1, 1, 9, 2), "width = 9 is no multiple of heads = 2; give head_size"),
        ((1, 1, 8, 4, 3), "heads = 4 must be a multiple of kv_heads = 3"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        AttentionSize(*sizes)


def test_modelled_costs_add_up_to_the_published_overheads_in_proportion_to_reads() -> None:
    costs, reads = modelled_costs(SMALL), check_reads(SMALL)
    assert costs.total / costs.attention == pytest.approx(0.11)
    assert costs.total / costs.step == pytest.approx(0.07)
    for name in SECTIONS:
        share = reads[name] / sum(reads.values())
        assert costs.sections[name] / costs.total == pytest.approx(share)


def test_measured_costs_are_read_from_a_document() -> None:
    costs = parse_costs({"S_AS": 3e-3, "S_CL": 2e-3, "S_O": 0, "step": 0.5})
    assert costs == CheckCosts({"S_AS": 3e-3, "S_CL": 2e-3, "S_O": 0}, step=0.5)
    assert costs.total == pytest.approx(5e-3)


@for_each(
    ("document", "message"),
    [
        ([1, 2], "costs are [1, 2]: give {section: seconds}"),
        ({"S_AS": 1, "S_CL": 1}, "costs of ['S_AS', 'S_CL']: give those of"),
        ({"S_AS": 1, "S_CL": 1, "S_O": 1, "S_X": 1}, "'S_X'"),
        ({"S_AS": -1, "S_CL": 1, "S_O": 1}, "cost of S_AS = -1 must be finite and at least 0"),
        ({"S_AS": "1", "S_CL": 1, "S_O": 1}, "cost of S_AS = '1' is no number of seconds"),
        ({"S_AS": float("nan"), "S_CL": 1, "S_O": 1}, "cost of S_AS = nan must be finite"),
        ({"S_AS": 1, "S_CL": 1, "S_O": 1, "step": True}, "cost of step = True is no number"),
    ],
)
def test_costs_that_are_none_are_refused(document: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_costs(document)
