"""The detector's triple at every place of the fused loop: repaired, silent when clean, and what
gets through when it is off."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from case_loops import for_each
from fused_cases import DTYPES, NATIVE, Case, torchs
from struck import kinds
from torch import nn

import holdfast
from holdfast import events, sites
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

Damage = Callable[[torch.Tensor], torch.Tensor]
DAMAGES: dict[str, Damage] = {
    "off by a little": lambda x: x * 1.01 + 0.01,
    "inf": lambda x: torch.full_like(x, math.inf),
    "nan": lambda x: torch.full_like(x, math.nan),
    "near inf": lambda x: torch.full_like(x, torch.finfo(x.dtype).max / 4),
    "sign": lambda x: -x - 0.001,
    "exponent": lambda x: flip_bit(x, 26 if x.dtype == torch.float32 else 56),
}


@dataclass
class Strike:
    """Damages one element of the n-th tile of a place; every one from there on if `lasting`."""

    site: str
    stage: str
    damage: Damage
    nth: int = 0
    lasting: bool = False
    seen: int = 0

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""
        if stage != self.stage or site != self.site:
            return
        assert output is not None
        if self.seen == self.nth or (self.lasting and self.seen > self.nth):
            place = output[output.shape[0] // 2, output.shape[1] // 3].unsqueeze(0)
            place.copy_(self.damage(place))
        self.seen += 1


def run(
    dtype: torch.dtype, strike: Strike | None = None, *, verify: bool = True, case: Case = CASE
) -> list[torch.Tensor]:
    """Forward and backward, with at most one fault."""
    with holdfast.protect(nn.Identity(), verify=verify):
        sites.arm(strike if strike is not None else lambda *_: None)
        try:
            return torchs(case, case.operands(dtype))
        finally:
            sites.disarm()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@cache
def calm(dtype: torch.dtype) -> list[torch.Tensor]:
    """Without a fault, in silence."""
    results = run(dtype)
    assert events.recent() == []
    return results


@for_each("name", DAMAGES)
@for_each(("site", "stage"), PLACES)
def test_a_fault_is_repaired_bit_for_bit_and_unverified_gets_through(
    site: str, stage: str, name: str
) -> None:
    expected, strike = calm(torch.float32), Strike(site, stage, DAMAGES[name])
    repaired = run(torch.float32, strike)
    assert strike.seen > 0
    assert same(repaired, expected)
    (event,) = events.recent()
    assert (event.kind, event.op, event.rung) == ("gemm_fault", site, "correct")
    events.clear()
    harmed = run(torch.float32, Strike(site, stage, DAMAGES[name]), verify=False)
    assert not same(harmed, expected)
    assert events.recent() == []


@for_each("dtype", DTYPES)
@for_each(("site", "stage"), PLACES)
def test_every_dtype(site: str, stage: str, dtype: torch.dtype) -> None:
    expected = calm(dtype)
    assert same(run(dtype, Strike(site, stage, DAMAGES["off by a little"])), expected)
    assert kinds() == ["gemm_fault"]


@for_each(("site", "stage"), PLACES)
def test_every_tile(site: str, stage: str) -> None:
    expected, count = calm(torch.float32), Strike(site, stage, DAMAGES["inf"], nth=-1)
    run(torch.float32, count, verify=False)
    for nth in range(count.seen):
        events.clear()
        assert same(run(torch.float32, Strike(site, stage, DAMAGES["sign"], nth)), expected), nth
        assert kinds() == ["gemm_fault"], nth


def test_decoding_one_token() -> None:
    case = Case(heads=4, kv_heads=2, queries=1, keys=40, width=16)
    expected = run(torch.float32, case=case)
    for site, stage in PLACES:
        events.clear()
        assert same(run(torch.float32, Strike(site, stage, DAMAGES["sign"]), case=case), expected)
        assert kinds() == ["gemm_fault"], (site, stage)


def test_the_event_says_where() -> None:
    run(torch.float32, Strike(FORWARD, "scores", DAMAGES["inf"], nth=1))
    (event,) = events.recent()
    assert event.detail["part"] == "scores"
    assert event.detail["tile"] == [0, 0, 0, 1]  # batch, head, query tile, key tile
    assert event.detail["index"] == [32, (600 - 512) // 3]
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
        run(torch.float32, Strike(site, stage, growing, lasting=True))
    with collecting() as deferred:
        run(torch.float32, Strike(site, stage, growing, lasting=True))
    assert {event.kind for event in deferred.unrepaired} == {"gemm_persistent"}


def test_a_wrong_score_that_repeats_is_persistent() -> None:
    fixed = Strike(FORWARD, "scores", lambda x: torch.full_like(x, 7.0), lasting=True)
    with pytest.raises(UncorrectableFault, match="repeats a wrong value"):
        run(torch.float32, fixed)


def test_detection_only_raises() -> None:
    with holdfast.protect(nn.Identity(), correction="detect"):
        sites.arm(Strike(FORWARD, "scores", DAMAGES["inf"]))
        try:
            with pytest.raises(UncorrectableFault, match="differ from their recomputation"):
                torchs(CASE, CASE.operands(torch.float32))
        finally:
            sites.disarm()
    holdfast.protect(nn.Identity()).remove()  # back to recomputing


def test_damaged_keys_between_two_looks_are_seen() -> None:
    """The packed copy of K changes while the loop runs: it is made anew."""

    def damage(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if stage == "scores" and site == FORWARD and not damage.done:  # type: ignore[attr-defined]
            damage.done = True  # type: ignore[attr-defined]
            gemm.b[3, 5] += 10.0

    damage.done = False  # type: ignore[attr-defined]
    with holdfast.protect(nn.Identity()):
        sites.arm(damage)
        try:
            found = torchs(CASE, CASE.operands(torch.float32))
        finally:
            sites.disarm()
    assert same(found, calm(torch.float32))
    assert {event.kind for event in events.recent()} == {"gemm_fault"}
