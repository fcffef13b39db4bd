"""``vabft.detection``: flips where they are said to be, seen by size, missed with no threshold."""

from dataclasses import dataclass

import pytest
import torch
from case_loops import for_each

from holdfast.abft.thresholds.protocol import Product
from holdfast.inject.faults import has_bit
from holdfast_lab.distributions import RANDOM
from holdfast_lab.study.vabft import detection
from holdfast_lab.study.vabft.detection import KINDS, count_detected, strike
from holdfast_lab.study.vabft.residuals import Margins, residuals

ROWS = 4 * len(KINDS)


def operands(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return RANDOM["n01"](ROWS, 256, 64, torch.bfloat16, torch.Generator().manual_seed(seed))


@for_each("was_set", [False, True])
@for_each("dtype", [torch.bfloat16, torch.float32])
def test_one_element_a_row_is_struck_in_the_bit_and_direction_asked(
    dtype: torch.dtype, was_set: bool
) -> None:
    clean = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean[0] = 2.0 if not was_set else 1.0  # no element with such an exponent bit
    bit = 8 * dtype.itemsize - 2
    damaged = clean.clone()
    struck = strike(damaged, bit, was_set, torch.Generator().manual_seed(1))
    changed = damaged != clean
    assert changed.sum(-1).tolist() == struck.int().tolist()
    assert not struck[0]
    assert struck[1:].all()
    assert (has_bit(clean, bit)[changed] == was_set).all()
    assert (has_bit(damaged, bit)[changed] != was_set).all()


@for_each("mode", detection.MODES)
def test_large_changes_are_seen_and_the_clean_product_is_not(mode: str) -> None:
    a, b = operands()
    margins, c = Margins(), a @ b if mode == "offline" else a.float() @ b.float()
    margins.add(Product(a, b, c, torch.bfloat16, mode == "online"), residuals(a, b, c))
    counts = count_detected(a, b, mode, torch.Generator().manual_seed(1))
    for name in detection.MEMBERS:
        assert margins[name].over == 0
        for bit in (11, 12, 13, 14):
            assert counts[bit, False, name].value == 1
    assert sum(rate.trials for rate in counts.values()) > ROWS


def test_online_sees_what_is_lost_in_the_rounding_of_the_output() -> None:
    seen = {}
    for mode in detection.MODES:
        counts = count_detected(*operands(1), mode, torch.Generator().manual_seed(1))
        seen[mode] = sum(rate.count for (_, _, name), rate in counts.items() if name == "vabft")
    assert seen["online"] > 1.5 * seen["offline"]


def test_with_the_threshold_off_the_same_flips_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Blind:
        name: str
        weights: str

        def __call__(self, product: Product) -> torch.Tensor:
            return torch.full(product.rows, 1e300, dtype=torch.float64)

    blind = {name: Blind(name, member.weights) for name, member in detection.REGISTRY.items()}
    monkeypatch.setattr(detection, "REGISTRY", blind)
    counts = count_detected(*operands(), "offline", torch.Generator().manual_seed(1))
    # Flips of the top bit that end in INF or NaN are no residual at all.
    assert {rate.count for (bit, *_), rate in counts.items() if bit < 14} == {0}
