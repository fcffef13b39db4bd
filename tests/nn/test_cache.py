"""Decoding: checksums of the cache grow with it, find damage to it, and heal."""

import math
from collections.abc import Callable
from functools import partial

import attention_cases
import pytest
import torch
from attention_cases import BATCH, WIDTH
from case_loops import for_each
from struck import kinds, struck

from holdfast import events
from holdfast.abft import policy
from holdfast.abft.attention import section_cache
from holdfast.abft.gemm import incremental_checksums as growing
from holdfast.abft.gemm import suspects
from holdfast.abft.gemm.cpu import encode
from holdfast.errors import UncorrectableFault
from holdfast.nn import Attention, Cache
from holdfast.sites import Gemm

LENGTH = 9
made = partial(attention_cases.made, causal=True)
data = partial(attention_cases.data, LENGTH)


def decode(
    module: Attention,
    x: torch.Tensor,
    steps: list[int],
    between: Callable[[Cache], None] = lambda cache: None,
) -> tuple[torch.Tensor, Cache]:
    """The outputs of all positions, and the cache; ``between`` before the last step."""
    cache, outputs = Cache(), []
    parts = x[:, : sum(steps)].split(steps, 1)
    with torch.no_grad():
        for number, part in enumerate(parts):
            if number == len(parts) - 1:
                between(cache)
            outputs.append(module(part, cache=cache))
    return torch.cat(outputs, 1), cache


def past(cache: Cache, part: int) -> torch.Tensor:
    """What is cached of the keys (0) or the values (1), to be damaged."""
    assert cache.past is not None
    return cache.past[part]


@for_each("steps", [[1] * LENGTH, [5, 1, 1, 2], [LENGTH]])
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_checksums_that_grew_are_those_of_the_whole_cache(
    dtype: torch.dtype, steps: list[int]
) -> None:
    _, cache = decode(made(dtype, rope=100.0, kv_heads=2), data(dtype=dtype), steps)
    checksums, past = cache.growing(), cache.past
    assert past is not None
    for operand, b in zip((checksums.keys, checksums.values), past, strict=True):
        site = (0, "S_AS.AS", 0, 0)
        found, anew, fresh = operand.encode(b, site), operand.encode_anew(b), encode(b)
        assert all(torch.equal(x, y) for x, y in zip(found, anew, strict=True))
        assert ((found[0] - fresh[0]).abs() <= 1e-6 * b.double().abs().sum(-1)).all()
        torch.testing.assert_close(found[1][:, :-2], fresh[1][:, :-2], rtol=1e-4, atol=0.0)
    assert events.recent() == []


