"""Simulation of months of training event by event, with the assumptions of ``ladder``.

Time advances from one event to the next; the number of steps between them follows from the clock.
The streams (``streams``) give the times of faults of each kind. A silent fault is found with the
probability that detectors run, and repaired; otherwise it stays in the step until that step is
undone by a return to a save. After a failure training returns to the newest clean save. A further
failure before training runs again begins the restart again. If by then one group has lost more
nodes than its parities rebuild, the newest checkpoint on disk is loaded.
"""

import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from heapq import heapify, heappop, heappush
from math import sqrt

from holdfast.errors import ConfigError
from holdfast.planner.detection import MONTH_S, missed
from holdfast.planner.fleet import LadderQuestion
from holdfast.planner.ladder import Configuration, Month, Timing, timing
from holdfast.planner.parity_groups import group_count
from holdfast.planner.streams import Stream, binomial, poisson

FAILURES = ("crash", "node_loss")
MOST_EVENTS = 5_000_000


@dataclass
class Clock:
    """Conversion between steps, counted from 0, and the undisturbed time that they take."""

    time: Timing
    save_steps: int
    persist_steps: int

    def at(self, steps: int) -> float:
        """Return the seconds from the start to the end of this step and its saves."""
        saves = steps // self.save_steps * self.time.save_stall_s
        persists = steps // self.persist_steps * self.time.persist_stall_s
        return steps * self.time.unit_s + saves + persists

    def after(self, first: int, ran_s: float) -> int:
        """Return the number of steps that are done ``ran_s`` after step ``first`` was done."""
        end_s = self.at(first) + ran_s
        most = range(first + 1, first + int(ran_s / self.time.unit_s) + 1)
        return first + bisect_right(most, end_s, key=self.at)


@dataclass
class Undetected:
    """The undetected silent faults, by the steps in which they occurred."""

    draw: random.Random
    _runs: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, first: int, last: int, count: int) -> None:
        """Add faults in the steps after ``first``, up to ``last``."""
        if count:
            self._runs.append((first, last, count))

    def undo(self, steps: int) -> None:
        """Remove the faults in all steps after this one."""
        cut = []
        while self._runs and self._runs[-1][1] > steps:
            first, last, count = self._runs.pop()
            if first < steps:
                kept = binomial(self.draw, count, (steps - first) / (last - first))
                cut.append((first, steps, kept))
        self._runs += reversed(cut)

    @property
    def count(self) -> int:
        """Number of faults in steps that are kept."""
        return sum(count for _, _, count in self._runs)


