"""The simulator: time adds up, by hand where one can, and the plan's expectations hold in it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from math import gamma, inf, sqrt
from typing import Any

import pytest
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planner.detection import MONTH_S, Looks
from holdfast.planner.fleet import Devices, Faults, FaultyDevice, LadderCosts, LadderQuestion, Model
from holdfast.planner.ladder import (
    Configuration,
    LadderPlan,
    Month,
    expected,
    plan_checkpoints,
    plan_ladder,
    timing,
)
from holdfast.planner.simulate import Clock, Life, Undetected, estimates, simulate
from holdfast.planner.streams import Stream

NONE = Looks(0, 0, 0)
NEVER = Faults(inf)
COSTS = LadderCosts(
    check_s_per_step=0.3,
    op_recompute_s=1.0,
    snapshot_stall_s=0.5,
    parity_stall_s=0.25,
    persist_stall_s=1.0,
    persist_s=60.0,
    restore_s=20.0,
    rebuild_s=60.0,
    reload_s=200.0,
    restart_s=60.0,
    checkpoint_stall_s=0.5,
)
# 3.3 standard errors: a sound expectation is outside once in a thousand comparisons.
WIDE = 3.3


def fleet(devices: int, scale: float = 1.0) -> LadderQuestion:
    """A fleet whose events are as many a month, whatever its size, but for the scale."""
    unit = devices / scale
    faults = {
        "matmul": Faults(unit),
        "outside": Faults(2 * unit),
        "faulty_device": Faults(3 * unit),
        "crash": Faults(1.5 * unit),
        "node_loss": Faults(2 * unit),
    }
    question = LadderQuestion(Devices(1024, 8, 8), Model(10.0, 1e11), costs=COSTS)
    return replace(question.resized(devices), faults=faults)


def hours(month: Month) -> float:
    return month.training_h + month.lost_h


# As many failures as such fleets have: a device alone a few a year, 100,000 one an hour.
FLEETS = {1: 0.05, 8: 0.3, 1000: 1.0, 100_000: 16.0}
MONTHS = {1: 1200, 8: 500, 1000: 200, 100_000: 24}


def agrees(question: LadderQuestion, found: LadderPlan, months: int) -> None:
    """Every expectation is within the simulated interval."""
    measured = estimates(simulate(question, found.configuration, range(months)), WIDE)
    for name in ("training_h", "recomputing_h", "restarting_h", "failures", "lost_h"):
        assert measured[name].holds(getattr(found.month, name)), (name, measured[name])
    # A month ends amid a cycle: up to a save less than the expectation has.
    save_h = (timing(question, found.configuration).save_stall_s + 1.0) / 3600
    for name in ("detecting_h", "saving_h", "repairing_h"):
        estimate, value = measured[name], getattr(found.month, name)
        assert estimate.low - save_h <= value <= estimate.high + save_h, (name, estimate)
    assert measured["undetected_faults"].mean > 0
    assert measured["undetected_faults"].holds(found.month.undetected_faults), measured


@for_each(
    ("devices", "shape"),
    [(1000, 1.0), (8, 1.0), (1, 1.0), (100_000, 1.0), (1000, 0.7), (1000, 2.0)],
    first=2,
)
def test_expectations_are_within_the_simulated_interval(devices: int, shape: float) -> None:
    """Times between the faults of many units may be Weibull: together they are nearly Poisson."""
    question = fleet(devices, FLEETS[devices])
    faults = {kind: replace(one, shape=shape) for kind, one in question.faults.items()}
    question = replace(question, faults=faults)
    found = plan_ladder(question, Looks(0.5, 0.05, 0.05))
    assert found.doubts == ()
    agrees(question, found, MONTHS[devices])
    if shape == 1.0:
        agrees(question, plan_checkpoints(question), MONTHS[devices])


@for_each("devices", [1000, 1, 100_000], first=1)
def test_the_planned_interval_is_within_a_few_percent_of_the_simulated_best(devices: int) -> None:
    """The same months for all intervals; what an interval cannot change is left out."""
    question = replace(fleet(devices, FLEETS[devices] * 4), costs=replace(COSTS, persist_stall_s=0))
    plan = plan_ladder(question, NONE).configuration
    assert plan.snapshot_steps is not None
    months, lost = {1: 400, 1000: 30, 100_000: 3}[devices], {}
    for factor in (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0):
        steps = max(1, round(plan.snapshot_steps * factor))
        persist = -(-plan.persist_steps // steps) * steps
        other = replace(plan, snapshot_steps=steps, persist_steps=persist)
        found = estimates(simulate(question, other, range(months)))
        lost[factor] = found["saving_h"].mean + found["recomputing_h"].mean
    assert lost[1.0] <= 1.05 * min(lost.values()), lost
    assert max(lost[0.25], lost[4.0]) > 1.3 * lost[1.0], lost


@st.composite
def lives(draw: st.DrawFn) -> tuple[LadderQuestion, Configuration, int]:
    devices = draw(st.sampled_from([1, 3, 8, 64]))
    shape = st.sampled_from([0.5, 1.0, 1.0, 3.0])
    faults = {
        kind: Faults(
            draw(st.floats(0.05, 50.0)), draw(st.sampled_from(["device", "node"])), draw(shape)
        )
        for kind in ("matmul", "outside", "faulty_device", "crash", "node_loss")
    }
    question = replace(
        fleet(devices),
        faults=faults,
        faulty_device=FaultyDevice(draw(st.floats(0.0, 0.5)), evict_after=draw(st.integers(1, 4))),
    )
    looks = Looks(*(draw(st.floats(0, 1)) for _ in range(3)))
    steps, times = draw(st.integers(1, 300)), draw(st.integers(1, 9))
    parities = draw(st.sampled_from([None, *question.parities]))
    if parities is None:
        return question, Configuration(looks, None, None, steps), draw(st.integers(0, 99))
    return question, Configuration(looks, parities, steps, steps * times), draw(st.integers(0, 99))


@given(lives())
def test_time_adds_up_and_the_same_seed_gives_the_same_month(
    case: tuple[LadderQuestion, Configuration, int],
) -> None:
    question, found, seed = case
    month = Life(question, found, seed, window_s=MONTH_S / 30).run()
    assert hours(month) == pytest.approx(730 / 30)
    parts = (month.training_h, month.detecting_h, month.saving_h, month.recomputing_h)
    assert min(*parts, month.restarting_h, month.repairing_h) >= -1e-9
    assert month.undetected_faults >= 0
    assert month == Life(question, found, seed, window_s=MONTH_S / 30).run()


def test_without_faults_nothing_but_saves_and_checks_is_lost() -> None:
    question = replace(fleet(8), faults=dict.fromkeys(fleet(8).faults, NEVER))
    found = Configuration(Looks(1, 0, 0), 0, 100, 1000)
    month = Life(question, found, 0).run()
    assert (month.failures, month.undetected_faults, month.memory_losses) == (0, 0, 0)
    assert month.recomputing_h == month.restarting_h == month.repairing_h == 0
    cycle_s = 1000 * 10.3 + 10 * 0.5 + 1.0
    assert month.training_h == pytest.approx(730 * 10_000 / cycle_s, rel=1e-4)
    assert month.overhead == pytest.approx(expected(question, found).overhead, rel=1e-3)


class Played(Life):
    """One life whose faults are given: (second, kind, unit)."""

    def __init__(
        self,
        question: LadderQuestion,
        found: Configuration,
        window_s: float,
        struck: list[tuple[float, str, int]],
    ) -> None:
        never = dict.fromkeys(question.faults, NEVER)
        super().__init__(replace(question, faults=never), found, 0, window_s=window_s)
        self._question = question
        self._script: Iterator[tuple[float, str, int]] = iter([*struck, (inf, "crash", 0)])
        self._shift()

    def _shift(self) -> None:
        at_s, kind, self._unit = next(self._script)
        self._due = [(at_s, kind)]

    def _pop(self) -> tuple[str, int]:
        kind, unit = self._due[0][1], self._unit
        self._shift()
        return kind, unit


def played(*struck: tuple[float, str, int], parities: int | None = 1, **costs: float) -> Month:
    """Steps of 10 s, a snapshot each 10 of them without stall, a checkpoint each 20; 100 steps."""
    still = replace(
        COSTS,
        snapshot_stall_s=0.0,
        parity_stall_s=0.0,
        persist_stall_s=0.0,
        checkpoint_stall_s=0.0,
        snapshot_s=0.0,
    )
    question = replace(fleet(128), costs=replace(still, **costs))
    steps = None if parities is None else 10
    found = Configuration(NONE, parities, steps, 20)
    return Played(question, found, 1000.0, list(struck)).run()


def seconds(hours: float) -> float:
    return round(hours * 3600, 6)


# 128 devices in 16 nodes, two groups of eight; the nodes are of the devices 0, 8 and 64.
@for_each(
    ("struck", "options", "recomputing_s", "restarting_s", "memory_losses"),
    [
        ([(355.0, "crash", 0)], {}, 55, 80, 0),
        # A snapshot that is not clean yet does not count.
        ([(305.0, "crash", 0)], {"snapshot_s": 10.0}, 105, 80, 0),
        ([(311.0, "crash", 0)], {"snapshot_s": 10.0}, 11, 80, 0),
        # A lost node is rebuilt by parity, and reloaded without.
        ([(355.0, "node_loss", 0)], {}, 55, 120, 0),
        ([(355.0, "node_loss", 0)], {"parities": 0}, 155, 260, 1),
        # A second node of the group is too much; one of another group, or later, is not.
        ([(355.0, "node_loss", 0), (400.0, "node_loss", 8)], {}, 155, 45 + 260, 1),
        ([(355.0, "node_loss", 0), (400.0, "node_loss", 64)], {}, 55, 45 + 120, 0),
        ([(355.0, "node_loss", 0), (356.0, "node_loss", 8)], {"parities": 2}, 55, 121, 0),
        ([(355.0, "node_loss", 0), (480.0, "node_loss", 8)], {}, 60, 240, 0),
        # The checkpoint of step 40 is written from 400 s to 460 s.
        ([(455.0, "crash", 0)], {"parities": None}, 255, 260, None),
        ([(465.0, "crash", 0)], {"parities": None}, 65, 260, None),
    ],
)
def test_where_a_failure_returns_to_and_how_long_that_takes(
    struck: list[tuple[float, str, int]],
    options: dict[str, Any],
    recomputing_s: float,
    restarting_s: float,
    memory_losses: int | None,
) -> None:
    month = played(*struck, **options)
    assert (seconds(month.recomputing_h), seconds(month.restarting_h)) == (
        recomputing_s,
        restarting_s,
    )
    assert seconds(month.training_h) == 1000 - recomputing_s - restarting_s
    assert memory_losses is None or month.memory_losses == memory_losses


def test_a_silent_fault_that_is_undone_is_none() -> None:
    assert played((355.0, "outside", 0)).undetected_faults == 1
    assert played((355.0, "outside", 0), (356.0, "crash", 0)).undetected_faults == 0
    assert played((295.0, "outside", 0), (356.0, "crash", 0)).undetected_faults == 1


def test_the_clock_is_inverted_exactly() -> None:
    time = timing(fleet(8), Configuration(Looks(1, 0, 0), 0, 7, 21))
    clock = Clock(time, 7, 21)
    for first in (0, 5, 7, 30):
        for steps in range(first, first + 60):
            ran_s = clock.at(steps) - clock.at(first)
            assert clock.after(first, ran_s + 1e-6) == steps
            assert clock.after(first, max(0.0, ran_s - 1e-6)) in (steps - 1, first)


def test_what_is_undone_takes_its_share_of_the_faults() -> None:
    faults = Undetected(random.Random(2))
    faults.add(0, 100, 400)
    faults.add(100, 101, 5)
    faults.add(101, 301, 2000)
    faults.undo(201)
    assert faults.count == pytest.approx(405 + 1000, abs=5 * sqrt(500))
    faults.undo(100)
    assert faults.count == 400
    faults.undo(0)
    assert faults.count == 0


@for_each("shape", [0.6, 1.0, 2.5])
def test_a_stream_is_in_full_course_from_the_start(shape: float) -> None:
    draw = random.Random(7)
    counts = []
    for _ in range(300):
        stream, count = Stream(Faults(1.0, shape=shape), 5, draw), 0
        while stream.next_s < 3 * 86_400:
            assert 0 <= stream.advance() < 5
            count += 1
        counts.append(count)
    mean = sum(counts) / 300
    spread = sqrt(sum((c - mean) ** 2 for c in counts) / 299 / 300)
    assert abs(mean - 15) < WIDE * spread


def test_times_between_faults_of_a_unit_are_weibull() -> None:
    stream, shape = Stream(Faults(1.0, shape=2.0), 1, random.Random(3)), 2.0
    times, last = [], 0.0
    for _ in range(4000):
        at_s = stream.next_s
        stream.advance()
        times.append((at_s - last) / 86_400)
        last = at_s
    median = sorted(times[1:])[2000]
    assert median == pytest.approx(0.693147**0.5 / gamma(1 + 1 / shape), rel=0.03)


def test_an_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    draw, held = random.Random(6), 0
    blank = dict.fromkeys(Month.__dataclass_fields__, 1.0)
    for _ in range(600):
        months = [Month(**blank | {"failures": draw.gauss(5, 2)}) for _ in range(10)]
        held += estimates(months)["failures"].holds(5.0)
    assert 0.92 <= held / 600 <= 0.98
