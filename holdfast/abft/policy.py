"""Handling of suspect results: counting, recording, repairing and escalating what was found.

An operator whose check fails does not repair, raise or count anything itself. It describes the call
in a :class:`FaultContext` and passes its findings, one after the other, to :func:`decide`:

- :class:`FalseAlarm`: suspect results that a second, stricter check found right; they are counted.
- :class:`SuspectInput`: an input with NaN, INF or extreme values; recorded once per step.
- :class:`Restored`: stored data (a checksum, a weight, a row) that was repaired; recorded.
- :class:`Repair`: a wrong result with a function that replaces it; applied and recorded, or
  escalated if the policy is to detect only.
- :class:`Damage`: data that contradict their checksum, with a function that diagnoses and repairs
  them; called, or escalated if the policy is to detect only.
- :class:`Unrepaired`: a fault that the operator cannot repair; escalated.

To escalate is to record the event and leave the fault to whoever is :func:`collecting` (the
``Guard``, which goes on to recompute the step), or else to raise ``UncorrectableFault``.

An error inside a check costs protection and not the training: :func:`report_failed_check` records
it once a site, unless the policy is strict.

Every protection has a :class:`Policy` of its own, found by the module that a product belongs to.
Products that belong to no module follow the latest protection in force, or the process's policy.
"""

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from holdfast import events
from holdfast.errors import HoldfastError, UncorrectableFault
from holdfast.events import EventKind
from holdfast.sites import SiteTuple, site_name

CORRECTIONS = ("recompute", "checksum", "detect")  # see ``protect``
CONVOLUTIONS = 0.125  # share of the calls of each convolution that are checked by default
RECOMPUTATIONS = 3  # computations of a result that keeps changing before it is given up

T = TypeVar("T")


@dataclass(eq=False)
class Policy:
    """The correction, one of ``CORRECTIONS``, that a protection applies to faults; its counters."""

    correction: str = "recompute"
    strict: bool = False  # raise errors inside checks
    convolutions: float = CONVOLUTIONS  # share of the calls of each convolution to check
    false_alarms: int = 0  # suspect results found right
    # The next number of a call of each convolution: no two threads are given the same one.
    convolution_calls: defaultdict[SiteTuple, Iterator[int]] = field(
        default_factory=lambda: defaultdict(itertools.count)
    )
    _failed: set[str] = field(default_factory=set)  # sites whose check failed
    _inputs_reported: set[tuple[int, str]] = field(default_factory=set)  # (step, kind)

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise ValueError(
                f"correction must be one of {', '.join(CORRECTIONS)}, got {self.correction!r}"
            )

    def first_failure(self, op: str) -> bool:
        """Return whether no failed check of this site was reported yet."""
        known = op in self._failed
        self._failed.add(op)
        return not known

    def first_in_step(self, kind: str) -> bool:
        """Return whether this kind of suspect input was not yet reported in the current step."""
        step = events.current_step()
        if step >= 0 and (step, kind) in self._inputs_reported:
            return False
        self._inputs_reported = {(s, k) for s, k in self._inputs_reported if s == step}
        self._inputs_reported.add((step, kind))
        return True


@dataclass(frozen=True)
class FaultContext:
    """The call of an operator whose check failed.

    Attributes:
        site: Site of the product in the program; for other operators their name in events.
        module: Number of the module whose policy decides if ``site`` is a name; 0 for no module.
        override: Correction that this operator uses in place of the policy's; empty for none.
        device: Device of the result.
        detector: Name of the check that failed.
        collectable: False if an unrepaired fault is always raised, even within ``collecting``.
        started_s: Time at which the check failed, on ``time.perf_counter``, in seconds.
    """

    site: SiteTuple | str
    module: int = 0
    override: str = ""
    device: str = "cpu"
    detector: str = "checksum"
    collectable: bool = True
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def op(self) -> str:
        """Name of the call's site, as used in events."""
        return site_name(self.site)

    @property
    def policy(self) -> Policy:
        """Policy of the module that the call belongs to."""
        return policy_of(self.module if isinstance(self.site, str) else self.site[0])

    @property
    def correction(self) -> str:
        """The correction to use for the call, one of ``CORRECTIONS``."""
        return self.override or self.policy.correction


@dataclass(frozen=True)
class FalseAlarm:
    """Suspect results that a second, stricter check found right."""

    count: int


