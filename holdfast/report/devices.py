"""The history of devices over several runs: their faults, and how likely so many are by chance."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.events import Event, EventKind, read_ledger
from holdfast.events.ledger import LEDGER_NAME
from holdfast.inject.statistics import CONFIDENCE
from holdfast.report import sources
from holdfast.report.suspects import Faults, Unit, tail_of


@dataclass(frozen=True)
class History:
    """The faults of one device, which is a place among the ranks of a host.

    Of the ``of`` faults found in its ``runs``, ``faults`` were its own; faults that the injector
    made do not count. ``chance`` bounds the probability that any of equal devices has so many, from
    the runs with several devices: n · P(X ≥ k) with X ~ Binomial(N, p), where k of N faults were
    its own, n is the number of devices listed, and p the largest fair share that the device had in
    a run. ``evicted`` counts how often shadow replicas named it, ``screened`` the wrong results of
    screenings, and ``last_s`` is its latest event, in seconds since 1970.
    """

    host: str
    place: int
    runs: int
    faults: int
    of: int
    chance: float
    evicted: int
    screened: int
    last_s: float

    @property
    def stands_out(self) -> bool:
        """True if the device is worse than the others at 95 % confidence, or was named."""
        return self.chance < 1 - CONFIDENCE or self.evicted > 0 or self.screened > 0

    def as_dict(self) -> dict[str, object]:
        """Return the history as plain values."""
        return {**asdict(self), "stands_out": self.stands_out}


def histories(run_dirs: Iterable[Path]) -> list[History]:
    """Read the histories of all devices in some runs' events; those that stand out come first.

    Raises:
        ConfigError: A directory has no ledger, or one cannot be read.
    """
    own, of = Counter[Unit](), Counter[Unit]()
    compared, compared_of = Counter[Unit](), Counter[Unit]()
    runs, evicted, screened = Counter[Unit](), Counter[Unit](), Counter[Unit]()
    fair: defaultdict[Unit, float] = defaultdict(float)
    last_s: defaultdict[Unit, float] = defaultdict(float)
    for events in _runs(run_dirs):
        faults = Faults()
        faults.take(events)
        found = faults.own()
        ranks = max([len(found), *(1 + event.rank for event in events)])
        runs.update(found.keys())
        for unit, count in found.items():
            own[unit] += count
            of[unit] += sum(found.values())
            if ranks > 1:
                compared[unit] += count
                compared_of[unit] += sum(found.values())
                fair[unit] = max(fair[unit], 1 / ranks)
        for event in events:
            unit = event.host, event.rank % faults.ranks_of(event.host)
            if event.rank >= 0:
                last_s[unit] = max(last_s[unit], event.time_s)
                evicted[unit] += event.kind == EventKind.EVICT
                screened[unit] += event.kind == EventKind.SCREEN_FAULT
    listed = [
        History(
            *unit,
            runs[unit],
            own[unit],
            of[unit],
            min(1.0, len(runs) * tail_of(compared[unit], compared_of[unit], fair[unit] or 1.0)),
            evicted[unit],
            screened[unit],
            last_s[unit],
        )
        for unit in runs
    ]
    return sorted(listed, key=lambda each: (not each.stands_out, each.chance, -each.faults))


def _runs(run_dirs: Iterable[Path]) -> Iterable[list[Event]]:
    """Yield the events of each run, also of earlier runs whose ledgers were set aside."""
    stem, _, suffix = LEDGER_NAME.partition(".")
    for run_dir in run_dirs:
        if not run_dir.is_dir() or not sources.is_run(run_dir):
            raise ConfigError(f"{run_dir} holds no run: give the directory of one")
        yield list(sources.Ledgers(run_dir).read())
        for path in sorted(run_dir.glob(f"{stem}-*.{suffix}")):
            yield [event for _, event in read_ledger(path)]
