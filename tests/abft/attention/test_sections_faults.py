"""Every matrix of every section, forward and backward: silent, repaired, and not vacuous."""

import pytest
import torch
from case_loops import for_each
from section_cases import (
    DTYPES,
    PRODUCTS,
    Strike,
    armed,
    data,
    module,
    results,
    same_bits,
    values,
)

from holdfast import events, sites
from holdfast.abft import policy
from holdfast.abft.attention import section_counters
from holdfast.errors import UncorrectableFault

dtypes = for_each("dtype", DTYPES)
products = for_each("product", PRODUCTS)


@dtypes
def test_clean_data_is_silent_in_every_mode(dtype: torch.dtype) -> None:
    healthy = results(module(dtype, frequencies=(0, 0, 0)), data(dtype))
    for correction in policy.CORRECTIONS:
        section_counters.reset()
        assert same_bits(results(module(dtype, correction=correction), data(dtype)), healthy)
        rows = section_counters.counters()
        assert {sites.site_name(row["site"]).split("/", 1)[1] for row in rows} == set(PRODUCTS)
        assert all(row["rows"] > 0 and not row["suspects"] for row in rows)
    assert events.recent() == []


@dtypes
@products
def test_a_fault_is_repaired_bit_for_bit(product: str, dtype: torch.dtype) -> None:
    healthy, certain = results(module(dtype), data(dtype)), 0
    for name, damage in values(dtype).items():
        events.clear()
        with armed(Strike(product, damage)) as strike:
            result = results(module(dtype), data(dtype))
        found = events.recent()
        certain += strike.certain
        assert same_bits(result, healthy) or not strike.certain, name
        assert len(found) == 1 or not strike.certain, name
        for event in found:
            assert event.kind == ("softmax_fault" if "AP" in product else "gemm_fault"), name
            assert event.op.endswith(product)
            assert event.rung == "correct"
            assert event.detail["index"] == strike.index
    assert certain >= 5  # INF, NaN and near-INF at the least


@dtypes
@products
def test_without_checks_the_same_fault_reaches_the_result(product: str, dtype: torch.dtype) -> None:
    unchecked = module(dtype, frequencies=(0, 0, 0))
    healthy = results(unchecked, data(dtype))
    # softmax absorbs some: a score of −INF is a key ignored, and still another result.
    for name in ("nan", "near"):
        with armed(Strike(product, values(dtype)[name])):
            assert not same_bits(results(unchecked, data(dtype)), healthy), name
    assert events.recent() == []


@products
def test_a_section_that_is_not_due_leaves_the_others_at_work(product: str) -> None:
    section = ("S_AS", "S_CL", "S_O").index(product.split(".")[0])
    frequencies = [1.0, 1.0, 1.0]
    frequencies[section] = 0.0
    with armed(Strike(product, values(torch.float32)["nan"])):
        result = results(module(frequencies=frequencies), data())
    assert not same_bits(result, results(module(), data()))
    assert not any(event.op.endswith(product) for event in events.recent())
    events.clear()
    for other in {"S_AS.AS/forward", "S_CL.CL/forward", "S_O.O/forward"}:
        if other.split(".")[0] != product.split(".")[0]:
            with armed(Strike(other, values(torch.float32)["nan"])):
                result = results(module(frequencies=frequencies), data())
            assert same_bits(result, results(module(), data()))


def test_a_persistent_fault_is_raised() -> None:
    class Again(Strike):
        def __call__(self, stage, site, gemm, output) -> None:  # type: ignore[no-untyped-def]
            if stage == "operand" and site.endswith("S_O.O/forward"):
                self.done = 1
                gemm.b.data[0, 0] = 1e6

    with armed(Again("S_O.O/forward", lambda old: old)), pytest.raises(UncorrectableFault):
        results(module(), data())