@dataclass(frozen=True)
class SuspectInput:
    """An input with NaN, INF or extreme values, on which ``rows`` of the result depend."""

    kind: EventKind
    rows: int
    reason: str


@dataclass(frozen=True)
class Restored:
    """Stored data that did not match its checksum or fingerprint and was repaired."""

    kind: EventKind
    detail: dict[str, object]
    rung: str = "correct"


@dataclass(frozen=True)
class Repair:
    """A wrong result and the function that replaces it by the right one.

    Attributes:
        kind, detail, rung: Fields of the event to record.
        apply: Writes the right values.
        refusal: Reason for not using the result, if the policy is to detect only.
        refusal_detail: Further details of the event in that case.
    """

    kind: EventKind
    detail: dict[str, object]
    apply: Callable[[], object]
    refusal: str
    rung: str = "correct"
    refusal_detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Damage:
    """Data that contradict their checksum, with a function that finds the cause.

    Attributes:
        kind, reason, detail: Fields of the event to record if the policy is to detect only.
        mend: Repairs what it can, and returns its findings.
    """

    kind: EventKind
    reason: str
    mend: Callable[[], "Iterable[Finding]"]
    detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Unrepaired:
    """A fault that the operator cannot repair, and the reason."""

    kind: EventKind
    reason: str
    detail: dict[str, object] = field(default_factory=dict)


Finding = FalseAlarm | SuspectInput | Restored | Repair | Damage | Unrepaired
# Generator of an operator's findings. Each ``yield`` returns whether the result may be used: False
# if the finding was escalated and collected (see ``collecting``).
Findings = Generator[Finding, bool, None]


def decide(context: FaultContext, judge: Callable[[str], Findings]) -> None:
    """Count, record, repair or escalate each finding that ``judge`` yields for a correction.

    Raises:
        UncorrectableFault: A fault was not repaired, and no caller is ``collecting`` faults.
    """
    findings = judge(context.correction)
    try:
        finding = next(findings)
        while True:
            finding = findings.send(_settle(context, finding))
    except StopIteration:
        return


def decide_each(context: FaultContext, findings: Iterable[Finding]) -> bool:
    """Handle independent findings as ``decide`` does; return whether the result may be used."""
    settled = [_settle(context, finding) for finding in findings]
    return all(settled)


@contextmanager
def checking(context: FaultContext) -> Iterator[None]:
    """Report an error while a suspect result is judged; a ``Guard`` then repeats the step.

    Raises:
        HoldfastError: The judgement raised it, or the policy is strict.
    """
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        report_failed_check(context, repr(error))
        collector = _collector()
        if collector is not None:
            collector.suspect_inputs.add((EventKind.CHECK_FAILED, context.op))


def report_failed_check(context: FaultContext, error: str) -> None:
    """Record that a check failed, once for each site.

    Raises:
        HoldfastError: The policy is strict.
    """
    if context.policy.strict:
        raise HoldfastError(
            f"{context.op}: its check failed ({error}); without protect(strict=True) training "
            "goes on, and this result is not verified"
        )
    if context.policy.first_failure(context.op):
        report(context, EventKind.CHECK_FAILED, "", {"error": error})


def _settle(context: FaultContext, finding: Finding) -> bool:
    policy = context.policy
    match finding:
        case FalseAlarm(count):
            policy.false_alarms += count
        case SuspectInput():
            _report_suspect_input(context, finding)
        case Restored(kind, detail, rung):
            report(context, kind, rung, detail)
        case Repair() if context.correction == "detect":
            return _escalate(context, finding.kind, finding.refusal, finding.refusal_detail)
        case Repair():
            finding.apply()
            report(context, finding.kind, finding.rung, finding.detail)
        case Damage() if context.correction == "detect":
            return _escalate(context, finding.kind, finding.reason, finding.detail)
        case Damage():
            return decide_each(context, finding.mend())
        case Unrepaired(kind, reason, detail):
            return _escalate(context, kind, reason, detail)
    return True


def settle_by_recomputing(
    compute: Callable[[], T],
    sound: Callable[[T], bool],
    same: Callable[[T, T], bool],
    known: tuple[T, ...] = (),
    attempts: int = RECOMPUTATIONS,
) -> T | None:
    """Recompute until a result passes its check (``sound``) or repeats an earlier one bit for bit.

    ``known`` are the results so far, of which the last one is checked first. After ``attempts``
    further computations without success the result is None.
    """
    results = list(known)
    for left in range(attempts, -1, -1):
        if results:
            latest = results[-1]
            if any(same(latest, earlier) for earlier in results[:-1]) or sound(latest):
                return latest
        if left:
            results.append(compute())
    return None


