"""The runner of a screening, which starts a worker for each unit and judges their results."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.memory import available_bytes
from holdfast.screen import collectives, worker_handle
from holdfast.screen.difference import Parts, differences
from holdfast.screen.emulation import ANY, Emulated
from holdfast.screen.job import SCALES
from holdfast.screen.judge import FINDERS, Finding, Judge
from holdfast.screen.messages import (
    Done,
    Meet,
    Message,
    Met,
    Observation,
    Order,
    Ready,
    Result,
    Round,
    Trouble,
)
from holdfast.screen.references import (
    Reference,
    cached,
    check_storable,
    digests_for,
    load_references,
    reference_path,
    save_references,
)
from holdfast.screen.units import Unit, default_memory_bytes, quota_cores
from holdfast.screen.verdict import HEALTHY, UnitWork, Verdict
from holdfast.screen.worker_handle import WorkerHandle
from holdfast.screen.workloads import op_names

Progress = Callable[[float, str], None]
_LEAST_MEMORY_BYTES = 1 << 20
_LOADED = 0.8  # a note is given if a unit got a smaller share of its core's time
_MOST_QUESTIONS = 64  # pairs of results that are compared bit by bit at the end


@dataclass(frozen=True)
class Request:
    """The settings of a screening.

    Args:
        units: The units, each of which gets a worker.
        seconds: Time for which they work.
        rounds: Number of rounds of all workloads, instead of a time.
        scale: Sizes of the workloads, "full", or "small" for tests.
        memory_bytes: Memory that each unit fills with patterns; by default more than the cache.
        finders: The methods of ``FINDERS`` that are used.
        reference: File of stored references, which must hold for this machine; by default the
            user's cache is used.
        store: File into which the references of a healthy screening are written, beside the
            user's cache.
        need: Smallest number of units; with fewer the verdict is "unable".
        stop_at_first: True to end with the first wrong result.
        faults: Emulated faults.
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
        """Check all settings before anything is started.

        Raises:
            ConfigError: A setting cannot be used; the message gives its value and valid ones.
        """
        if not self.seconds > 0:
            raise ConfigError(f"--for {self.seconds:g} s: give a time above 0, e.g. 30s or 5m")
        if self.rounds is not None and self.rounds < 2:
            raise ConfigError(f"--rounds {self.rounds}: give at least 2, as each repeats the first")
        if not self.finders:
            raise ConfigError("--without leaves no finder: nothing could be found")
        if self.reference is not None and "reference" not in self.finders:
            raise ConfigError(f"--reference {self.reference} and --without reference: drop one")
        if self.reference is not None:
            load_references(self.reference)  # before any worker is started
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
            ops = [ANY, *op_names(device.split(":")[0]), *collectives.OPS]
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
        """Memory in bytes that each unit fills with patterns."""
        if self.memory_bytes is None:
            return default_memory_bytes(self.units)
        return self.memory_bytes


def screen(
    request: Request,
    *,
    on_progress: Progress = lambda *_: None,
    on_started: Callable[[Mapping[str, int]], None] = lambda _: None,
) -> Verdict:
    """Load every unit with the same workloads, compare all results, and return the verdict.

    Args:
        request: The settings.
        on_progress: Called with the share that is done, from 0 to 1, and a line of text.
        on_started: Called with the process identifiers of the workers by unit, once all work.

    Guarantees: a result that differs in any bit from the unit's first one, from a stored reference
    or from most other units' is found, if the request uses these methods. No process outlives the
    call. Every wait is bounded by ``HOLDFAST_TIMEOUT_S``. Not covered: faults that no workload
    meets while it runs, and faults that all units share.

    Raises:
        ConfigError: The request cannot be carried out, or its reference does not hold here.
    """
    request.check()
    if len(request.units) < request.need:
        what = f"{len(request.units)} units are here and {request.need} are needed"
        return Verdict([], [Trouble("this machine", what)], [], {}, 0.0, request.memory_of_each)
    with closing(_Screening(request, on_progress)) as screening:
        screening.prepare()
        on_started({worker.unit.name: worker.pid for worker in screening.alive})
        return screening.run()


