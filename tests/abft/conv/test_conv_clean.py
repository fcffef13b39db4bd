"""Healthy convolutions of every kind: torch's bits, checked, and no alarm."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from case_loops import for_each
from conv_cases import DISTRIBUTIONS, DTYPES, KINDS, Setting
from struck import kinds, same_bits
from torch import nn

import holdfast
from holdfast import native
from holdfast.abft.conv import interception
from holdfast.abft.conv.interception import chosen
from holdfast.protection import CoverageReport

pytestmark = [
    pytest.mark.skipif(native.core is None, reason="the native core is not built"),
    pytest.mark.usefixtures("one_thread"),
]


def checked(setting: Setting) -> CoverageReport:
    """Run a setting with every call checked; bits must be torch's, without event or alarm."""
    bare = setting.run()
    with holdfast.protect(setting.layer, convolutions=1.0) as protection:
        assert same_bits(setting.run(), bare)
        report = protection.report()
    assert all(site.covered and site.method == "signed sums" for site in report.sites)
    assert (kinds(), report.false_alarms) == ([], 0)
    return report


@for_each(("name", "dtype"), [(n, d) for d in DTYPES for n in KINDS], first=20)
def test_each_kind_is_checked_in_every_direction(name: str, dtype: torch.dtype) -> None:
    setting = Setting(name, dtype)
    biased = setting.layer.bias is not None
    assert sum(site.calls for site in checked(setting).sites) == 3 + biased


VALUES = [
    (name, distribution, weights)
    for name in KINDS
    for distribution in DISTRIBUTIONS
    for weights in sorted({"normal", distribution})
]


@pytest.mark.parametrize(
    "share",
    [pytest.param(4, marks=pytest.mark.fuzz), pytest.param(1, marks=pytest.mark.campaign)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_values_give_an_alarm(dtype: torch.dtype, share: int) -> None:
    """Every kind with every distribution; of a dtype one in ``share``, of the next one the next."""
    sums = 0
    for name, distribution, weights in VALUES[DTYPES.index(dtype) % share :: share]:
        setting = Setting(name, dtype, distribution, weights)
        # What overflows fp16 is an event of its own: NaN or INF in an operand.
        if dtype is torch.float16 and not all(r.isfinite().all() for r in setting.run()):
            continue
        sums += sum(site.rows for site in checked(setting).sites)
    assert sums > 500_000 / share


def test_large_layers_give_no_alarm() -> None:
    """Chains of 4,608 products, and of 100,352 positions in the weight's gradient."""
    for layer, shape in [
        (nn.Conv2d(512, 512, 3, padding=1), (16, 512, 7, 7)),
        (nn.Conv2d(3, 32, 7, 2, 3), (8, 3, 224, 224)),
    ]:
        images = torch.randn(shape).relu().requires_grad_()
        with holdfast.protect(layer, convolutions=1.0) as protection:
            output = layer(images)
            output.backward((torch.randn_like(output) + 0.5).relu())
            assert (kinds(), protection.report().false_alarms) == ([], 0)


@for_each("value", [torch.nan, torch.inf, 1e38])
def test_operands_that_are_no_numbers_and_overflow_are_reported_as_such(value: float) -> None:
    setting = Setting("2d", torch.float32)
    setting.images.data[3, :, 4, 4] *= value * 100
    bare = setting.run()
    with holdfast.protect(setting.layer, convolutions=1.0) as protection:
        assert same_bits(setting.run(), bare)
        assert protection.report().false_alarms == 0
    assert {*kinds()} == {"nonfinite_input"}


def test_a_share_of_the_calls_is_checked_and_the_report_says_which() -> None:
    layer = nn.Conv2d(3, 8, 3)
    images = torch.randn(16, 3, 8, 8)
    with holdfast.protect(layer) as protection, torch.no_grad():
        for _ in range(41):
            layer(images)
        report = protection.report()
    (site,) = report.sites
    assert site.site == "Conv2d/convolution/forward"
    with pytest.raises(ValueError, match=r"convolutions = 1\.5"):
        holdfast.protect(layer, convolutions=1.5)
    assert 5 <= site.calls <= 7
    assert 0 < site.line < 1e-3
    assert "convolutions: a share of 0.125 of calls" in str(report)
    assert "covered by signed sums" in str(report)


@for_each("share", [1.0, 0.25, 1 / 3, 0.3, 0.01, 0.0])
def test_of_each_block_of_calls_one_is_chosen(share: float) -> None:
    picked = [count for count in range(2000) if chosen("site", count, share)]
    assert abs(len(picked) - 2000 * share) <= 1
    assert all(after - before < 2 / share for before, after in pairwise(picked))
    if share == 0.25:  # what recurs with the same period is seen
        assert {count % 4 for count in picked} == {0, 1, 2, 3}


class Slow(str):
    """Part of a name that lets other threads run whenever it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(1e-4)
        return super().__hash__()


def test_threads_that_run_a_convolution_at_a_time_count_each_call_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, site = list[int](), (0, Slow("convolution"), 0, 0)
    monkeypatch.setattr(interception, "chosen", lambda key, count, share: seen.append(count))
    with holdfast.protect(Setting("2d", torch.float32).layer), ThreadPoolExecutor(2) as pool:
        assert interception._chosen(site)  # the first call is checked in any case
        assert not any(pool.map(interception._chosen, [site] * 200))
    assert sorted(seen) == list(range(1, 201))


def test_empty_batches_gradients_of_gradients_and_inference_are_torchs() -> None:
    setting = Setting("transposed", torch.float32)

    def run() -> list[torch.Tensor]:
        images = setting.images.detach().requires_grad_()
        value = setting.layer(images).tanh().sum()
        (first,) = torch.autograd.grad(value, images, create_graph=True)
        found = [*torch.autograd.grad(first.square().sum(), setting.layer.weight)]
        with torch.inference_mode():
            found += [setting.layer(setting.images), setting.layer(setting.images[:0])]
        images = torch.ones(3, 3, 8, 3, requires_grad=True)  # all of whose output is cut away
        empty = nn.functional.conv_transpose2d(images, torch.ones(3, 1, 1, 2), padding=2)
        return [*found, *torch.autograd.grad(empty.sum(), images)]

    bare = run()
    with holdfast.protect(setting.layer, convolutions=1.0) as protection:
        assert same_bits(run(), bare)
        assert (kinds(), protection.report().false_alarms) == ([], 0)


@pytest.mark.compile
def test_compiled_convolutions_are_checked() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    images = torch.randn(16, 3, 8, 8)
    with holdfast.protect(model, convolutions=1.0) as protection:
        torch.compile(model)(images).sum().backward()
        calls = {site.site.partition("/")[2]: site.calls for site in protection.report().sites}
    assert calls["convolution/forward"] == 2
    assert calls["convolution/grad_b"] >= 2
    assert kinds() == []
