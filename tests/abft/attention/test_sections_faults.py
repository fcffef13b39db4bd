"""Faults in every matrix of every section, forward and backward: found, put right, or reported."""

import pytest
import torch
from case_loops import for_each
from section_cases import FORWARD, PRODUCTS, Strike, data, error, module, results, values
from struck import DTYPES, armed, kinds, same_bits, struck
from torch import nn

import holdfast
from holdfast import events, native, sites
from holdfast.abft import counters, policy
from holdfast.abft.attention.op import SECTIONS
from holdfast.errors import UncorrectableFault
from holdfast.inject import Fault, Injector

UNCHECKED = (0, 0, 0)
dtypes = for_each("dtype", DTYPES)
products = for_each("product", PRODUCTS)


@dtypes
def test_clean_data_is_silent_in_every_mode(dtype: torch.dtype) -> None:
    healthy = results(module(dtype, frequencies=UNCHECKED), data(dtype))
    for correction in policy.CORRECTIONS:
        counters.reset()
        assert same_bits(results(module(dtype, correction=correction), data(dtype)), healthy)
        rows = counters.counters()
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
    unchecked = module(dtype, frequencies=UNCHECKED)
    healthy = results(unchecked, data(dtype))
    # softmax absorbs some: a score of −INF is a key ignored, and still another result.
    for name in ("nan", "near"):
        with armed(Strike(product, values(dtype)[name])):
            assert not same_bits(results(unchecked, data(dtype)), healthy), name
    assert events.recent() == []


@products
def test_a_section_that_is_not_due_leaves_the_others_at_work(product: str) -> None:
    healthy, section = results(module(), data()), product.split(".")[0]
    chosen = module(frequencies=[float(name != section) for name in SECTIONS])
    for place in {product, "S_AS.AS/forward", "S_CL.CL/forward", "S_O.O/forward"}:
        events.clear()
        with armed(Strike(place, values(torch.float32)["nan"])):
            repaired = same_bits(results(chosen, data()), healthy)
        assert repaired == (not place.startswith(section)), place
        assert repaired == any(event.op.endswith(place) for event in events.recent())


def test_an_operand_that_changed_is_raised() -> None:
    with (
        struck((0, 0), 1e6, stage="operand", site="S_O.O/forward"),
        pytest.raises(UncorrectableFault),
    ):
        results(module(), data())


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


@for_each(
    ("matrix", "last", "spread"),
    [
        ("S_AS.Q", "S_AS.AS", "1R"),
        ("S_AS.K", "S_AS.AS", "1C"),
        ("S_CL.V", "S_CL.CL", "1C"),
    ],
)
@for_each("correction", ["recompute", "checksum"])
def test_a_fault_that_spread_is_repaired_at_its_source_and_where_it_went(
    matrix: str, last: str, spread: str, correction: str
) -> None:
    healthy, seen = results(module(), data()), []
    strike = Strike(f"{matrix}/forward", values(torch.float32)["near"])

    def hook(stage: str, site: str, gemm: sites.Gemm, output: torch.Tensor | None) -> None:
        strike(stage, site, gemm, output)
        if output is not None and site.endswith(f"{last}/forward"):
            seen.append(output.abs() > 1e9)

    with armed(hook):
        result = results(module(correction=correction), data())
    (wrong,) = seen  # the fault had spread before the section's end
    head = wrong[wrong.flatten(1).any(1)][0]
    lines = int(head.any(1).sum()), int(head.any(0).sum())
    assert lines == ((1, head.shape[1]) if spread == "1R" else (head.shape[0], 1))
    found = [(e.op.rsplit("/", 2)[1], e.detail.get("pattern")) for e in events.recent()]
    if correction == "recompute":
        assert same_bits(result, healthy)
        assert found == [(matrix, None)]
    else:
        assert found[0] == (matrix, "0D")
        assert (last, spread) in found
        assert error(result, healthy) < 1e-3


@for_each("mixed", [False, True])
@for_each("where", ["0D", "1R", "1C"])
@for_each("matrix", [matrix for matrix in FORWARD if matrix != "S_CL.AP"])  # AP has no checksum
def test_each_pattern_is_corrected_by_checksums(matrix: str, where: str, mixed: bool) -> None:
    def damage(old: torch.Tensor) -> torch.Tensor:
        some = torch.tensor([torch.inf, torch.nan, 3e38, -torch.inf, 7.0][: 5 if mixed else 1])
        return some.repeat(old.numel())[: old.numel()].view(old.shape)

    healthy = results(module(), data())
    with armed(Strike(f"{matrix}/forward", damage, where)):
        result = results(module(correction="checksum"), data())
    found = [event for event in events.recent() if matrix in event.op]
    assert found[0].detail["method"] == "checksum"
    assert found[0].detail["pattern"] == where
    assert error(result, healthy) < 1e-3
    with armed(Strike(f"{matrix}/forward", damage, where)):
        assert same_bits(results(module(), data()), healthy)


# Inputs (the input of Q, K and V, three times), weights, then Q, K, V by head, AP and CL.
@for_each("saved", [0, 8, 9, 10, 11])
def test_damage_to_what_waits_for_backward_is_seen_and_unchecked_reaches_the_gradients(
    saved: int,
) -> None:
    def gradients(added: float, **settings: object) -> tuple[torch.Tensor, ...]:
        attention = module(**settings)
        output = attention(data())
        waiting = [t for t in output.grad_fn.saved_tensors if t is not None][saved]  # type: ignore[union-attr]
        waiting.data[(-1,) * waiting.dim()] += added
        return torch.autograd.grad(output.sum(), list(attention.parameters()))

    with pytest.raises(UncorrectableFault, match="changed in row"):
        gradients(3.0)
    assert kinds() == ["operand_fault"]
    healthy = gradients(0.0, frequencies=UNCHECKED)
    assert not same_bits(gradients(3.0, frequencies=UNCHECKED), healthy)


@for_each("matrix", FORWARD)
@for_each("index", [(1, 2), None])
def test_the_injector_strikes_every_matrix(matrix: str, index: tuple[int, int] | None) -> None:
    model = nn.Sequential(module())
    healthy = model(data())
    if index is not None and matrix in ("S_AS.AS", "S_CL.AP", "S_CL.CL"):
        index = (0, *index)
    op = f"Attention/{matrix}/forward"
    fault = Fault(step=0, rank=0, kind="bitflip", bit=30, site="output", op=op, index=index)
    with Injector(model, [fault], rank=0).step(0):
        repaired = model(data())
    assert torch.equal(repaired, healthy)
    assert kinds() == ["injected", "softmax_fault" if matrix == "S_CL.AP" else "gemm_fault"]
    assert events.recent()[0].op == events.recent()[1].op


def test_under_protect_weights_are_encoded_once_until_they_change() -> None:
    model = nn.Sequential(module())
    healthy = model(data())
    with holdfast.protect(model):
        model(data())
        first = native.core.cached_encodings()
        assert torch.equal(model(data()), healthy)
        assert native.core.cached_encodings() == first == 4
        model(data().requires_grad_()).sum().backward()
        assert native.core.cached_encodings() == 8  # backward multiplies by the other side
        weight = model[0].out_proj.weight
        with torch.no_grad():
            weight += 1.0
        assert not torch.equal(model(data()), healthy)
        assert events.recent() == []
        weight.data[1, 2] += 1.0
        with pytest.raises(UncorrectableFault, match="changed in row"):
            model(data())
    assert native.core.cached_encodings() == 0
