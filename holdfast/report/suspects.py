"""Devices and ops with repeated faults, and how likely so many would be by chance."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import exp, lgamma, log, log1p, nan

from holdfast.events import Event, EventKind, Role
from holdfast.inject.statistics import CONFIDENCE, Rate
from holdfast.report.kinds import role_of


@dataclass(frozen=True)
class Suspect:
    """One device or op and its faults.

    Different (step, rank, op) count as different faults: ``faults`` of ``of`` were found here.
    ``low`` and ``high`` are Wilson's 95 % interval of that share, ``rate_low`` and ``rate_high``
    that of the share of all steps in which this unit had a fault. ``fair`` is each unit's share if
    none is worse than another, and ``chance`` bounds the probability that any of equal units has so
    many. Both are NaN for ops, which differ in the work they do.
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
    """The places that were found wrong, by device and by op; a repeated finding counts once."""

    def __init__(self) -> None:
        self.devices: defaultdict[tuple[int, str], set[Found]] = defaultdict(set)
        self.units: defaultdict[tuple[int, str], set[str]] = defaultdict(set)
        self.ops: defaultdict[str, set[Found]] = defaultdict(set)

    def take(self, events: Iterable[Event]) -> None:
        """Count events; a rank is listed from its first event on, even if that is no fault."""
        for event in events:
            if event.rank < 0:
                continue
            found = self.devices[event.rank, event.host]
            # Other events of a step do not name the device that computed something.
            if event.op or event.kind == EventKind.SHADOW_MISMATCH:
                self.units[event.rank, event.host].add(event.device)
            if is_located(event):
                # A repeated step and the fault that an op reported in it count as one.
                found.add(
                    (event.step, event.rank, event.op if event.kind != EventKind.RERUN else "")
                )
                if event.op:
                    self.ops[event.op].add((event.step, event.rank, event.op))

    def by_device(self, *, steps: int, ranks: int) -> list[Suspect]:
        """Rank devices by their share of the faults, in a run of ``ranks`` with ``steps`` done."""
        found = {
            self._name(*unit): _without_repeats(places) for unit, places in self.devices.items()
        }
        return _ranked(found, steps, max(ranks, len(found)), comparable=True)

    def _name(self, rank: int, host: str) -> str:
        devices = ", ".join(sorted(self.units[rank, host]))
        return f"rank {rank} on {host or 'an unknown host'}" + (f" ({devices})" if devices else "")

    def by_op(self, *, steps: int) -> list[Suspect]:
        """Rank ops by their share of the faults that were found in ops."""
        return _ranked(dict(self.ops), steps, len(self.ops), comparable=False)


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
    if count * units <= total or units == 1:
        return 1.0
    fair = 1 / units
    logarithm = lgamma(total + 1) - lgamma(count + 1) - lgamma(total - count + 1)
    term = exp(logarithm + count * log(fair) + (total - count) * log1p(-fair))
    tail = 0.0
    # Above the mean each term is smaller than the one before.
    for place in range(count, total + 1):
        tail += term
        if term <= tail * _NEGLIGIBLE:
            break
        term *= (total - place) / (place + 1) * fair / (1 - fair)
    return min(1.0, units * tail)


def _ranked(
    found: dict[str, set[Found]], steps: int, units: int, *, comparable: bool
) -> list[Suspect]:
    total = sum(map(len, found.values()))
    if not total:
        return []
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    suspects = []
    for name, places in ranked:
        count, hit = len(places), len({step for step, _, _ in places})
        interval, rate = Rate(count, total).interval, Rate(hit, max(steps, hit)).interval
        fair = 1 / units if comparable else nan
        chance = chance_of(count, total, units) if comparable else nan
        suspects.append(Suspect(name, count, total, *interval, fair, hit, *rate, chance))
    return suspects
