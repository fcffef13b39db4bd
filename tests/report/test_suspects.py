"""Devices and ops by their share of the faults: silent where all are alike."""

import random
from itertools import product

import pytest
from report_runs import corrected, event, repeated, struck

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


def _dealt(at_s: float, hosts: dict[str, int]) -> list[Event]:
    """The restore of every rank, on the host that runs it from now on."""
    return [event("restored", at_s, step=-1, rank=rank, host=host) for host, rank in hosts.items()]


def test_a_device_stays_the_same_where_a_restart_deals_the_ranks_anew():
    def fault(at_s: float, rank: int, host: str) -> Event:
        return event("gemm_fault", at_s, step=int(at_s), rank=rank, host=host, op="a")

    rebuilt = event("snapshot_rebuilt", 20, step=-1, rank=1, host="c")
    events = [
        *(fault(at_s, rank, host) for at_s, rank, host in ((1, 0, "a"), (2, 1, "b"), (3, 2, "c"))),
        *(fault(at_s, 2, "c") for at_s in (4, 5, 6)),
        *(rebuilt, *_dealt(21, {"a": 0, "c": 1, "b2": 2})),
        *(fault(at_s, 1, "c") for at_s in (30, 31, 32, 33, 34)),
    ]
    devices = _found(events).by_device(steps=40, ranks=3)
    assert [(device.name, device.faults) for device in devices] == [
        ("ranks 1, 2 on c (cpu)", 9),
        ("rank 0 on a (cpu)", 1),
        ("rank 1 on b (cpu)", 1),
        ("rank 2 on b2", 0),
    ]
    assert [device.stands_out for device in devices] == [True, False, False, False]
    assert {device.fair for device in devices} == {1 / 3}


def test_devices_of_one_host_are_told_apart_although_it_gets_other_ranks():
    events = [
        *(event("gemm_fault", n, step=n, rank=rank, op="a") for n, rank in ((1, 0), (2, 1))),
        *_dealt(10, {"b": 0}),
        *(event("restored", 10, step=-1, rank=rank) for rank in (2, 3)),
        *(event("gemm_fault", n, step=n, rank=3, op="a") for n in (20, 21)),
    ]
    devices = _found(events).by_device(steps=30, ranks=4)
    assert {device.name: device.faults for device in devices} == {
        "ranks 1, 3 on node-a (cpu)": 3,
        "ranks 0, 2 on node-a (cpu)": 1,
        "rank 0 on b": 0,
    }


def test_what_the_injector_did_accuses_no_device():
    events = [each for n in range(20) for each in (struck(n, step=n), corrected(n + 0.5, step=n))]
    (device,) = _found(events).by_device(steps=30, ranks=2)
    assert (device.faults, device.stands_out) == (20, False)
    events += [corrected(n, step=n) for n in range(40, 52)]
    (device,) = _found(events).by_device(steps=60, ranks=2)
    assert (device.faults, device.stands_out) == (32, True)


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
