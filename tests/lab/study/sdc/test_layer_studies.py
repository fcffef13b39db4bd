"""What each layer sees of a device's wrong values, and what trainings end with."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from holdfast.abft.thresholds import REGISTRY
from holdfast_lab.emulation.device import Rhythm, Strike, UnhealthyDevice
from holdfast_lab.emulation.profile import node_profile
from holdfast_lab.study.registry import Row
from holdfast_lab.study.sdc import abft, mitigation
from holdfast_lab.study.sdc.layers import LAYERS, RERUN, SHADOW, Bench, Caught, Checked, checked
from holdfast_lab.study.sdc.subjects import TINY, Trainee
from holdfast_lab.study.sdc.wide import Wide


def _device(trainee: Trainee, *, persistent: bool, inside: float = 1.0) -> UnhealthyDevice:
    return UnhealthyDevice(
        trainee.model, node=11, inside=inside, persistent=persistent, rhythm=Rhythm(1, 1)
    )


@pytest.mark.parametrize("persistent", [False, True])
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


def test_extreme_values_are_known_by_their_size() -> None:
    from holdfast_lab.study.sdc.layers import _seen

    strike = Strike(0, "m", 0, "attn", "forward", False, 1, 1.0, ((0,),), (1.0,), (2.0,))
    assert _seen(strike, Checked()) == set()
    assert _seen(replace(strike, after=(1e11,)), Checked()) == {"extreme values"}
    assert _seen(replace(strike, after=(float("nan"),)), Checked()) == {"extreme values"}


def _layers(**values: float) -> dict[str, float]:
    return dict.fromkeys(LAYERS, 0.0) | values


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(abft.HEALTHY, {}, {"rounding": 1.0}), "products flagged"),
        (
            Row(abft.STEPS, {"node": 3, "steps": 2, "gradient wrong": 2}, _layers(shadow=50.0)),
            "misses",
        ),
        (
            Row(
                abft.REPEATED,
                {"node": 3, "steps": 1, "gradient wrong": 1},
                _layers(shadow=100.0, rerun=100.0),
            ),
            "was to repeat",
        ),
    ],
)
def test_the_verdict_of_the_layers_can_be_broken(row: Row, said: str) -> None:
    assert said in abft.STUDY.verdict([row])


def _ended(defence: str, node: str | int, table: str, *, equal: float, note: str = "") -> Row:
    caught = dict.fromkeys(mitigation.CAUGHT.values(), 0.0)
    measured = {mitigation.EQUAL: equal, **caught}
    return Row(table, {"node": node, "defence": defence}, measured, note=note)


def test_the_verdict_of_the_mitigation_can_be_broken() -> None:
    repeat, ladder = mitigation.REPEAT, mitigation.LADDER
    fine = _ended(ladder, 7, repeat, equal=1.0, note="evict rank 1")
    assert mitigation.STUDY.verdict([fine, _ended("unprotected", 7, repeat, equal=0.0)]) == ""
    astray = _ended(ladder, 7, repeat, equal=0.0)
    assert "does not end as" in mitigation.STUDY.verdict([fine, astray])
    healthy = _ended("checksums", "healthy", mitigation.HEALTHY, equal=0.0)
    assert "not left alone" in mitigation.STUDY.verdict([healthy])
    accused = replace(fine, note="evict rank 1, evict rank 2")
    assert "which is healthy" in mitigation.STUDY.verdict([accused])
