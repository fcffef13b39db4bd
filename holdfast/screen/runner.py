"""Runs a screening: a worker a unit, one judge, and no wait without a bound."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.memory import available_bytes
from holdfast.screen import members as crew
from holdfast.screen.difference import differences
from holdfast.screen.emulation import ANY, Emulated
from holdfast.screen.judge import FINDERS, Judge
from holdfast.screen.members import Member
from holdfast.screen.observation import (
    Done,
    Failed,
    Message,
    Observation,
    Order,
    Ready,
    Result,
    Round,
)
from holdfast.screen.references import (
    Reference,
    cached,
    check_storable,
    digests_for,
    load_references,
    make_reference,
    reference_path,
    save_references,
)
from holdfast.screen.units import Unit, default_memory_bytes, quota_cores
from holdfast.screen.verdict import HEALTHY, Trouble, UnitWork, Verdict
from holdfast.screen.workloads import op_names

Progress = Callable[[float, str], None]
_LEAST_MEMORY_BYTES = 1 << 20
_LOADED = 0.8  # of a core's time: less is said
_MOST_QUESTIONS = 64  # pairs of results that are compared bit by bit at the end


@dataclass(frozen=True)
class Request:
    """What is to be screened, and how.

    Args:
        units: each gets a worker; seconds: how long they work; rounds: instead of seconds, so many
            of all workloads.
        scale: "full", or "small" for tests; memory_bytes: that each unit walks over.
        finders: of ``FINDERS``, those that count.
        reference: a file of stored references that must fit; None takes the user's own.
        store: where the references of a healthy screening are written; the user's own are kept too.
        need: fewer units are not enough.
        stop_at_first: end with the first wrong result.
        faults: emulated ones.
    """

    units: Sequence[Unit]
    seconds: float = 30.0
    rounds: int | None = None
    scale: str = "full"
    memory_bytes: int | None = None
    finders: Sequence[str] = FINDERS
    reference: Path | None = None
    store: Path | None = None
    need: int = 1
    stop_at_first: bool = False
    faults: Sequence[Emulated] = field(default_factory=tuple)

    def check(self) -> None:
        """Refuse what cannot be, before anything is started.

        Raises:
            ConfigError: with the value and what would do.
        """
        if not self.seconds > 0:
            raise ConfigError(f"--for {self.seconds:g} s: give a time above 0, e.g. 30s or 5m")
        if self.rounds is not None and self.rounds < 2:
            raise ConfigError(f"--rounds {self.rounds}: give at least 2, as each repeats the first")
        if not self.finders:
            raise ConfigError("--without leaves no finder: nothing could be found")
        if self.reference is not None and "reference" not in self.finders:
            raise ConfigError(f"--reference {self.reference} and --without reference: drop one")
        if self.store is not None:
            check_storable(self.store)
        self._check_faults()
        self._check_memory()

    def _check_faults(self) -> None:
        names = [unit.name for unit in self.units]
        for fault in self.faults:
            if fault.unit not in names:
                raise ConfigError(f"--emulate unit={fault.unit}: units are {', '.join(names)}")
            device = next(unit.device for unit in self.units if unit.name == fault.unit)
            ops = [ANY, *op_names(device.split(":")[0])]
            if fault.op not in ops:
                raise ConfigError(f"--emulate op={fault.op}: ops are {', '.join(ops)}")

    def _check_memory(self) -> None:
        memory, free = self.memory_of_each, available_bytes()
        if memory < _LEAST_MEMORY_BYTES:
            raise ConfigError(f"--memory {memory} B: give at least 1MiB for each unit")
        if memory * len(self.units) > free:
            raise ConfigError(
                f"--memory {memory >> 20}MiB for each of {len(self.units)} units is more than the "
                f"{free >> 20} MiB that are free: give less"
            )

    @property
    def memory_of_each(self) -> int:
        """Bytes that a unit walks over."""
        return self.memory_bytes or default_memory_bytes(self.units)


def screen(
    request: Request,
    *,
    on_progress: Progress = lambda *_: None,
    on_started: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> Verdict:
    """Load every unit, repeat, compare; say which is wrong, or that none is.

    Args:
        on_progress: called with the share done and a line; on_started: with the workers' pids by
            unit, once all work.

    Guarantees: a result that differs in any bit from the unit's first one, from a stored reference
    or from most other units' is found, as far as these finders are on; no process outlives the
    call; every wait is bounded by ``HOLDFAST_TIMEOUT_S``. Not covered: faults that no workload
    meets while it runs, and those that all units share.

    Raises:
        ConfigError: the request cannot be carried out, or a given reference does not fit.
    """
    request.check()
    if len(request.units) < request.need:
        return _too_few(request)
    with closing(_Screening(request, on_progress)) as screening:
        screening.prepare()
        on_started({member.unit.name: member.pid for member in screening.alive})
        return screening.run()


def _too_few(request: Request) -> Verdict:
    what = f"{len(request.units)} units are here and {request.need} are needed"
    troubles = [Trouble("this machine", what)]
    return Verdict([], troubles, [], {}, 0.0, request.memory_of_each)


class _Screening:
    """One screening while it runs."""

    def __init__(self, request: Request, on_progress: Progress) -> None:
        self._request, self._on_progress = request, on_progress
        faults, memory = tuple(request.faults), request.memory_of_each
        orders = [
            Order(unit, request.scale, memory, request.rounds, faults) for unit in request.units
        ]
        self._members = crew.start(orders)
        self.alive = list(self._members)
        self._troubles: list[Trouble] = []
        self._notes: list[str] = []
        self._settings: dict[str, Mapping[str, str]] = {}
        self._work = {unit.name: UnitWork(unit) for unit in request.units}
        self._started_s = 0.0
        self._stopping = False

    def close(self) -> None:
        """End every worker."""
        crew.end(self._members)

    def prepare(self) -> None:
        """Wait until every worker is pinned and has its inputs; find the references."""
        settings: dict[str, Mapping[str, str]] = {}

        def ready(member: Member, message: Message) -> bool:
            if isinstance(message, Ready):
                settings[member.unit.name] = message.settings
            return True

        self._hear(ready)
        units = _by_kind(self._request.units, settings)
        self._settings = {unit.kind: settings[unit.name] for unit in units}
        self._work |= {unit.name: UnitWork(unit) for unit in units}
        self._units = units
        self._judge = Judge(units, self._references(), self._request.finders)

    def _references(self) -> dict[str, dict[str, str]]:
        if "reference" not in self._request.finders:
            return {}
        if self._request.reference is not None:
            stored = load_references(self._request.reference)
            return digests_for(stored, self._settings, self._request.reference)
        found, notes = cached(self._settings)
        self._notes += notes
        self._notes += [
            f"no stored reference for {kind}: results are compared with each other only"
            for kind in self._settings
            if kind not in found
        ]
        return found

    def run(self) -> Verdict:
        """Give the go-ahead, and judge until all are done."""
        self._started_s = time.monotonic()
        deadline_s = self._started_s + self._request.seconds
        if self._request.rounds is not None:
            deadline_s = float("inf")
        latest_s = deadline_s + max(self._request.seconds, config.timeout_s())
        for member in self.alive:
            member.send((deadline_s, latest_s))
        self._hear(self._take)
        seconds = time.monotonic() - self._started_s
        self._explain()
        return self._conclude(seconds)

    def _hear(self, take: Callable[[Member, Message], bool]) -> None:
        """Listen until ``take`` has said of every member that it is done, or it is lost."""
        waiting = list(self.alive)
        for member in waiting:
            member.heard_s = time.monotonic()
        while waiting:
            for member in crew.listen(waiting):
                message = member.receive()
                if message is None:
                    self._lose(member, member.death())
                elif isinstance(message, Failed):
                    self._lose(member, Trouble(member.unit.name, message.reason, message.odd))
                elif not take(member, message):
                    continue
                waiting.remove(member)
            for member in list(waiting):
                trouble = member.silence(config.timeout_s())
                if trouble is not None:
                    self._lose(member, trouble)
                    waiting.remove(member)

    def _lose(self, member: Member, trouble: Trouble) -> None:
        self._troubles.append(trouble)
        self.alive.remove(member)

    def _take(self, member: Member, message: Message) -> bool:
        elapsed_s = time.monotonic() - self._started_s
        if isinstance(message, Observation):
            member.last_op = message.op
            self._work[message.unit].take(message)
            if self._judge.observe(message, elapsed_s) and self._request.stop_at_first:
                self._stop()
        elif isinstance(message, Round):
            self._work[member.unit.name].take(message)
            self._show(elapsed_s)
        return isinstance(message, Done)

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            for member in self.alive:
                member.send("stop")

    def _show(self, elapsed_s: float) -> None:
        least = min(work.rounds for work in self._work.values())
        share = (
            least / self._request.rounds
            if self._request.rounds
            else (elapsed_s / self._request.seconds)
        )
        compared = self._judge.comparisons.total()
        self._on_progress(min(1.0, share), f"{least} rounds, {compared:,} comparisons")

    def _explain(self) -> None:
        """Ask the wrong and a right unit for their results, and compare them bit by bit."""
        members = {member.unit.name: member for member in self.alive}
        for wrong, op, variant, right in self._judge.unexplained()[:_MOST_QUESTIONS]:
            if wrong in members and right in members:
                results = [self._ask(members[name], op, variant) for name in (right, wrong)]
                if results[0] is not None and results[1] is not None:
                    found = differences(results[0].parts, results[1].parts)
                    self._judge.explain(wrong, op, variant, found)

    def _ask(self, member: Member, op: str, variant: int) -> Result | None:
        member.send((op, variant))
        if not member.pipe.poll(config.timeout_s()):
            return None
        answer = member.receive()
        return answer if isinstance(answer, Result) else None

    def _conclude(self, seconds: float) -> Verdict:
        lost = {trouble.unit for trouble in self._troubles}
        short = [
            Trouble(unit.name, "did not compute every workload twice: give it more time")
            for unit in self._units
            if unit.name not in lost and not self._stopping and not self._judge.repeated(unit.name)
        ]
        verdict = Verdict(
            findings=self._judge.findings(),
            troubles=_not_shared(self._troubles, len(self._request.units)) + short,
            work=list(self._work.values()),
            comparisons=self._judge.comparisons,
            seconds=seconds,
            memory_bytes=self._request.memory_of_each,
            emulated=bool(self._request.faults),
        )
        if verdict.state == HEALTHY and not verdict.emulated:
            self._keep()
        return replace(verdict, notes=(*self._notes, *self._said_of_units(), *self._said_of_load()))

    def _keep(self) -> None:
        """Store what all units agreed on, where it was asked for and among the user's own."""
        kinds = {kind: [u for u in self._units if u.kind == kind] for kind in self._settings}
        made = {
            kind: make_reference(self._settings[kind], len(units), self._judge.agreed(kind))
            for kind, units in kinds.items()
        }
        if self._request.store is not None:
            save_references(made, self._request.store)
            alone = [kind for kind, reference in made.items() if reference.units == 1]
            self._notes.append(f"references stored in {self._request.store}")
            self._notes += [
                f"{kind}: stored by one unit alone, nothing else says that it is right"
                for kind in alone
            ]
        if "reference" in self._request.finders and self._request.reference is None:
            self._keep_own(made)

    def _keep_own(self, made: Mapping[str, Reference]) -> None:
        for kind, reference in made.items():
            path = reference_path(reference.settings)
            # A lone unit may be wrong each time: its results are no reference for itself.
            if reference.units < 2 or "comparison" not in self._request.finders or path.exists():
                continue
            try:
                save_references({kind: reference}, path)
                self._notes.append(f"{kind}: kept as the reference of later screenings: {path}")
            except ConfigError as error:
                self._notes.append(f"the reference is not kept: {error}")

    def _said_of_units(self) -> list[str]:
        kinds = [unit.kind for unit in self._units]
        return [
            f"{unit.name}: no other unit of its kind is here to compare its results with"
            for unit in self._units
            if kinds.count(unit.kind) == 1
        ]

    def _said_of_load(self) -> list[str]:
        quota, cores = quota_cores(), sum(unit.core is not None for unit in self._units)
        told = [
            f"{work.unit.name} got {work.utilisation:.0%} of its core's time: other work runs on "
            "it, and fewer operations were done than the time would allow"
            for work in self._work.values()
            if work.unit.core is not None and work.utilisation < _LOADED
        ]
        if quota is None or quota >= cores:
            return told
        return [
            *told,
            f"the control group allows {quota:g} cores' time to {cores} cores: they were loaded "
            "in turn, not all at once",
        ]


def _by_kind(units: Sequence[Unit], settings: Mapping[str, Mapping[str, str]]) -> list[Unit]:
    """The units that are ready; those of one kind with other settings are a kind of their own."""
    known: dict[str, list[Mapping[str, str]]] = {}
    told = []
    for unit in units:
        if unit.name not in settings:
            continue
        variants = known.setdefault(unit.kind, [])
        if settings[unit.name] not in variants:
            variants.append(settings[unit.name])
        number = variants.index(settings[unit.name])
        told.append(replace(unit, kind=f"{unit.kind} {number + 1}") if number else unit)
    return told


def _not_shared(troubles: Sequence[Trouble], units: int) -> list[Trouble]:
    """What all units have in common is no unit's fault."""
    if units > 1 and len({trouble.unit for trouble in troubles}) == units:
        return [replace(trouble, suspicious=False) for trouble in troubles]
    return list(troubles)
