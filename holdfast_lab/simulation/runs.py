"""One seed, or many on several cores."""

from __future__ import annotations

import gc
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from holdfast_lab.simulation import faults, planted, states
from holdfast_lab.simulation.resizing import Former
from holdfast_lab.simulation.world import Size, Violation, World

STORY_LINES = 60


@dataclass
class Outcome:
    """What came of one seed.

    Attributes:
        violation: the invariant that does not hold; empty if all do.
        story: what happened last, if one does not hold.
        faults: how many faults were drawn.
        seconds: the CPU time that the seed took.
        happened: how often each fault, commit, restore and so on happened.
    """

    seed: int
    violation: str = ""
    at_s: float = 0.0
    story: list[str] = field(default_factory=list)
    faults: int = 0
    events: int = 0
    seconds: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)


@dataclass
class Totals:
    """The counts over many seeds."""

    seeds: int = 0
    violations: int = 0
    events: int = 0
    faults: int = 0
    seconds: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one seed."""
        self.seeds, self.violations = self.seeds + 1, self.violations + bool(outcome.violation)
        for name in ("events", "faults", "seconds", "happened"):
            setattr(self, name, getattr(self, name) + getattr(outcome, name))

    def summary(self, size: Size) -> dict[str, Any]:
        """Return the counts by name."""
        messages, commits = self.happened["messages"], max(1, self.happened["commits"])
        return {
            **{name: getattr(self, name) for name in ("seeds", "violations", "events", "faults")},
            "CPU s a seed": round(self.seconds / max(1, self.seeds), 3),
            **{n: self.happened[n] for n in ("commits", "restored", "replaced", "messages")},
            "messages a node and commit": round(messages / commits / size.nodes, 1),
        }


def simulate(seed: int, size: Size, only: Collection[int] | None = None, bug: str = "") -> Outcome:
    """Simulate one seed.

    Args:
        seed: determines everything that is drawn.
        size: the cluster.
        only: the numbers of the faults that happen; by default all.
        bug: the name of a deliberate bug (``planted``).
    """
    started_s = time.process_time()
    outcome = Outcome(seed)

    def chosen(size: Size) -> list[faults.Fault]:
        drawn = faults.drawn(seed, size, outcome.faults)
        outcome.faults += len(drawn)
        return [fault for fault in drawn if only is None or fault.number in only]

    with states.small_pieces(), planted.bug(bug), _garbage_left():
        world = World(seed, size, chosen(size))
        try:
            world.run()
            if world.resizes:
                outcome.events, former = world.events, Former.of(world)
                world.stats["resized"] += 1
                world = World(seed, former.size, chosen(former.size), former)
                world.run()
        except Violation as error:
            outcome.violation = str(error)
        except Exception as error:  # a defect of the library or of the simulator: report its seed
            where = traceback.format_exception(error)
            outcome.violation = f"{error!r}\n" + "".join(where[-6:])
        if outcome.violation:
            outcome.story = world.story(STORY_LINES)
    outcome.events += world.events
    outcome.at_s, outcome.happened = world.now, world.stats
    outcome.seconds = time.process_time() - started_s
    return outcome


def simulate_all(
    seeds: Iterable[int], size: Size, jobs: int = 1, bug: str = ""
) -> Iterator[Outcome]:
    """Simulate seeds, each on one core, and yield their outcomes in the order of seeds."""
    work = partial(simulate, size=size, bug=bug)
    if jobs == 1:
        use_one_core()
        yield from map(work, seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=use_one_core) as pool:
        yield from pool.map(work, seeds, chunksize=4)


def use_one_core() -> None:
    """Let this process compute on one core, and look for garbage in no module's objects."""
    torch.set_num_threads(1)
    gc.freeze()


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Collect the garbage of the seed before, and none during this one: a twelfth of its time."""
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
