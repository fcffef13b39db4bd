"""The detector's triple at every place of the fused loop: repaired, silent when clean, and what
gets through when it is off."""

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from case_loops import for_each
from fused_cases import DTYPES, NATIVE, Case, exact, forward, torchs
from struck import Strike, armed, kinds, same_bits
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft.checksums.weights import signs
from holdfast.errors import UncorrectableFault
from holdfast.inject.faults import flip_bit
from holdfast.protection import collecting
from holdfast.sites import Gemm

pytestmark = NATIVE

FORWARD, BACKWARD = "(outside)/sdpa/forward", "(outside)/sdpa_backward/grad_qkv"
PLACES = [(FORWARD, stage) for stage in ("scores", "probabilities", "accumulator", "state")]
OF_TILES = ("scores", "probabilities", "grad_probabilities")
OF_GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_scores", "grad_softmax")
PLACES += [(BACKWARD, stage) for stage in (*OF_TILES, *OF_GRADIENTS)]
CASE = Case(heads=2, kv_heads=1, queries=70, keys=600, width=16)
CAUSAL = Case(heads=2, kv_heads=1, queries=600, keys=600, width=16, causal=True)
places = for_each(("site", "stage"), PLACES)

Damage = Callable[[torch.Tensor], torch.Tensor]
DAMAGES: dict[str, Damage] = {
    "off by a little": lambda x: x * 1.01 + 0.01,
    "inf": lambda x: torch.full_like(x, math.inf),
    "nan": lambda x: torch.full_like(x, math.nan),
    "near inf": lambda x: torch.full_like(x, torch.finfo(x.dtype).max / 4),
    "sign": lambda x: -x - 0.001,
    "exponent": lambda x: flip_bit(x, 26 if x.dtype == torch.float32 else 56),
}


def strike(
    site: str, stage: str, damage: Damage, index: tuple[int, int] = (0, 0), **options: int
) -> Strike:
    """A fault in an element of a tile, of the first one unless the options say which."""
    return Strike(index, damage, site=site, stage=stage, **options)  # type: ignore[arg-type]


def run(
    struck: Strike | None = None,
    operands: list[torch.Tensor] | None = None,
    *,
    case: Case = CASE,
    **settings: object,
) -> list[torch.Tensor]:
    """Forward and backward, with at most one fault."""
    operands = case.operands(torch.float32) if operands is None else operands
    with (
        holdfast.protect(nn.Identity(), **settings),  # type: ignore[arg-type]
        armed(struck if struck is not None else lambda *_: None),
    ):
        return torchs(case, operands)


@cache
def calm(dtype: torch.dtype, case: Case = CASE) -> list[torch.Tensor]:
    """Without a fault, in silence."""
    before = events.recent()
    results = run(operands=case.operands(dtype), case=case)
    assert events.recent() == before
    return results


@for_each("name", DAMAGES)
@places
def test_a_fault_is_repaired_bit_for_bit_and_unverified_gets_through(
    site: str, stage: str, name: str
) -> None:
    expected = calm(torch.float32)
    assert same_bits(run(strike(site, stage, DAMAGES[name])), expected)
    (event,) = events.recent()
    assert (event.kind, event.op, event.rung) == ("gemm_fault", site, "correct")
    events.clear()
    assert not same_bits(run(strike(site, stage, DAMAGES[name]), verify=False), expected)
    assert events.recent() == []


@for_each("dtype", DTYPES)
@places
def test_every_dtype(site: str, stage: str, dtype: torch.dtype) -> None:
    expected = calm(dtype)
    struck = strike(site, stage, DAMAGES["off by a little"])
    assert same_bits(run(struck, CASE.operands(dtype)), expected)
    assert kinds() == ["gemm_fault"]


@places
def test_every_tile(site: str, stage: str) -> None:
    expected, count = calm(torch.float32), strike(site, stage, DAMAGES["inf"], nth=-1)
    run(count, verify=False)
    for nth in range(len(count.seen)):
        events.clear()
        struck = strike(site, stage, DAMAGES["sign"], nth=nth)
        assert same_bits(run(struck), expected), nth
        assert kinds() == ["gemm_fault"], nth


@places
def test_every_number_of_leading_keys(site: str, stage: str) -> None:
    expected, count = calm(torch.float32, CAUSAL), strike(site, stage, DAMAGES["inf"], nth=-1)
    run(count, case=CAUSAL, verify=False)
    for nth in range(0, len(count.seen), 5):
        events.clear()
        struck = strike(site, stage, DAMAGES["sign"], nth=nth)
        assert same_bits(run(struck, case=CAUSAL), expected), nth
        assert kinds() == ["gemm_fault"], nth


def test_a_fault_is_repaired_where_only_later_keys_are_nan() -> None:
    operands = CAUSAL.operands(torch.float32)
    operands[1][0, 0, 100] = math.nan
    struck = strike(FORWARD, "scores", DAMAGES["inf"])
    found = run(struck, operands, case=CAUSAL)
    assert same_bits([found[0][:, :, :64]], [calm(torch.float32, CAUSAL)[0][:, :, :64]])
    assert set(kinds()) == {"gemm_fault", "nonfinite_input"}


@places
def test_decoding_one_token(site: str, stage: str) -> None:
    case = Case(heads=4, kv_heads=2, queries=1, keys=40, width=16)
    expected = run(case=case)
    assert same_bits(run(strike(site, stage, DAMAGES["sign"]), case=case), expected)
    assert kinds() == ["gemm_fault"]


