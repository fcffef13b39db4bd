"""Devices and ops with repeated faults, and how likely so many would be by chance."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import exp, lgamma, log, log1p, nan

from holdfast.events import Event, EventKind, Role
from holdfast.inject.statistics import CONFIDENCE, Rate
from holdfast.report.kinds import CAME_BACK, role_of


@dataclass(frozen=True)
class Suspect:
    """One device or op and its faults.

    Different (step, rank, op) count as different faults: ``faults`` of ``of`` were found here.
    ``low`` and ``high`` are Wilson's 95 % interval of that share, ``rate_low`` and ``rate_high``
    that of the share of all steps in which this unit had a fault. ``fair`` is each unit's share if
    none is worse than another, and ``chance`` bounds the probability that any of equal units has so
    many; faults that the injector made do not count in it. Both are NaN for ops, which differ in
    the work they do.
    """

    name: str
    faults: int
    of: int
    low: float
    high: float
    fair: float
    steps: int
    rate_low: float
    rate_high: float
    chance: float

    @property
    def share(self) -> float:
        """The unit's share of all faults."""
        return self.faults / self.of

    @property
    def stands_out(self) -> bool:
        """True if the unit is worse than the others, at 95 % confidence."""
        return self.chance < 1 - CONFIDENCE

    def as_dict(self) -> dict[str, object]:
        """Return the suspect as plain values."""
        return {**asdict(self), "share": self.share, "stands_out": self.stands_out}


Found = tuple[int, int, str]  # step, rank, op
Unit = tuple[str, int]  # host, place among the ranks of this host
_NEGLIGIBLE = 1e-12


def is_located(event: Event) -> bool:
    """Return whether an event says that this rank itself computed something wrong.

    A repeated step counts where the rank's own loss changed, because all ranks share the gradients.
    Findings of a screening belong to no step.
    """
    if event.kind == EventKind.SCREEN_FAULT and not event.detail.get("emulated"):
        return event.rank >= 0
    if event.kind == EventKind.RERUN:
        return bool(event.detail.get("loss_differed"))
    return role_of(event) is Role.FOUND and event.rank >= 0 and event.step >= 0


class Faults:
    """The places that were found wrong, by device and by op; a repeated finding counts once.

    A device is a place on a host, among the ranks that run there at the same time. It stays the
    same where a restart deals the ranks anew, because torchrun gives each host consecutive ranks.
    """

    def __init__(self) -> None:
        self.devices: defaultdict[Unit, set[Found]] = defaultdict(set)
        self.ops: defaultdict[str, set[Found]] = defaultdict(set)
        self._injected: set[tuple[int, int]] = set()  # step and rank
        self._ranks: defaultdict[Unit, set[int]] = defaultdict(set)
        self._names: defaultdict[Unit, set[str]] = defaultdict(set)
        self._sizes: dict[str, int] = {}

    def take(self, events: Iterable[Event]) -> None:
        """Count all events of a run; a device is listed from its first event on."""
        ordered = sorted((e for e in events if e.rank >= 0), key=lambda event: event.time_s)
        self._sizes = sizes = _ranks_by_host(ordered)
        for event in ordered:
            unit = event.host, event.rank % sizes[event.host]
            found = self.devices[unit]
            self._ranks[unit].add(event.rank)
            # Other events of a step do not name the device that computed something.
            if event.op or event.kind == EventKind.SHADOW_MISMATCH:
                self._names[unit].add(event.device)
            if event.kind == EventKind.INJECTED:
                self._injected.add((event.step, event.rank))
            if is_located(event):
                # A repeated step and the fault that an op reported in it count as one.
                found.add(
                    (event.step, event.rank, event.op if event.kind != EventKind.RERUN else "")
                )
                if event.op:
                    self.ops[event.op].add((event.step, event.rank, event.op))

    def by_device(self, *, steps: int, ranks: int) -> list[Suspect]:
        """Rank devices by their share of the faults, in a run of ``ranks`` with ``steps`` done."""
        found = {self._name(unit): _without_repeats(here) for unit, here in self.devices.items()}
        own = {
            name: {place for place in here if place[:2] not in self._injected}
            for name, here in found.items()
        }
        return _ranked(found, steps, 1 / ranks, _chances(own, ranks))

    def ranks_of(self, host: str) -> int:
        """Return the number of ranks that a host had at the same time, at least 1."""
        return self._sizes.get(host, 1)

    def own(self) -> dict[Unit, int]:
        """Count the faults of each device that the injector did not make."""
        return {
            unit: sum(place[:2] not in self._injected for place in _without_repeats(here))
            for unit, here in self.devices.items()
        }

    def _name(self, unit: Unit) -> str:
        ranks = ", ".join(map(str, sorted(self._ranks[unit])))
        names = ", ".join(sorted(self._names[unit]))
        many = "s" * (len(self._ranks[unit]) > 1)
        return f"rank{many} {ranks} on {unit[0] or 'an unknown host'}" + (
            f" ({names})" if names else ""
        )

    def by_op(self, *, steps: int) -> list[Suspect]:
        """Rank ops by their share of the faults that were found in ops."""
        return _ranked(dict(self.ops), steps)


