"""The bound of appendix D.4: the registered threshold's, and what it flags at which norms."""

import pytest
import torch
from case_loops import for_each
from study_runs import rows_of

from holdfast.abft.thresholds import REGISTRY, Product
from holdfast_lab.study.sdc.bf16 import (
    ELEMENTS,
    FLAGGED,
    OPERANDS,
    PRECISIONS,
    PRINTED,
    SHARE,
    bound,
)


@for_each("dtype", PRECISIONS.values())
def test_with_the_printed_norms_it_is_the_bound_that_holdfast_calls_norm(
    dtype: torch.dtype,
) -> None:
    for draw in OPERANDS.values():
        a, b = (each.to(dtype) for each in draw(4, 64, torch.Generator().manual_seed(0)))
        registered = REGISTRY["norm"](Product(a, b, a @ b, dtype))
        assert bound(a, b, PRINTED) == pytest.approx(float(registered.max()), rel=1e-12)
        assert bound(a, b, ELEMENTS) < bound(a, b, PRINTED)


@pytest.mark.study
def test_the_printed_bound_flags_nothing_and_the_elements_what_has_a_mean() -> None:
    rows = [row for row in rows_of("sdc.bf16") if row.case["precision"] != "fp16"]  # overflows
    printed = [row for row in rows if row.case["norms"] == PRINTED]
    assert {row.measured[FLAGGED] for row in printed} == {0.0}
    assert max(row.measured[SHARE] for row in printed) < 0.02
    flagged = [row for row in rows if row.measured[FLAGGED]]
    assert {row.case["operands"] for row in flagged} == {"N(1, 1) · N(0.02, 0.02²)"}