def test_the_event_says_where() -> None:
    run(strike(FORWARD, "scores", DAMAGES["inf"], (32, 29), nth=1))
    (event,) = events.recent()
    assert event.detail["part"] == "scores"
    assert event.detail["tile"] == [0, 0, 0, 1]  # batch, head, query tile, key tile
    assert event.detail["index"] == [32, 29]
    assert event.detail["corrupted"] == math.inf
    assert math.isfinite(event.detail["repaired"])


@for_each(
    ("site", "stage"),
    [place for place in PLACES if place[1] in ("scores", "state", "accumulator", "grad_key")],
)
def test_a_fault_that_persists_raises_or_is_deferred(site: str, stage: str) -> None:
    def growing(x: torch.Tensor) -> torch.Tensor:
        growing.by += 1.0  # type: ignore[attr-defined]
        return x + growing.by  # type: ignore[attr-defined]

    growing.by = 1.0  # type: ignore[attr-defined]
    with pytest.raises(UncorrectableFault, match="sdpa"):
        run(strike(site, stage, growing, always=True))
    with collecting() as deferred:
        run(strike(site, stage, growing, always=True))
    assert {event.kind for event in deferred.unrepaired} == {"gemm_persistent"}


def test_a_wrong_score_that_repeats_is_persistent() -> None:
    with pytest.raises(UncorrectableFault, match="repeats a wrong value"):
        run(strike(FORWARD, "scores", lambda x: torch.full_like(x, 7.0), always=True))


def test_detection_only_raises() -> None:
    with pytest.raises(UncorrectableFault, match="differ from their recomputation"):
        run(strike(FORWARD, "scores", DAMAGES["inf"]), correction="detect")


def test_damaged_keys_between_two_looks_are_seen() -> None:
    """The packed copy of K changes while the loop runs: it is made anew."""
    damaged = []

    def damage(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if stage == "scores" and site == FORWARD and not damaged:
            damaged.append(gemm.b[3, 5].add_(10.0))

    with holdfast.protect(nn.Identity()), armed(damage):
        found = torchs(CASE, CASE.operands(torch.float32))
    assert damaged
    assert same_bits(found, calm(torch.float32))
    assert set(kinds()) == {"gemm_fault"}


# What one signed sum does not see: values that cancel under the signs, and exponentials and their
# gradients that are computed wrong, so that all sums follow them.
SOFTMAX = Case(heads=1, kv_heads=1, queries=20, keys=48, width=16)
ROW, KEY = 7, 5


def cancelling_value(operands: list[torch.Tensor]) -> None:
    """Give one value the signed sum 0, exactly."""
    r = signs(SOFTMAX.width, torch.float64)
    value = operands[2][0, 0, KEY]
    value.copy_((value * 64).round() / 64)  # so that sums of them are exact
    value[0] -= (value.double() @ r * r[0]).to(value.dtype)
    assert value.double() @ r == 0
    assert value.norm() > 1


def attended_key(operands: list[torch.Tensor]) -> None:
    """Let the row attend to the key."""
    operands[1][0, 0, KEY] = 4 * operands[0][0, 0, ROW]


def unchanged(operands: list[torch.Tensor]) -> None:
    """Leave the operands as they are."""


THREE = [torch.float32, torch.float64, torch.bfloat16]
# A stage, what happens to its element, to the operands before, and the dtypes to try.
SOFTMAX_FAULTS: dict[str, tuple[str, Damage, Callable[[list[torch.Tensor]], None], list[object]]]
SOFTMAX_FAULTS = {
    "cancels": ("probabilities", lambda p: p + 0.125, cancelling_value, [*THREE]),
    "gradient": ("grad_softmax", lambda ds: ds + 0.01, unchanged, [*THREE]),
    "the largest is not one": ("exponentials", lambda p: p * 0.75, attended_key, THREE[:1]),
} | {
    f"an exponential of {value}": (
        "exponentials",
        lambda p, value=value: torch.full_like(p, value),
        unchanged,
        THREE[:1],
    )
    for value in (math.inf, -math.inf, math.nan, 1.5, -0.25)
}


@for_each("name", SOFTMAX_FAULTS)
def test_what_a_signed_sum_does_not_see_is_seen_by_the_checks_of_the_softmax(name: str) -> None:
    stage, damage, prepare, dtypes = SOFTMAX_FAULTS[name]
    for dtype in dtypes:
        operands = SOFTMAX.operands(dtype)
        prepare(operands)
        calm = run(None, operands, case=SOFTMAX)
        assert events.recent() == []
        struck = [strike("", stage, damage, (ROW, KEY)) for _ in "ab"]
        assert same_bits(run(struck[0], operands, case=SOFTMAX), calm)
        (event,) = events.recent()
        assert event.kind == "gemm_fault"
        assert name != "gradient" or event.detail["part"] == "grad_scores"
        events.clear()
        assert not same_bits(run(struck[1], operands, case=SOFTMAX, verify=False), calm)


def test_an_exponential_wrong_within_zero_to_one_passes_forward() -> None:
    """The blind spot that README.md names: sum, carry and product all use it."""
    operands = SOFTMAX.operands(torch.float32)
    damage = strike("", "exponentials", lambda p: p / 2 + 0.25, (ROW, KEY))
    with holdfast.protect(nn.Identity()), armed(damage):
        out, _ = forward(*operands[:3])
    assert events.recent() == []
    assert (out.double() - exact(SOFTMAX, operands)[0]).abs().max() > 1e-3


def test_backward_sees_a_sum_that_forward_computed_too_small() -> None:
    """The rows of P then sum to more than one, with the logarithm that forward gave."""
    with pytest.raises(UncorrectableFault, match="logsumexp"):
        run(strike("", "exponentials", lambda p: p / 4, (ROW, KEY)), case=SOFTMAX)
