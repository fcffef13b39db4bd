"""The other two modes: corrected by checksums, whatever the pattern, or only reported."""

import pytest
import torch
from case_loops import for_each
from section_cases import (
    DTYPES,
    FORWARD,
    PRODUCTS,
    Strike,
    armed,
    data,
    error,
    module,
    results,
    same_bits,
    values,
)

from holdfast import events, sites
from holdfast.abft import policy
from holdfast.errors import UncorrectableFault

dtypes = for_each("dtype", DTYPES)
products = for_each("product", PRODUCTS)
HAS_CHECKSUMS = [matrix for matrix in FORWARD if matrix != "S_CL.AP"]  # AP is computed again


@for_each("dtype", DTYPES, first=1)
@products
def test_by_checksums_a_fault_is_repaired_to_within_rounding(
    product: str, dtype: torch.dtype
) -> None:
    healthy = results(module(dtype), data(dtype))
    for name, damage in values(dtype).items():
        events.clear()
        with armed(Strike(product, damage)) as strike:
            result = results(module(dtype, correction="checksum"), data(dtype))
        if not strike.certain:
            continue
        found = events.recent()
        assert found, name
        assert found[0].op.endswith(product)
        assert error(result, healthy) <= 8 * torch.finfo(dtype).eps, name
        if "AP" not in product and "bit" not in name:  # small ones may be beyond location
            assert found[0].detail["method"] == "checksum", name
            assert found[0].detail["pattern"] == "0D", name


@dtypes
@products
def test_a_fault_that_is_only_detected_raises_or_is_deferred(
    product: str, dtype: torch.dtype
) -> None:
    detecting = module(dtype, correction="detect")
    damage = values(dtype)["nan"]
    with armed(Strike(product, damage)), pytest.raises(UncorrectableFault, match=product):
        results(detecting, data(dtype))
    with armed(Strike(product, damage)), policy.collecting() as found:
        result = results(detecting, data(dtype))
    assert [event.op.split("/", 1)[1] for event in found.unrepaired][:1] == [product]
    assert any(not t.isfinite().all() for t in result)


@for_each("matrix", ["S_AS.Q", "S_AS.K", "S_CL.V"])
@for_each("correction", ["recompute", "checksum"])
def test_a_fault_that_spread_is_repaired_at_its_source_and_where_it_went(
    matrix: str, correction: str
) -> None:
    dtype = torch.float32
    healthy = results(module(dtype), data(dtype))
    seen: dict[str, torch.Tensor] = {}
    spread = {"S_AS.Q": "1R", "S_AS.K": "1C", "S_CL.V": "1C"}[matrix]
    last = "S_CL.CL" if matrix == "S_CL.V" else "S_AS.AS"
    strike = Strike(f"{matrix}/forward", values(dtype)["near"])

    def hook(stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
        strike(stage, site, gemm, output)
        if output is not None and site.endswith(f"{last}/forward"):
            seen[last] = output.clone()

    sites.arm(hook)
    result = results(module(dtype, correction=correction), data(dtype))
    sites.disarm()
    wrong = seen[last].abs() > 1e9  # the fault had spread before the section's end
    head = wrong.flatten(1).any(1).nonzero()[0, 0]
    rows, columns = int(wrong[head].any(1).sum()), int(wrong[head].any(0).sum())
    assert (rows, columns) == ((1, wrong.shape[2]) if spread == "1R" else (wrong.shape[1], 1))
    kinds = [(event.op.rsplit("/", 2)[1], event.detail.get("pattern")) for event in events.recent()]
    if correction == "recompute":
        assert same_bits(result, healthy)
        assert kinds == [(matrix, None)]
    else:
        assert kinds[0] == (matrix, "0D")
        assert (last, spread) in kinds
        assert error(result, [t.double() for t in healthy]) < 1e-3


@for_each("mixed", [False, True])
@for_each("where", ["0D", "1R", "1C"])
@for_each("matrix", HAS_CHECKSUMS)
def test_each_pattern_is_corrected_by_checksums(matrix: str, where: str, mixed: bool) -> None:
    def damage(old: torch.Tensor) -> torch.Tensor:
        kinds = torch.tensor([torch.inf, torch.nan, 3e38, -torch.inf, 7.0])
        if not mixed:
            return torch.full_like(old, torch.inf)
        return kinds.repeat(old.numel())[: old.numel()].view(old.shape)

    healthy = results(module(), data())
    with armed(Strike(f"{matrix}/forward", damage, where)):
        result = results(module(correction="checksum"), data())
    found = [event for event in events.recent() if matrix in event.op]
    assert found[0].detail["method"] == "checksum"
    assert found[0].detail["pattern"] == where
    assert error(result, [t.double() for t in healthy]) < 1e-3
    with armed(Strike(f"{matrix}/forward", damage, where)):
        assert same_bits(results(module(), data()), healthy)