class Life:
    """The simulation of one month of one fleet; every random number follows from the seed."""

    def __init__(
        self,
        question: LadderQuestion,
        configuration: Configuration,
        seed: int,
        window_s: float = MONTH_S,
    ) -> None:
        self._question, self._configuration = question, configuration
        self._end_s = window_s
        self._draw = random.Random(f"holdfast/{seed}")
        self._time = timing(question, configuration)
        self._missed = missed(question, configuration.looks)
        self._clock = Clock(self._time, configuration.save_steps, configuration.persist_steps)
        self._undetected = Undetected(self._draw)
        self._now_s = 0.0  # wall-clock time
        self._ran_s = 0.0  # time in which steps were computed since the last start
        self._first = 0  # the step with which training last started
        self._persisted = 0  # the newest step on disk
        self._spent: dict[str, float] = defaultdict(float)
        self._faulty: list[int] = []  # number of faults found so far on each faulty device
        self._streams = {
            kind: Stream(faults, faults.units(question.fleet), self._draw)
            for kind, faults in question.faults.items()
        }
        self._due = [(stream.next_s, kind) for kind, stream in self._streams.items()]
        heapify(self._due)

    def run(self) -> Month:
        """Simulate the month and return it."""
        while self._now_s < self._end_s:
            at_s = self._due[0][0]
            found_s = self._next_found_s()
            if min(at_s, found_s) >= self._end_s:
                self._train(self._end_s)
            elif found_s < at_s:
                self._train(found_s)
                self._found()
            else:
                self._train(at_s)
                self._struck(*self._pop())
        return self._month()

    def _pop(self) -> tuple[str, int]:
        _, kind = heappop(self._due)
        unit = self._streams[kind].advance()
        heappush(self._due, (self._streams[kind].next_s, kind))
        return kind, unit

    def _train(self, until_s: float) -> None:
        """Compute steps until a time; faulty devices add undetected faults meanwhile."""
        before = self._steps()
        ran_s = until_s - self._now_s
        self._now_s, self._ran_s = until_s, self._ran_s + ran_s
        device, steps = self._question.faulty_device, ran_s / self._time.unit_s
        mean = len(self._faulty) * device.faults_per_step * steps * self._missed.faulty_device
        if mean:
            self._undetected.add(before, self._steps() + 1, poisson(self._draw, mean))

    def _steps(self, delay_s: float = 0.0) -> int:
        """Return the number of steps that were done ``delay_s`` ago."""
        return self._clock.after(self._first, max(0.0, self._ran_s - delay_s))

    def _next_found_s(self) -> float:
        device = self._question.faulty_device
        per_step = device.faults_per_step * (1 - self._missed.faulty_device)
        rate = len(self._faulty) * per_step / self._time.unit_s
        return self._now_s + self._draw.expovariate(rate) if rate else float("inf")

    def _struck(self, kind: str, unit: int) -> None:
        if kind in FAILURES:
            self._fail(kind, unit)
        elif kind == "faulty_device":
            self._faulty.append(0)
        elif self._draw.random() < getattr(self._missed, kind):
            self._undetected.add(self._steps(), self._steps() + 1, 1)
        else:
            seen = 1 - getattr(self._missed, kind)
            self._repair(self._missed.checked / seen if kind == "matmul" else 0.0)

    def _found(self) -> None:
        """Count a fault found on a faulty device, and replace the device after enough of them."""
        self._repair(self._missed.checked_faulty / (1 - self._missed.faulty_device))
        which = self._draw.randrange(len(self._faulty))
        self._faulty[which] += 1
        if self._faulty[which] == self._question.faulty_device.evict_after:
            del self._faulty[which]
            self._fail("eviction", -1)

    def _repair(self, by_check: float) -> None:
        costs = self._question.costs
        cost_s = costs.op_recompute_s if self._draw.random() < by_check else costs.rerun_s
        self._pause("repairing", cost_s)

    def _pause(self, name: str, cost_s: float) -> None:
        """Advance time without computing steps; faults in between occur right after it."""
        cost_s = min(cost_s, self._end_s - self._now_s)
        self._spent[name] += cost_s
        self._now_s += cost_s
        late = []
        while self._due[0][0] < self._now_s:
            late.append(heappop(self._due)[1])
        for kind in late:
            self._streams[kind].next_s = self._now_s
            heappush(self._due, (self._now_s, kind))

    def _fail(self, kind: str, unit: int) -> None:
        """Restart from a save, once there was no further failure for long enough."""
        time = self._time
        persisted, done = self._newest_persisted(), self._steps(time.save_delay_s)
        saved = max(done - done % self._clock.save_steps, persisted)
        gone, lost, takes_s = Counter[int](), False, 0.0
        failed_s, started_s = self._now_s, self._now_s
        while True:
            self._spent["failures"] += 1
            lost |= self._loses(kind, unit, gone)
            restart_s = time.restore_s if kind == "crash" else time.rebuild_s
            takes_s = max(takes_s, time.reload_s if lost else restart_s)
            ready_s = min(failed_s + takes_s, self._end_s)
            while (kind := self._due[0][1]) not in FAILURES and self._due[0][0] < ready_s:
                if self._pop()[0] == "faulty_device":
                    self._faulty.append(0)
            if self._due[0][0] >= ready_s:
                break
            failed_s = self._due[0][0]
            kind, unit = self._pop()
        self._spent["restarting"] += ready_s - started_s
        self._spent["memory_losses"] += lost
        self._return(persisted if lost else saved, ready_s)

    def _loses(self, kind: str, unit: int, gone: "Counter[int]") -> bool:
        """Count a lost node; return whether its group has lost more than parities rebuild."""
        parities = self._configuration.parities
        if kind != "node_loss" or parities is None:
            return False
        fleet, faults = self._question.fleet, self._question.faults[kind]
        node = unit if faults.per == "node" else unit // fleet.devices_per_node
        count = group_count(fleet.nodes, fleet.group_nodes, parities)
        group = node * count // fleet.nodes
        gone[group] += 1
        return gone[group] > parities

    def _newest_persisted(self) -> int:
        done = self._steps(self._time.persist_delay_s)
        self._persisted = max(self._persisted, done - done % self._clock.persist_steps)
        return self._persisted

    def _return(self, steps: int, ready_s: float) -> None:
        """Continue from a save; the steps after it are computed again."""
        undone_s = self._clock.at(self._first) + self._ran_s - self._clock.at(steps)
        self._spent["recomputing"] += undone_s
        self._undetected.undo(steps)
        self._first, self._ran_s, self._now_s = steps, 0.0, ready_s

    def _month(self) -> Month:
        steps = self._steps()
        # The unfinished step is divided among training, detecting and saving as the others are.
        begun = self._clock.at(self._first) + self._ran_s - self._clock.at(steps)
        share = min(1.0, begun / self._time.unit_s)
        training_s = (steps + share) * self._time.work_s
        detecting_s = (steps + share) * (self._time.unit_s - self._time.work_s)
        saving_s = self._clock.at(steps) + begun - training_s - detecting_s
        spent = self._spent
        losses = "memory_losses" if self._configuration.parities is not None else "failures"
        return Month(
            training_h=training_s / 3600,
            detecting_h=detecting_s / 3600,
            saving_h=saving_s / 3600,
            recomputing_h=spent["recomputing"] / 3600,
            restarting_h=spent["restarting"] / 3600,
            repairing_h=spent["repairing"] / 3600,
            undetected_faults=float(self._undetected.count),
            failures=spent["failures"],
            memory_losses=spent[losses],
        )