def test_a_step_encodes_the_new_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    read, add = [], growing.add_columns

    def counted(sums: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
        read.append(b.numel())
        return add(sums, b, first)

    monkeypatch.setattr(section_cache.incremental_checksums, "add_columns", counted)
    decode(made(), data(), [6, 1, 2])
    each = BATCH * WIDTH
    assert read == [6 * each, 6 * each, each, each, 2 * each, 2 * each]


@for_each("steps", [[1] * LENGTH, [5, 1, 3]])
def test_the_bits_are_those_of_an_unchecked_module(steps: list[int]) -> None:
    checked, _ = decode(made(), data(), steps)
    unchecked, _ = decode(made(frequencies=(0.0, 0.0, 0.0)), data(), steps)
    assert torch.equal(checked, unchecked)
    assert events.recent() == []


def test_a_fault_while_decoding_is_repaired() -> None:
    healthy, _ = decode(made(), data(), [1] * LENGTH)
    with struck((1, 2), math.nan, site="S_AS.K/forward", nth=2):
        repaired, _ = decode(made(), data(), [1] * LENGTH)
    assert torch.equal(repaired, healthy)
    assert kinds() == ["gemm_fault"]


@for_each("correction", ["recompute", "checksum", "detect"])
@for_each(("part", "check"), [(0, "S_AS.AS"), (1, "S_CL.CL")])
def test_damage_to_the_cache_is_found(part: int, check: str, correction: str) -> None:
    def damage(cache: Cache) -> None:
        past(cache, part)[1, 2, 3] += 30.0

    healthy, _ = decode(made(), data(), [5, 1, 1])
    struck, _ = decode(made(frequencies=(0.0, 0.0, 0.0)), data(), [5, 1, 1], damage)
    assert not torch.equal(struck, healthy)
    with pytest.raises(UncorrectableFault, match="changed in row"):
        decode(made(correction=correction), data(), [5, 1, 1], damage)
    (event,) = events.recent()
    assert (event.kind, event.op) == ("operand_fault", f"Attention/{check}/forward")


def test_many_damaged_keys_are_no_edit_of_a_weight() -> None:
    with pytest.raises(UncorrectableFault, match="changed in row"):
        decode(made(), data(), [5, 1], lambda cache: past(cache, 0)[0].mul_(-3.0))
    assert kinds() == ["operand_fault"]


def sums_of(cache: Cache, name: str) -> torch.Tensor:
    """The kept sums of keys or values, to be damaged."""
    before = getattr(cache.growing(), name).before
    assert isinstance(before, section_cache.Grown)
    return before.sums


@for_each("name", ["keys", "values"])
@for_each("entry", [0, 1, 2])
def test_a_damaged_checksum_heals(name: str, entry: int) -> None:
    def damage(cache: Cache) -> None:
        sums_of(cache, name)[1, entry, 2] += 1e-9

    healthy, _ = decode(made(), data(), [5, 1, 1])
    result, cache = decode(made(), data(), [5, 1, 1], damage)
    assert torch.equal(result, healthy)
    (event,) = events.recent()
    assert (event.kind, event.detector) == ("checksum_fault", "fingerprint")
    with torch.no_grad():
        made()(data()[:, :1], cache=cache)
    assert len(events.recent()) == 1


def test_a_damaged_checksum_that_nobody_looks_at_accuses_a_healthy_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(section_cache.Grown, "intact", lambda self: True)

    def damage(cache: Cache) -> None:
        sums_of(cache, "keys")[1, 0, 2] += 100.0

    with pytest.raises(UncorrectableFault):
        decode(made(), data(), [5, 1, 1], damage)
    assert kinds() == ["operand_fault"]


def test_a_call_that_failed_leaves_the_cache_as_it_was() -> None:
    module, x, cache = made(), data(), Cache()
    with torch.no_grad():
        module(x[:, :5], cache=cache)
        keys = past(cache, 0)
        value = float(keys[1, 2, 3])
        keys[1, 2, 3] = 30.0
        with pytest.raises(UncorrectableFault):
            module(x[:, 5:6], cache=cache)
        assert len(cache) == 5
        keys[1, 2, 3] = value
        events.clear()
        result = module(x[:, 5:6], cache=cache)
    healthy, _ = decode(module, x[:, :6], [5, 1])
    assert torch.equal(result, healthy[:, 5:])
    assert events.recent() == []


def test_positions_of_calls_that_were_not_due_are_encoded_later() -> None:
    module = made(frequencies=(0.5, 0.5, 1.0))
    healthy, _ = decode(made(), data(), [1] * LENGTH)
    result, cache = decode(module, data(), [1] * LENGTH)
    assert torch.equal(result, healthy)
    before = cache.growing().keys.before
    assert before is not None
    assert before.positions >= LENGTH - 2
    assert events.recent() == []


def test_an_unlucky_row_of_a_product_with_the_cache_is_cleared() -> None:
    dismissed = policy.process.false_alarms
    torch.manual_seed(0)
    b = torch.randn(1, 4, 6)
    operand = section_cache.Operand(2)
    row_sum, statistics = operand.encode(b, (0, "S_AS.AS", 0, 0))
    a = torch.randn(1, 3, 4)
    product = Gemm(None, a, b, 1.0, 1.0, row_sum, statistics)
    rows = torch.stack([torch.ones(1, 3), torch.zeros(1, 3), torch.ones(1, 3)]).double()
    output = torch.bmm(a, b)
    suspects.resolve(
        suspects.SuspectProduct(
            (0, "S_AS.AS", 0, 0),
            product,
            output,
            rows,
            False,
            lambda: torch.bmm(a, b),
            encode=operand.encode_anew,
        )
    )
    assert policy.process.false_alarms == dismissed + 3
    assert events.recent() == []
