"""The one place where rung 1 decides what a suspect result means and what is done about it.

An operator whose check fails does not repair, raise or count anything itself. It describes the call
in a :class:`FaultContext` and hands its findings, one after the other, to :func:`decide`:

- :class:`FalseAlarm`: results that a second, stricter check cleared: they are counted;
- :class:`SuspectInput`: an input that no healthy pass has (NaN, INF, extreme): one event a step;
- :class:`Restored`: stored data (a checksum, a weight, a row) that was set right: an event;
- :class:`Repair`: a wrong result and how to put the right one in its place: applied and recorded,
  or escalated where the policy only detects;
- :class:`Damage`: data that contradict their check, and how to look for the cause and set it right:
  done, or escalated where the policy only detects;
- :class:`Unrepaired`: a fault that this rung cannot repair: escalated.

To escalate is to record the event and leave the fault to whoever is :func:`collecting` (the
``Guard``, which goes on to recompute the step), or else to raise ``UncorrectableFault``.

Every protection has a :class:`Policy` of its own, found by the module that a product belongs to.
Products that belong to no module follow the latest protection in force, or the process's policy.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast import events
from holdfast.errors import UncorrectableFault
from holdfast.events import EventKind
from holdfast.sites import SiteTuple, site_name

CORRECTIONS = ("recompute", "checksum", "detect")  # see ``protect``
RECOMPUTATIONS = 3  # bounded: a result that does not settle within these is given up

T = TypeVar("T")


@dataclass(eq=False)
class Policy:
    """The correction and the counters of one protection.

    Args:
        correction: one of ``CORRECTIONS``.

    Raises:
        ValueError: the correction is none of them.
    """

    correction: str = "recompute"
    false_alarms: int = 0  # suspect results that turned out to be right
    _inputs_reported: set[tuple[int, str]] = field(default_factory=set)  # (step, kind)

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise ValueError(
                f"correction must be one of {', '.join(CORRECTIONS)}, got {self.correction!r}"
            )

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
    """The call that a suspicion is about.

    Attributes:
        site: which product of the program; of an operator that is no product, its name in events.
        module: whose policy decides, where the site is a name; 0: of no module.
        override: a correction of the operator's own, in place of the policy's.
        device: where the result is.
        detector: which check failed.
        collectable: whether an unrepaired fault may be left to whoever collects faults.
        started_s: when the suspicion arose, on ``time.perf_counter``.
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
        """Name of the site, as events have it."""
        return site_name(self.site)

    @property
    def policy(self) -> Policy:
        """Policy of the module that the call belongs to."""
        return policy_of(self.module if isinstance(self.site, str) else self.site[0])

    @property
    def correction(self) -> str:
        """The correction in force for the call, one of ``CORRECTIONS``."""
        return self.override or self.policy.correction


@dataclass(frozen=True)
class FalseAlarm:
    """Suspect results that are right after all."""

    count: int


@dataclass(frozen=True)
class SuspectInput:
    """An input that no healthy pass has: ``rows`` of the result depend on it."""

    kind: EventKind
    rows: int
    reason: str


@dataclass(frozen=True)
class Restored:
    """Stored data that did not match its checksum or fingerprint and was set right."""

    kind: EventKind
    detail: dict[str, object]
    rung: str = "correct"


@dataclass(frozen=True)
class Repair:
    """A wrong result, and what puts the right one in its place.

    Attributes:
        kind, detail, rung: of the event.
        apply: writes the right values.
        refusal: why the result must not be used, where the policy only detects.
        refusal_detail: further details of the event in that case.
    """

    kind: EventKind
    detail: dict[str, object]
    apply: Callable[[], object]
    refusal: str
    rung: str = "correct"
    refusal_detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Damage:
    """Data that contradict their check.

    Attributes:
        kind, reason, detail: of the event, where the policy only detects.
        mend: sets right what it can, and returns what it found.
    """

    kind: EventKind
    reason: str
    mend: Callable[[], "Iterable[Finding]"]
    detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Unrepaired:
    """A fault that this rung cannot repair, and why."""

    kind: EventKind
    reason: str
    detail: dict[str, object] = field(default_factory=dict)


