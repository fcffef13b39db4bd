"""What each layer sees of a device's wrong values, and what trainings end with."""

import torch
from case_loops import for_each
from torch import nn

from holdfast.abft.thresholds import REGISTRY
from holdfast_lab.emulation.device import Rhythm, UnhealthyDevice
from holdfast_lab.emulation.profile import node_profile
from holdfast_lab.study.sdc.layers import RERUN, SHADOW, Bench, Caught, Checked, checked
from holdfast_lab.study.sdc.subjects import TINY, Trainee
from holdfast_lab.study.sdc.wide import Wide


def _device(trainee: Trainee, *, persistent: bool, inside: float = 1.0) -> UnhealthyDevice:
    return UnhealthyDevice(
        trainee.model, node=11, inside=inside, persistent=persistent, rhythm=Rhythm(1, 1)
    )


@for_each("persistent", [False, True])
def test_a_rerun_sees_only_errors_that_do_not_repeat_and_a_shadow_both(persistent: bool) -> None:
    trainee, caught = Trainee(TINY), Caught()
    device = _device(trainee, persistent=persistent)
    bench = Bench(trainee)
    for step in range(3):
        bench.step(step, [(device, caught)])
    assert caught.steps == caught.changed_steps == 3
    assert caught.steps_by[SHADOW] == 3
    assert caught.steps_by[RERUN] == (0 if persistent else 3)
    assert 0 < caught.faults_by["rounding"] <= caught.inside == caught.faults


def test_a_struck_step_does_not_lead_the_training_astray() -> None:
    healthy, struck = Trainee(TINY), Trainee(TINY)
    plain, beside = Bench(healthy), Bench(struck)
    for step in range(2):
        plain.step(step)
        beside.step(step, [(_device(struck, persistent=False), Caught())])
    pairs = zip(healthy.parameters(), struck.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_no_checksum_sees_what_is_struck_behind_the_product() -> None:
    trainee, caught = Trainee(TINY), Caught()
    Bench(trainee).step(0, [(_device(trainee, persistent=False, inside=0.0), caught)])
    assert caught.faults > caught.inside == 0
    assert not any(caught.faults_by[name] for name in REGISTRY)
    assert caught.steps_by[SHADOW] == 1


def test_every_linear_layer_is_checked_forward_and_backward_and_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), Checked()
    x = torch.randn(5, 8, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    bare = gradients()
    with checked(model, found):
        watched = gradients()
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert set(found.seen) == {(n, role) for n in "02" for role in ("forward", "grad_a")}
    assert (found.products, found.rows) == (4, 20)
    assert found.flags["rounding"].products == 0


def test_the_bound_of_the_paper_grows_with_the_width_and_ours_stays_small() -> None:
    draw = torch.Generator().manual_seed(0)
    narrow, wide = (Wide.make(16, width, draw) for width in (64, 512))
    assert wide.lines()["norm"] > 30 * narrow.lines()["norm"]
    assert wide.lines()["rounding"] < 1e-3
    assert wide.false_alarms()["rounding"] == 0
    rates = wide.seen(node_profile(10), 20, draw)
    assert rates["rounding"].count > rates["norm"].count