def _ranks_by_host(ordered: Iterable[Event]) -> dict[str, int]:
    """Return the number of ranks that each host had at the same time.

    A restart begins where ranks report, outside of steps, that their state is back. All of them do
    so before any of them goes on with a step.
    """
    sizes: dict[str, int] = {}
    now: defaultdict[str, set[int]] = defaultdict(set)
    back: set[tuple[int, str]] = set()
    stepped = False
    for event in ordered:
        if event.kind in CAME_BACK and event.step < 0:
            if stepped or (event.rank, event.kind) in back:
                now.clear()
                back.clear()
            back.add((event.rank, event.kind))
        stepped = event.step >= 0
        now[event.host].add(event.rank)
        span = max(now[event.host]) - min(now[event.host]) + 1
        sizes[event.host] = max(span, sizes.get(event.host, 1))
    return sizes


def _without_repeats(places: set[Found]) -> set[Found]:
    told = {(step, rank) for step, rank, op in places if op}
    return {place for place in places if place[2] or place[:2] not in told}


def chance_of(count: int, total: int, units: int) -> float:
    """Return a bound of the probability that any of n equal units has at least k of N faults.

    ``min(1, n · P(X ≥ k))`` with X ~ Binomial(N, 1/n). It is exact but for the union over the units
    (Bonferroni), also for few faults and many units, where Wilson's interval is too short.
    """
    if not 0 <= count <= total or units < 1:
        raise ValueError(f"{count} of {total} faults on one of {units} units is not possible")
    return min(1.0, units * tail_of(count, total, 1 / units))


def tail_of(count: int, total: int, fair: float) -> float:
    """Return P(X ≥ count) with X ~ Binomial(total, fair); 1 at or below the mean."""
    if count <= total * fair or fair >= 1.0:
        return 1.0
    logarithm = lgamma(total + 1) - lgamma(count + 1) - lgamma(total - count + 1)
    term = exp(logarithm + count * log(fair) + (total - count) * log1p(-fair))
    tail = 0.0
    # Above the mean each term is smaller than the one before.
    for place in range(count, total + 1):
        tail += term
        if term <= tail * _NEGLIGIBLE:
            break
        term *= (total - place) / (place + 1) * fair / (1 - fair)
    return tail


def _chances(found: dict[str, set[Found]], units: int) -> dict[str, float]:
    """Return by device the chance that any of equal devices has so many faults.

    At any time ``units`` devices work. A device that was replaced did less than its share, so that
    each of those that were found is taken for one that did all of it.
    """
    total, more = sum(map(len, found.values())), max(1.0, len(found) / units)
    return {
        name: min(1.0, more * chance_of(len(here), total, units)) for name, here in found.items()
    }


def _ranked(
    found: dict[str, set[Found]],
    steps: int,
    fair: float = nan,
    chances: Mapping[str, float] | None = None,
) -> list[Suspect]:
    total = sum(map(len, found.values()))
    if not total:
        return []
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    suspects = []
    for name, places in ranked:
        count, hit = len(places), len({step for step, _, _ in places})
        interval, rate = Rate(count, total).interval, Rate(hit, max(steps, hit)).interval
        chance = chances[name] if chances else nan
        suspects.append(Suspect(name, count, total, *interval, fair, hit, *rate, chance))
    return suspects