class _Screening:
    """A running screening."""

    def __init__(self, request: Request, on_progress: Progress) -> None:
        self._request, self._on_progress = request, on_progress
        faults, memory = tuple(request.faults), request.memory_of_each
        orders = [
            Order(unit, request.scale, memory, request.rounds, faults) for unit in request.units
        ]
        self._workers = worker_handle.start(orders)
        self.alive = list(self._workers)
        self._units = list(request.units)
        self._troubles: list[Trouble] = []
        self._notes: list[str] = []
        self._settings: dict[str, Mapping[str, str]] = {}
        self._work = {unit.name: UnitWork(unit) for unit in request.units}
        self._started_s = 0.0
        self._stopping = False
        self._between: list[Finding] = []  # of the collective test
        self._failed: list[Trouble] = []

    def close(self) -> None:
        """End every worker."""
        worker_handle.end(self._workers)

    def prepare(self) -> None:
        """Wait until every worker is ready, and load the references."""
        settings: dict[str, Mapping[str, str]] = {}

        def ready(worker: WorkerHandle, message: Message) -> bool:
            if isinstance(message, Ready):
                settings[worker.unit.name] = message.settings
            return True

        self._receive(ready)
        self._units = _by_kind(self._units, settings)
        self._settings = {unit.kind: settings[unit.name] for unit in self._units}
        self._work |= {unit.name: UnitWork(unit) for unit in self._units}
        self._judge = Judge(self._units, self._references(), self._request.finders)

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
        """Start the work, judge the results until all workers are done, return the verdict."""
        self._started_s = time.monotonic()
        deadline_s = self._started_s + self._request.seconds
        if self._request.rounds is not None:
            deadline_s = float("inf")
        latest_s = deadline_s + max(self._request.seconds, config.timeout_s())
        for worker in self.alive:
            worker.send((deadline_s, latest_s))
        self._receive(self._take)
        seconds = time.monotonic() - self._started_s
        self._explain()
        if "collective" in self._request.finders and not self._stopping and len(self.alive) > 1:
            self._meet()
        return self._conclude(seconds)

    def _receive(self, take: Callable[[WorkerHandle, Message], bool]) -> None:
        """Pass messages to ``take`` until it has returned True for every worker that is left."""
        waiting = list(self.alive)
        for worker in waiting:
            worker.heard_s = time.monotonic()
        while waiting:
            for worker in worker_handle.listen(waiting):
                message = worker.receive()
                if message is None or isinstance(message, Trouble):
                    self._lose(worker, message or worker.death())
                elif not take(worker, message):
                    continue
                waiting.remove(worker)
            for worker in list(waiting):
                trouble = worker.silence(config.timeout_s())
                if trouble is not None:
                    self._lose(worker, trouble)
                    waiting.remove(worker)

    def _lose(self, worker: WorkerHandle, trouble: Trouble) -> None:
        self._troubles.append(trouble)
        self.alive.remove(worker)

    def _take(self, worker: WorkerHandle, message: Message) -> bool:
        """Process a message while units work; return whether the worker is done."""
        elapsed_s = time.monotonic() - self._started_s
        if isinstance(message, Observation):
            worker.last_op = message.op
            self._work[message.unit].take(message)
            if self._judge.observe(message, elapsed_s) and self._request.stop_at_first:
                self._stop()
        elif isinstance(message, Round):
            self._work[worker.unit.name].take(message)
            self._show(elapsed_s)
        return isinstance(message, Done)

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            for worker in self.alive:
                worker.send("stop")

    def _show(self, elapsed_s: float) -> None:
        least, rounds = min(work.rounds for work in self._work.values()), self._request.rounds
        share = least / rounds if rounds else elapsed_s / self._request.seconds
        compared = self._judge.comparisons.total()
        self._on_progress(min(1.0, share), f"{least} rounds, {compared:,} comparisons")

    def _explain(self) -> None:
        """Request the results of wrong and right units, and compare them bit by bit."""
        workers = {worker.unit.name: worker for worker in self.alive}
        for wrong, op, variant, right in self._judge.missing_differences()[:_MOST_QUESTIONS]:
            if wrong in workers and right in workers:
                parts = [self._ask(workers[name], op, variant) for name in (right, wrong)]
                self._judge.explain(wrong, op, variant, differences(*parts))

    def _ask(self, worker: WorkerHandle, op: str, variant: int) -> Parts:
        """Return a worker's first result; it has no parts if the worker does not answer."""
        worker.send((op, variant))
        answer = worker.receive() if worker.pipe.poll(config.timeout_s()) else None
        return answer.parts if isinstance(answer, Result) else {}

    def _meet(self) -> None:
        """Let all workers run collectives with each other, and name the units with wrong data."""
        met: list[Met] = []
        names = tuple(worker.unit.name for worker in self.alive)
        piece = max(1, SCALES[self._request.scale].block_bytes // 4 // len(names))

        def take(_: WorkerHandle, message: Message) -> bool:
            met.extend([message] if isinstance(message, Met) else [])
            return True

        with TemporaryDirectory(prefix="holdfast-screen-") as folder:
            for rank, worker in enumerate(self.alive):
                worker.send(Meet(rank, names, f"{folder}/store", len(names) * piece))
            self._receive(take)
        found = [each for one in met for each in one.found]
        self._between = collectives.findings(found, names, time.monotonic() - self._started_s)
        self._judge.comparisons["collective"] += len(found)
        errors = [Trouble("the collective test", one.error) for one in met if one.error]
        self._failed = errors[:1]

    def _conclude(self, seconds: float) -> Verdict:
        lost = {trouble.unit for trouble in self._troubles}
        short = [
            Trouble(unit.name, "did not compute every workload twice: give it more time")
            for unit in self._units
            if unit.name not in lost and not self._stopping and not self._judge.repeated(unit.name)
        ]
        verdict = Verdict(
            findings=self._judge.findings() + self._between,
            troubles=_not_shared(self._troubles, len(self._request.units)) + short + self._failed,
            work=list(self._work.values()),
            comparisons=self._judge.comparisons,
            seconds=seconds,
            memory_bytes=self._request.memory_of_each,
            emulated=bool(self._request.faults),
        )
        if verdict.state == HEALTHY and not verdict.emulated:
            self._keep()
        return replace(verdict, notes=(*self._notes, *self._notes_at_end()))

    def _keep(self) -> None:
        """Store the digests that all units agree on, in the requested file and in the cache."""
        kinds = {kind: [u for u in self._units if u.kind == kind] for kind in self._settings}
        made = {
            kind: Reference(dict(self._settings[kind]), len(units), self._judge.agreed(kind))
            for kind, units in kinds.items()
        }
        if self._request.store is not None:
            save_references(made, self._request.store)
            self._notes.append(f"references stored in {self._request.store}")
            self._notes += [
                f"{kind}: stored by a single unit, without another one that confirms it"
                for kind, reference in made.items()
                if reference.units == 1
            ]
        if "reference" in self._request.finders and self._request.reference is None:
            self._keep_own(made)

    def _keep_own(self, made: Mapping[str, Reference]) -> None:
        for kind, reference in made.items():
            path = reference_path(reference.settings)
            # A single unit may be wrong every time, so that its results are no reference.
            if reference.units < 2 or "comparison" not in self._request.finders or path.exists():
                continue
            try:
                save_references({kind: reference}, path)
                self._notes.append(f"{kind}: kept as the reference of later screenings: {path}")
            except ConfigError as error:
                self._notes.append(f"the reference is not kept: {error}")

    def _notes_at_end(self) -> Iterator[str]:
        kinds = Counter(unit.kind for unit in self._units)
        for unit in self._units:
            if kinds[unit.kind] == 1:
                yield f"{unit.name}: no other unit of its kind is here to compare its results with"
        for work in self._work.values():
            if work.unit.core is not None and work.utilisation < _LOADED:
                yield (
                    f"{work.unit.name} got {work.utilisation:.0%} of its core's time: other work "
                    "runs on it, and fewer operations were done than the time would allow"
                )
        quota, cores = quota_cores(), sum(unit.core is not None for unit in self._units)
        if quota is not None and quota < cores:
            yield (
                f"the control group allows {quota:g} cores' time to {cores} cores: they were "
                "loaded in turn, not all at once"
            )


def _by_kind(units: Sequence[Unit], settings: Mapping[str, Mapping[str, str]]) -> list[Unit]:
    """Give units of one kind that have different settings different kinds, as they may differ."""
    known: dict[str, list[Mapping[str, str]]] = {}
    renamed = []
    for unit in (unit for unit in units if unit.name in settings):
        variants = known.setdefault(unit.kind, [])
        if settings[unit.name] not in variants:
            variants.append(settings[unit.name])
        number = variants.index(settings[unit.name])
        renamed.append(replace(unit, kind=f"{unit.kind} {number + 1}") if number else unit)
    return renamed


def _not_shared(troubles: Sequence[Trouble], units: int) -> list[Trouble]:
    """Remove the suspicion if all units are in trouble, as the cause is then not in a unit."""
    if units > 1 and len({trouble.unit for trouble in troubles}) == units:
        return [replace(trouble, suspicious=False) for trouble in troubles]
    return list(troubles)