@dataclass(frozen=True)
class Estimate:
    """A mean over simulated months with a confidence interval."""

    mean: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return whether a value is in the interval."""
        return self.low <= value <= self.high


def simulate(
    question: LadderQuestion, configuration: Configuration, seeds: Iterable[int]
) -> list[Month]:
    """Simulate a month for each seed.

    Raises:
        ConfigError: There are too many events in a month to simulate it in reasonable time.
    """
    events = MONTH_S * sum(question.per_s(kind) for kind in question.faults)
    if events > MOST_EVENTS:
        raise ConfigError(
            f"{events:.3g} faults a month are too many to play one by one (at most "
            f"{MOST_EVENTS}): give fewer devices or longer mttf_days"
        )
    return [Life(question, configuration, seed).run() for seed in seeds]


def estimates(months: list[Month], z: float = 1.96) -> dict[str, Estimate]:
    """Estimate the mean of every number of a month, with its interval ± t · s / √n.

    ``z`` is the normal quantile of the confidence, 1.96 for 95 %. Student's t is expanded from it
    (Cornish and Fisher), which is accurate from 6 months on.

    Raises:
        ConfigError: There are fewer than two months.
    """
    if len(months) < 2:
        raise ConfigError(f"an interval of {len(months)} months: simulate at least 2")
    names = [*(item.name for item in fields(Month)), "lost_h", "overhead"]
    return {name: _estimate([getattr(month, name) for month in months], z) for name in names}


def _estimate(values: list[float], z: float) -> Estimate:
    count, free = len(values), len(values) - 1
    mean = sum(values) / count
    spread = sqrt(sum((value - mean) ** 2 for value in values) / free / count)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return Estimate(mean, mean - t * spread, mean + t * spread)
