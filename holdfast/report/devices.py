"""The history of devices over several runs: their faults, and how likely so many are by chance."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.events import Event, EventKind, read_ledger
from holdfast.events.ledger import LEDGER_NAME
from holdfast.inject.statistics import CONFIDENCE
from holdfast.report import sources
from holdfast.report.suspects import Faults, Unit, tail_of


@dataclass
class History:
    """The faults of one device, which is a place among the ranks of a host.

    Of the ``of`` faults found in its ``runs``, ``faults`` were its own, and of the ``compared_of``
    found in runs with several devices, ``compared``; faults that the injector made do not count.
    ``chance`` bounds the probability that any of equal devices has so many: n · P(X ≥ compared)
    with X ~ Binomial(compared_of, fair), where n is the number of devices listed, and ``fair`` the
    largest fair share that the device had in a run. ``evicted`` counts how often shadow replicas
    named it, ``screened`` the wrong results of screenings, and ``last_s`` is its latest event, in
    seconds since 1970.
    """

    host: str
    place: int
    runs: int = 0
    faults: int = 0
    of: int = 0
    compared: int = 0
    compared_of: int = 0
    fair: float = 0.0
    chance: float = 1.0
    evicted: int = 0
    screened: int = 0
    last_s: float = 0.0

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
    found: dict[Unit, History] = {}
    for events in _runs(run_dirs):
        faults = Faults()
        faults.take(events)
        own = faults.own()
        total = sum(own.values())
        ranks = max([len(own), *(1 + event.rank for event in events)])
        for unit, count in own.items():
            each = found.setdefault(unit, History(*unit))
            each.runs, each.faults, each.of = each.runs + 1, each.faults + count, each.of + total
            if ranks > 1:
                each.compared, each.compared_of = each.compared + count, each.compared_of + total
                each.fair = max(each.fair, 1 / ranks)
        for event in (event for event in events if event.rank >= 0):
            each = found[event.host, event.rank % faults.ranks_of(event.host)]
            each.last_s = max(each.last_s, event.time_s)
            each.evicted += event.kind == EventKind.EVICT
            each.screened += event.kind == EventKind.SCREEN_FAULT
    for each in found.values():
        tail = tail_of(each.compared, each.compared_of, each.fair or 1.0)
        each.chance = min(1.0, len(found) * tail)
    return sorted(found.values(), key=lambda each: (not each.stands_out, each.chance, -each.faults))


def _runs(run_dirs: Iterable[Path]) -> Iterable[list[Event]]:
    """Yield the events of each run, also of earlier runs whose ledgers were set aside."""
    stem, _, suffix = LEDGER_NAME.partition(".")
    for run_dir in run_dirs:
        if not run_dir.is_dir() or not sources.is_run(run_dir):
            raise ConfigError(f"{run_dir} holds no run: give the directory of one")
        yield list(sources.Ledgers(run_dir).read())
        for path in sorted(run_dir.glob(f"{stem}-*.{suffix}")):
            yield [event for _, event in read_ledger(path)]