def report(
    context: FaultContext, kind: EventKind, rung: str, detail: dict[str, object]
) -> events.Event:
    """Record a decision about a call as an event."""
    return events.record(
        kind,
        op=context.op,
        detector=context.detector,
        rung=rung,
        duration_s=time.perf_counter() - context.started_s,
        device=context.device,
        detail=detail,
    )


def _report_suspect_input(context: FaultContext, found: SuspectInput) -> None:
    # The collector gets every site; only the first of a step is recorded, as its values spread.
    collector = _collector()
    if collector is not None:
        collector.suspect_inputs.add((found.kind, context.op))
    if context.policy.first_in_step(found.kind):
        report(context, found.kind, "", {"rows": found.rows, "reason": found.reason})


def _escalate(
    context: FaultContext, kind: EventKind, reason: str, detail: dict[str, object]
) -> bool:
    event = report(context, kind, "", {"reason": reason} | detail)
    collector = _collector() if context.collectable else None
    if collector is None:
        where = ", ".join(filter(None, (f"rank {event.rank}", event.host, event.device)))
        raise UncorrectableFault(
            f"{event.op}: {reason} ({where}); the result must not be used: restore a snapshot or "
            "run under holdfast.Guard, and check this node"
        )
    collector.unrepaired.append(event)
    return False


@dataclass
class Collected:
    """Unrepaired faults and suspect inputs that ``collecting`` gathered."""

    unrepaired: list[events.Event] = field(default_factory=list)
    suspect_inputs: set[tuple[str, str]] = field(default_factory=set)  # (kind, site)


_collectors: list[tuple[int, Collected]] = []  # (thread, its collection), innermost last


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect unrepaired faults instead of raising them in the middle of a step.

    A rank that raised within a backward pass would leave the other ranks waiting in a collective,
    so the Guard finishes the step and then decides together with all ranks.

    Faults of this thread and of the autograd engine's threads are collected. Other threads do not
    work on this step, and a fault there is raised.
    """
    entry = threading.get_ident(), Collected()
    _collectors.append(entry)
    try:
        yield entry[1]
    finally:
        _collectors.remove(entry)


def is_collecting() -> bool:
    """Return whether an unrepaired fault of this thread would be collected and not raised."""
    return _collector() is not None


def _collector() -> Collected | None:
    if not _collectors:
        return None
    thread = threading.get_ident()
    own = [collected for of, collected in _collectors if of == thread]
    if own:
        return own[-1]
    # Threads of the autograd engine are not started by Python; their step is not known.
    foreign = isinstance(threading.current_thread(), threading._DummyThread)
    in_backward = foreign and torch._C._current_graph_task_id() != -1
    return _collectors[-1][1] if in_backward else None


process = Policy()  # policy of products that no active protection covers
# The policies in force, latest last: of all modules, and of each. The tuples are replaced, never
# changed, so that reading them needs no lock.
_in_force: tuple[Policy, ...] = ()
_of_module: dict[int, tuple[Policy, ...]] = {}
_lock = threading.Lock()


def put_in_force(policy: Policy, modules: Iterable[int]) -> None:
    """Make a policy decide about faults in these modules (keys of ``sites.module_names``)."""
    global _in_force
    with _lock:
        _in_force = (*_in_force, policy)
        for module in modules:
            _of_module[module] = (*_of_module.get(module, ()), policy)


def retire(policy: Policy, modules: Iterable[int]) -> None:
    """Remove a policy from modules to which ``put_in_force`` applied it."""
    global _in_force
    with _lock:
        _in_force = tuple(each for each in _in_force if each is not policy)
        for module in modules:
            left = tuple(each for each in _of_module[module] if each is not policy)
            if left:
                _of_module[module] = left
            else:
                del _of_module[module]


def policy_of(module: int) -> Policy:
    """Return the policy of a module; the latest one if several protections cover it."""
    candidates = _of_module.get(module) or _in_force or (process,)
    return candidates[-1]


def count_false_alarms(module: int, count: int) -> None:
    """Count suspect results that an operator's kernel itself found to be right."""
    policy_of(module).false_alarms += count


def set_correction(correction: str) -> None:
    """Set the correction, one of ``CORRECTIONS``, for products that no protection covers."""
    process.correction = Policy(correction).correction