Finding = FalseAlarm | SuspectInput | Restored | Repair | Damage | Unrepaired
# An operator's findings. Each ``yield`` returns whether the result may be used now: False after an
# escalation that somebody collected.
Findings = Generator[Finding, bool, None]


def decide(context: FaultContext, judge: Callable[[str], Findings]) -> None:
    """Carry out what each of an operator's findings calls for.

    Args:
        context: the call.
        judge: given what is done about faults (one of ``CORRECTIONS``), yields the findings.

    Raises:
        UncorrectableFault: a fault is not or must not be repaired, and nobody collects faults.
    """
    findings = judge(context.correction)
    try:
        finding = next(findings)
        while True:
            finding = findings.send(_settle(context, finding))
    except StopIteration:
        return


def decide_each(context: FaultContext, findings: Iterable[Finding]) -> bool:
    """Carry out findings that do not depend on each other; return whether all are settled."""
    settled = [_settle(context, finding) for finding in findings]
    return all(settled)


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
    """Compute until a result is sound or repeats an earlier one; None after ``attempts``.

    Args:
        compute: computes the result again.
        sound: whether a result passes its check.
        same: whether two results have the same bits.
        known: results so far, of which the last one is judged first.
        attempts: the most computations.
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
    """Record what was decided."""
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
    # Every site is noted; the event is of the step's first, next to the source: others inherit it.
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
    """Faults of a pass that were not repaired, and its suspect inputs."""

    unrepaired: list[events.Event] = field(default_factory=list)
    suspect_inputs: set[tuple[str, str]] = field(default_factory=set)  # (kind, site)


_collectors: list[tuple[int, Collected]] = []  # thread, what it collects; innermost last


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect unrepaired faults instead of raising in mid-step.

    A rank that raised in the middle of a backward pass would leave the others waiting in their
    collective; the Guard finishes the step and then decides with all ranks.

    Collected are the faults of this thread and of the autograd engine's own threads. A fault on any
    other thread that Python started is not this step's: it raises there.
    """
    entry = threading.get_ident(), Collected()
    _collectors.append(entry)
    try:
        yield entry[1]
    finally:
        _collectors.remove(entry)


def is_collecting() -> bool:
    """Return whether an unrepaired fault of this thread would be collected."""
    return _collector() is not None


def _collector() -> Collected | None:
    if not _collectors:
        return None
    thread = threading.get_ident()
    own = [collected for of, collected in _collectors if of == thread]
    if own:
        return own[-1]
    # The autograd engine's threads were not started by Python; the step they serve is unknown.
    foreign = isinstance(threading.current_thread(), threading._DummyThread)
    return _collectors[-1][1] if foreign else None


process = Policy()  # of products that no protection in force covers
_in_force: list[Policy] = []
_of_module: dict[int, list[Policy]] = {}


def put_in_force(policy: Policy, modules: Iterable[int]) -> None:
    """Let a policy decide for these modules (numbers of ``sites.module_names``)."""
    _in_force.append(policy)
    for module in modules:
        _of_module.setdefault(module, []).append(policy)


def retire(policy: Policy, modules: Iterable[int]) -> None:
    """Undo ``put_in_force``."""
    _in_force.remove(policy)
    for module in modules:
        _of_module[module].remove(policy)
        if not _of_module[module]:
            del _of_module[module]


def policy_of(module: int) -> Policy:
    """Return the policy of a module: of several protections' that cover it, the latest one's."""
    if module in _of_module:
        return _of_module[module][-1]
    return _in_force[-1] if _in_force else process


def count_false_alarms(module: int, count: int) -> None:
    """Count suspect results that an operator's kernel cleared by itself."""
    policy_of(module).false_alarms += count


def set_correction(correction: str) -> None:
    """Choose what is done about the faults of products that no protection covers.

    Raises:
        ValueError: it is none of ``CORRECTIONS``.
    """
    process.correction = Policy(correction).correction
