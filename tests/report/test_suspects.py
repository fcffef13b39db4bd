"""Devices and ops by their share of the faults: silent where all are alike."""

import random
from itertools import product

import pytest
from report_runs import corrected, event, repeated

from holdfast.events import Event
from holdfast.inject.statistics import wilson_interval
from holdfast.report.suspects import Faults, chance_of, is_located


def _found(events) -> Faults:
    faults = Faults()
    faults.take(events)
    return faults


def _on_ranks(ranks) -> Faults:
    return _found(corrected(n, step=n, rank=rank) for n, rank in enumerate(ranks))


def test_a_device_with_most_of_the_faults_stands_out():
    worst, *others = _on_ranks([2] * 9 + [0, 1]).by_device(steps=100, ranks=4)
    assert worst.name == "rank 2 on node-a (cpu)"
    assert worst.stands_out
    assert (worst.faults, worst.of, worst.fair, worst.steps) == (9, 11, 0.25, 9)
    assert (worst.low, worst.high) == wilson_interval(9, 11)
    assert (worst.rate_low, worst.rate_high) == wilson_interval(9, 100)
    assert [other.stands_out for other in others] == [False, False]
    # Two faults on one of two ranks are a share of 100 %, and no evidence.
    (device,) = _on_ranks([1, 1]).by_device(steps=100, ranks=2)
    assert device.share > device.fair
    assert not device.stands_out
    (device,) = _on_ranks([0] * 50).by_device(steps=100, ranks=1)
    assert not device.stands_out


@pytest.mark.parametrize(("units", "faults"), [(2, 30), (8, 40), (64, 10), (512, 6)])
def test_devices_that_are_alike_are_accused_in_few_runs(units, faults):
    generator, accused = random.Random(0), 0
    for _ in range(400):
        ranks = [generator.randrange(units) for _ in range(faults)]
        devices = _on_ranks(ranks).by_device(steps=100, ranks=units)
        accused += any(device.stands_out for device in devices)
    low, _ = wilson_interval(accused, 400)
    assert low <= 0.05


@pytest.mark.parametrize(("units", "faults"), [(2, 3), (3, 5), (4, 6), (5, 4)])
def test_the_chance_bounds_what_every_outcome_together_gives(units, faults):
    outcomes = list(product(range(units), repeat=faults))
    for count in range(faults // units + 1, faults + 1):
        most = [max(outcome.count(unit) for unit in range(units)) for outcome in outcomes]
        exact = sum(value >= count for value in most) / len(outcomes)
        of_one = sum(outcome.count(0) >= count for outcome in outcomes) / len(outcomes)
        assert chance_of(count, faults, units) == pytest.approx(min(1, units * of_one))
        assert chance_of(count, faults, units) >= exact * (1 - 1e-9)


def test_the_chance_of_very_many_faults_is_a_number():
    assert chance_of(60_000, 100_000, 2) == 0.0
    assert 0 < chance_of(50_500, 100_000, 2) < 0.05
    assert chance_of(50_000, 100_000, 2) == 1.0
    with pytest.raises(ValueError, match="not possible"):
        chance_of(3, 2, 2)


def test_the_same_place_found_again_counts_once():
    events = [corrected(1.0), corrected(1.1), repeated(2.0, "transient")]
    (device,) = _found(events).by_device(steps=10, ranks=1)
    assert (device.faults, device.steps) == (1, 1)


def test_a_repeated_step_counts_where_the_loss_changed():
    events = [repeated(2.0, "transient", rank=rank, differed=rank == 1) for rank in range(2)]
    devices = _found(events).by_device(steps=10, ranks=2)
    assert {device.name: device.faults for device in devices} == {
        "rank 1 on node-a": 1,
        "rank 0 on node-a": 0,
    }


def test_ranks_on_two_hosts_are_told_apart():
    there = Event("gemm_fault", op="a", step=2, rank=0, host="node-b", device="cuda:1")
    moved = [corrected(1.0), there]
    names = {device.name for device in _found(moved).by_device(steps=10, ranks=1)}
    assert names == {"rank 0 on node-a (cpu)", "rank 0 on node-b (cuda:1)"}


def test_a_rank_that_its_shadows_name_is_a_suspect_with_its_device():
    named = [
        Event(kind, step=step, rank=2, host="node-b", device="cuda:1", detector="shadow")
        for step in range(6)
        for kind in ("shadow_mismatch", "evict")
    ]
    (device,) = _found(named).by_device(steps=100, ranks=4)
    assert (device.name, device.faults) == ("rank 2 on node-b (cuda:1)", 6)
    assert device.stands_out


@pytest.mark.parametrize(
    "kind",
    [
        *("injected", "nonfinite_input", "restored", "persisted", "smp_lost", "replica_diverged"),
        *("evict", "shadow_undecided"),
    ],
)
def test_what_names_no_place_accuses_nobody(kind):
    assert not is_located(event(kind, 1.0))


def test_ops_are_ranked():
    events = [corrected(n, step=n, op="often" if n % 3 else "seldom") for n in range(9)]
    often, seldom = _found(events).by_op(steps=20)
    assert (often.name, often.faults, seldom.name, seldom.faults) == ("often", 6, "seldom", 3)
    assert not often.stands_out
    faults = _found([event("restored", 1.0)])
    assert faults.by_device(steps=10, ranks=2) == faults.by_op(steps=10) == []
