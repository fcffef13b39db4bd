"""Wrong convolutions are found and repaired bit for bit, or stop the run; unchecked they get by."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from case_loops import for_each
from conv_cases import KINDS, Setting
from struck import Strike, damages, kinds, same_bits, struck
from torch import nn
from torch.nn import functional

import holdfast
from holdfast import Guard, events, native, sites
from holdfast.abft.conv import interception
from holdfast.errors import HoldfastError, UncorrectableFault

pytestmark = [
    pytest.mark.skipif(native.core is None, reason="the native core is not built"),
    pytest.mark.usefixtures("one_thread"),
]

# Site, its number among those of that name, and place among a setting's results.
DIRECTIONS = [("forward", 0, 0), ("grad_a", 0, 1), ("grad_b", 0, 2), ("grad_b", 1, 3)]
Damage = Callable[[torch.Tensor], torch.Tensor]
BITS = {torch.float32: (20, 26, 30), torch.bfloat16: (12, 14), torch.float16: (13, 14)}


def run_struck(setting: Setting, fault: Strike, **protection: object) -> list[torch.Tensor]:
    """Run a protected setting in which one result is damaged."""
    with holdfast.protect(setting.layer, **protection), sites.injecting(fault):  # type: ignore[arg-type]
        return setting.run()


def some_of(dtype: torch.dtype, turn: int) -> list[tuple[str, Damage]]:
    """Two of the damages, other ones in the next turn."""
    every = [*damages(dtype, BITS[dtype]).items()]
    return [every[(2 * turn + place) % len(every)] for place in range(2)]


@for_each(
    ("turn", "name", "dtype"),
    [(turn, *case) for turn, case in enumerate((n, d) for d in BITS for n in KINDS)],
    first=2,
)
def test_damage_in_every_direction_is_repaired(turn: int, name: str, dtype: torch.dtype) -> None:
    """Every kind in every direction and dtype, and with every damage in some of them."""
    setting = Setting(name, dtype)
    right = setting.run()
    for site, nth, result in DIRECTIONS[: len(right)]:
        largest = right[result].abs().argmax()
        place = tuple(int(each) for each in torch.unravel_index(largest, right[result].shape))
        for damage, value in some_of(dtype, turn + result):
            events.clear()
            fault = partial(Strike, place, value, site, nth=nth)
            assert same_bits(run_struck(setting, fault(), convolutions=1.0), right)
            (event,) = events.recent()
            assert (event.kind, event.rung) == ("gemm_fault", "correct"), (damage, event)
            assert event.op.endswith(f"/convolution/{site}")
            assert event.detail["index"] == list(place)
            assert not same_bits(run_struck(setting, fault(), verify=False), right)


def test_a_fault_beside_operands_that_are_no_numbers_is_repaired() -> None:
    setting = Setting("2d", torch.float32)
    setting.images.data[3, 2, 4, 4] = torch.nan
    right = setting.run()
    fault = Strike((9, 1, 2, 2), torch.inf, "forward")
    assert same_bits(run_struck(setting, fault, convolutions=1.0), right)
    assert kinds()[0] == "gemm_fault"


@for_each("site", ["forward", "grad_a", "grad_b"])
def test_what_repeats_or_is_only_detected_is_not_used(site: str) -> None:
    setting = Setting("2d", torch.float32)
    again = interception._again

    def wrong(*given: object) -> torch.Tensor:
        computed = again(*given)  # type: ignore[arg-type]
        computed[(1, 2, 0, 1)] += 1
        return computed

    fault = partial(Strike, (1, 2, 0, 1), lambda old: old + 1, site)
    with pytest.raises(UncorrectableFault, match=r"(image|channel) 1, .*channel 2 differs"):
        run_struck(setting, fault(), correction="detect", convolutions=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interception, "_again", wrong)
        with pytest.raises(UncorrectableFault, match="channel 2 repeats a wrong value"):
            run_struck(setting, fault(), convolutions=1.0)
    assert kinds() == ["gemm_fault", "gemm_persistent"]


def test_a_check_that_raises_costs_protection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("2d", torch.float32)
    right = setting.run()
    monkeypatch.setattr(interception, "check_images", lambda *_: 1 / 0)
    with holdfast.protect(setting.layer, convolutions=1.0) as protection:
        assert same_bits(setting.run(), right)
        assert "its check failed" in {site.reason for site in protection.report().sites}
    assert kinds() == ["check_failed", "check_failed"]
    with pytest.raises(HoldfastError, match="failed"), holdfast.protect(setting.layer, strict=True):
        setting.run()


class Residual(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.inner = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.down, self.norm = nn.Conv2d(16, 32, 1, 2), nn.BatchNorm2d(16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(images)))
        return self.down(functional.relu(x + self.inner(x))).relu().mean((2, 3))


def trained(audit: float = 0.0, convolutions: float = 1.0) -> list[torch.Tensor]:
    """The state after three steps of a Guard."""
    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(batch), labels)
        loss.backward()
        return loss

    protection = holdfast.protect(model, convolutions=convolutions)
    with protection, Guard(model, optimizer, audit=audit) as guard:
        for _ in range(3):
            guard.step(step, images)
    return [*model.state_dict().values()]


@for_each(
    "site", ["stem/convolution/forward", "inner/convolution/grad_a", "down/convolution/grad_b"]
)
def test_a_struck_training_ends_with_the_bits_of_one_without_faults(site: str) -> None:
    right = trained()
    for audit, checked in ((0.0, 1.0), (1.0, 0.0)):  # audited steps check every call
        events.clear()
        with struck((1, 2, 0, 0), 1.5, site=site, nth=2):
            assert same_bits(trained(audit, checked), right)
        assert kinds() == ["gemm_fault"]
    with struck((1, 2, 0, 0), 1.5, site=site, nth=2):  # the first call is checked in any case
        assert not same_bits(trained(convolutions=0.0), right)
