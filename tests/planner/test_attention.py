"""The sizes of one attention: flops, what checks read, what they cost."""

import pytest

from holdfast.planner.attention import (
    MODELS,
    SECTIONS,
    AttentionSize,
    check_reads,
    gemm_flops,
    modelled_costs,
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


def test_heads_are_derived_and_models_have_their_published_sizes() -> None:
    size = AttentionSize.of_model("bert-base", 16, 128)
    assert (size.kv_heads, size.head_size, size.query_width) == (12, 64, 768)
    # 8 T d² for the four projections, 4 B L² d for the two products of attention
    assert sum(gemm_flops(size).values()) == 8 * 2048 * 768**2 + 4 * 16 * 128**2 * 768
    assert all(width % heads == 0 for _, width, heads in MODELS.values())


def test_modelled_costs_add_up_to_the_published_overheads_in_proportion_to_reads() -> None:
    costs, reads = modelled_costs(SMALL), check_reads(SMALL)
    assert costs.total / costs.attention == pytest.approx(0.11)
    assert costs.total / costs.step == pytest.approx(0.07)
    for name in SECTIONS:
        share = reads[name] / sum(reads.values())
        assert costs.sections[name] / costs.total == pytest.approx(share)
