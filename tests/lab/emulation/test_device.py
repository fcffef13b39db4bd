"""The unhealthy device: as often and as far wrong as its node, and gone without a trace."""

from collections.abc import Iterator
from copy import deepcopy
from math import sqrt
from typing import Any

import pytest
import torch
from case_loops import for_each
from torch import nn
from torch.nn import functional

from holdfast import events, sites
from holdfast.errors import ConfigError
from holdfast.inject import Fault, Injector
from holdfast.protection import protect
from holdfast_lab.emulation import UnhealthyDevice
from holdfast_lab.emulation.device import SPIKE_FACTOR, SPIKE_STEPS
from holdfast_lab.emulation.places import everywhere, submodules
from holdfast_lab.emulation.profile import BURST_EVERY_STEPS, Rhythm
from holdfast_lab.emulation.strike import count_wrong, distinct, generator, wrong_values
from holdfast_lab.trainer.gpt import Block, GPTConfig

WIDTH, LENGTH, BATCH, LAYERS = 32, 16, 4, 2
VALUES = BATCH * LENGTH * WIDTH
SIGMAS = 5.0  # of a binomial: passed by chance but once in a million


class Net(nn.Module):
    """The decoder layers of the trainer's model, without what is before and behind them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = GPTConfig(layers=LAYERS, heads=2, width=WIDTH, context=LENGTH)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(autouse=True)
def _outside_steps() -> Iterator[None]:
    yield
    events.set_step(-1)


def run(net: nn.Module, step: int = 0) -> list[torch.Tensor]:
    """The output and all gradients of one pass in a step."""
    events.set_step(step)
    net.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    output = net(x)
    functional.mse_loss(output, torch.ones_like(output)).backward()
    events.set_step(-1)
    return [output.detach(), x.grad, *(p.grad for p in net.parameters())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def always(net: Net, **options: Any) -> UnhealthyDevice:
    """Node 11, in every step."""
    return UnhealthyDevice(net, node=11, **{"rhythm": Rhythm(1, 1)} | options)


@pytest.mark.parametrize("inside", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("node", [1, 7, 10])
def test_as_many_values_are_wrong_as_the_profile_says(net: Net, node: int, inside: float) -> None:
    scale = {1: 200.0, 7: 2000.0, 10: 1.0}[node]
    first, steps = SPIKE_STEPS if node == 10 else 0, 2 * BURST_EVERY_STEPS
    with UnhealthyDevice(net, node=node, rate_scale=scale, inside=inside) as device:
        for step in range(first, first + steps):
            run(net, step)
    for part in ("attn", "ffn"):
        for direction in ("forward", "backward"):
            tallies = [device.tallies[layer, direction, part] for layer in range(LAYERS)]
            values = sum(tally.values for tally in tallies)
            assert values == steps * VALUES * LAYERS
            struck = sum(tally.struck for tally in tallies)
            expected = sum(tally.expected for tally in tallies)
            assert abs(struck - expected) <= SIGMAS * sqrt(expected) + 1
            # Whole bursts: what was expected is what table 1 prints.
            printed = device.profile.mean_frequency[f"{direction}.{part}"] * scale
            assert expected / values == pytest.approx(printed, rel=0.01)
    assert device.struck > 40
    assert {strike.inside for strike in device.strikes} == {inside > 0, inside == 1.0}


def test_severity_is_at_most_the_printed_one_and_comes_near_it(net: Net) -> None:
    with UnhealthyDevice(net, node=1, rate_scale=500, bound_rms=None, inside=0) as device:
        for step in range(2 * BURST_EVERY_STEPS):
            run(net, step)
    for (layer, direction, part), tally in device.tallies.items():
        worst = device.profile.severities(f"{direction}.{part}", LAYERS)[layer]
        assert tally.wrong_calls >= 7
        assert worst / 1000 < tally.severity <= 1.5 * worst
    nearest = max(
        tally.severity / device.profile.worst_severity[f"{direction}.{part}"]
        for (_, direction, part), tally in device.tallies.items()
    )
    assert nearest > 0.1


def test_errors_are_bounded_by_the_size_of_the_tensor_and_still_severe() -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    for worst in (0.5, 30.0, 9.63e12):
        for call in range(20):
            wrong = wrong_values(values, 5, worst, 1.0, generator(worst, call))
            assert float((wrong.after - wrong.before).abs().max()) <= 1.01 * float(values.std())
            assert bool((wrong.after != wrong.before).all())
    severe = [wrong_values(values, 5, 1e5, 1.0, generator(call)).severity for call in range(20)]
    assert max(severe) > 1000


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_struck_value_differs_however_small_the_error(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:500] = 0
    wrong = wrong_values(values, 1000, 1e-9, 1.0, generator(dtype))
    assert bool((wrong.after != wrong.before).all())
    assert wrong.after.dtype == dtype


def test_places_are_distinct_and_evenly_drawn() -> None:
    counts = torch.zeros(200)
    for call in range(2000):
        drawn = distinct(200, 3, generator(call))
        assert len(set(drawn.tolist())) == 3
        counts[drawn] += 1
    assert abs(counts - 30).max() <= SIGMAS * sqrt(30)
    assert len(set(distinct(50, 50, generator(0)).tolist())) == 50
    assert count_wrong(100, 5.0, generator(0)) == 100


def test_faults_come_in_bursts_that_the_seed_places_and_more_in_node_10s_first_steps(
    net: Net,
) -> None:
    rates = set()
    for seed in range(4):
        device = UnhealthyDevice(net, node=7, seed=seed)
        erring = [device.rate(step, 0, "forward", "attn") > 0 for step in range(200)]
        assert [sum(erring[start : start + 20]) for start in range(0, 200, 20)] == [4] * 10
        rates.add(tuple(erring))
    assert len(rates) == 4
    device = UnhealthyDevice(net, node=10)
    first, later = (device.rate(step, 1, "forward", "attn") for step in (0, SPIKE_STEPS))
    assert first == pytest.approx(SPIKE_FACTOR * later)
    assert later > 0


def test_node_13_is_clean_before_its_onset(net: Net) -> None:
    healthy = run(net)
    options: dict[str, Any] = {"rate_scale": 1e7, "rhythm": Rhythm(1, 1)}
    with UnhealthyDevice(net, node=13, step_scale=0.02, **options) as device:
        assert device.start_step == 9
        assert all(same(run(net, step), healthy) for step in range(9))
        assert not device.strikes
        assert not same(run(net, 9), healthy)
    assert {strike.step for strike in device.strikes} == {9}
    assert {(strike.direction, strike.part) for strike in device.strikes} == {("backward", "ffn")}
    assert UnhealthyDevice(net, node=13).start_step == 450
    with UnhealthyDevice(net, node=13, setting="lockstep", **options) as device:
        run(net, 0)
    assert device.struck


@for_each("node", [2, 3, 12])
def test_silent_nodes_are_silent_in_lockstep_and_err_in_training(net: Net, node: int) -> None:
    healthy = run(net)
    with UnhealthyDevice(net, node=node, setting="lockstep", rate_scale=1e9) as device:
        assert all(same(run(net, step), healthy) for step in range(20))
    assert device.struck == 0
    with UnhealthyDevice(net, node=node, rate_scale=1e6) as device:
        assert not all(same(run(net, step), healthy) for step in range(20))
    assert device.struck > 0


def test_a_persistent_device_agrees_with_itself_and_a_transient_one_does_not(net: Net) -> None:
    healthy = run(net)
    with always(net, persistent=True) as device:
        first, again, next_step = run(net, 3), run(net, 3), run(net, 4)
        assert same(first, again)
        assert not same(first, healthy)
        assert not same(first, next_step)
    with always(net, persistent=True):
        assert same(run(net, 3), first)
    with always(net, persistent=True, seed=1):
        assert not same(run(net, 3), first)
    assert device.struck > 0
    with always(net):
        first, again = run(net, 3), run(net, 3)
        assert not same(first, again)
    with always(net):
        assert same(run(net, 3), first)  # the same calls, from the beginning


def test_removed_it_leaves_no_trace(net: Net) -> None:
    twin = deepcopy(net)
    hooks = _hooks(net)
    with always(net):
        assert not same(run(net), run(twin))
    assert same(run(net), run(twin))
    events.set_step(0)
    with pytest.raises(RuntimeError, match="shape"), always(net):
        net(torch.randn(1, 1, WIDTH + 1))
    assert _hooks(net) == hooks
    assert not sites.armed()


def _hooks(net: nn.Module) -> list[int]:
    return [
        len(hooks)
        for module in net.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]


def test_paused_and_outside_steps_it_computes_right(net: Net) -> None:
    healthy = run(net)
    with always(net) as device:
        with device.paused():
            assert same(run(net), healthy)
        with torch.no_grad():
            torch.manual_seed(1)
            assert torch.equal(net(torch.randn(BATCH, LENGTH, WIDTH)), healthy[0])
        assert not device.strikes
        assert not device.tallies
        with pytest.raises(ConfigError, match="outside any step"):
            net(torch.randn(BATCH, LENGTH, WIDTH))


def test_inside_is_seen_and_repaired_by_checksums_and_outside_is_not(net: Net) -> None:
    """The triple: silent when clean, caught inside, and through where nothing looks."""
    options: dict[str, Any] = {"bound_rms": None, "rate_scale": 0.02, "persistent": True}
    with protect(net) as protection:
        healthy = run(net)
        assert _faults() == []
        with always(net, inside=1.0, **options) as device:
            # What is below the checksums' line passes; a bound far above the line leaves nothing.
            device._severities = dict.fromkeys(device._severities, 1e6)
            assert same(run(net), healthy)
        assert device.struck > 0
        assert set(_faults()) == {strike.op for strike in device.strikes}
        events.clear()
        with always(net, inside=0.0, **options) as device:
            assert not same(run(net), healthy)
        assert device.struck > 0
        assert _faults() == []
        protection.remove()
    with always(net, inside=1.0, **options):
        assert not same(run(net), healthy)


def _faults() -> list[str]:
    return [event.op for event in events.recent() if event.kind == "gemm_fault"]


def test_every_strike_is_recorded_with_what_it_did(net: Net) -> None:
    healthy = run(net)
    with always(net, rate_scale=0.01) as device:
        for step in range(8):
            run(net, step)
    logged = [event for event in events.recent() if event.kind == "injected"]
    assert len(logged) == len(device.strikes)
    assert sum(event.detail["count"] for event in logged) == device.struck
    for event, strike in zip(logged, device.strikes, strict=True):
        assert (event.op, event.step) == (strike.op, strike.step)
        assert event.detail["kind"] == "unhealthy_node_11"
        assert event.detail["site"] == ("output" if strike.inside else "module")
        assert len(strike.index) == len(strike.before) == len(strike.after) == min(8, strike.count)
        assert all(a != b for a, b in zip(strike.before, strike.after, strict=True))
        assert strike.inside == ("/" in strike.op)
    assert healthy


def test_everywhere_reaches_norms_dropouts_residuals_and_every_matmul(net: Net) -> None:
    with always(net, places="everywhere", rate_scale=3.0) as device:
        for step in range(3):
            run(net, step)
    ops = {strike.op for strike in device.strikes if strike.layer == 0}
    outside = {f"blocks.0.{name}" for name in ("ln_1", "attn.dropout", "ln_2", "mlp.dropout")}
    assert {op for op in ops if "/" not in op} == outside | {"blocks.0"}
    products = {"attn.qkv/addmm/forward", "attn/bmm/forward", "attn/bmm#2/grad_b"}
    products |= {"mlp.up/addmm/grad_b", "mlp.down/addmm/forward"}
    assert {f"blocks.0.{op}" for op in products} <= ops
    parts = {place.name: place.part for place in everywhere(net, submodules(net))}
    assert parts["blocks.1.ln_1"] == "attn"
    assert parts["blocks.1.ln_2"] == parts["blocks.1"] == parts["blocks.1.mlp.dropout"] == "ffn"


def test_one_injector_at_a_time(net: Net) -> None:
    fault = Fault(0, 0, "inf", op="blocks.0.mlp.up/addmm/forward")
    with (
        protect(net, verify=False),
        Injector(net, [fault], rank=0).step(0),
        pytest.raises(ConfigError, match="one device or Injector at a time"),
        always(net),
    ):
        pass
    assert sum(_hooks(net)) == 0
    with (
        always(net) as device,
        pytest.raises(ConfigError, match="one device or Injector at a time"),
        Injector(net, [fault], rank=0).step(0),
    ):
        pass
    assert not sites.armed()
    assert not device._stack._exit_callbacks


class Sparse(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


def test_a_submodule_without_sites_is_refused_unless_nothing_is_struck_inside(net: Net) -> None:
    net.blocks[1].attn = Sparse(WIDTH, WIDTH)
    with pytest.raises(ConfigError, match=r"blocks.1.attn: none of its matmuls"), always(net):
        run(net)
    with always(net, inside=0.0) as device:
        run(net)
    assert any(strike.op == "blocks.1.attn" for strike in device.strikes)


@for_each(
    ("options", "message"),
    [
        ({"node": 16}, "nodes 1 to 15"),
        ({"setting": "lock-step"}, "setting = 'lock-step' is unknown"),
        ({"inside": 1.5}, "inside = 1.5"),
        ({"places": "norms"}, "places = 'norms'"),
        ({"rate_scale": -1.0}, "rate_scale = -1.0"),
        ({"step_scale": float("inf")}, "step_scale = inf"),
        ({"bound_rms": 0.0}, "bound_rms = 0.0"),
        ({"model": nn.Linear(2, 2)}, "no decoder layers"),
    ],
)
def test_bad_arguments_are_refused(net: Net, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UnhealthyDevice(**{"model": net, "node": 7} | options)
