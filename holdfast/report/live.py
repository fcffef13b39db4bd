"""The state of a run that goes on, read again and again."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from holdfast.errors import ConfigError
from holdfast.events import Event, EventKind
from holdfast.report import sources
from holdfast.report.incidents import incidents_of
from holdfast.report.run import State, state_of
from holdfast.report.sources import Record

RECENT_LINES = 50  # of the record of steps, from which the present pace is known
SILENT_S = 15.0  # three times what a Guard waits at most, between two steps, before it writes
SILENT_STEPS = 3.0


@dataclass(frozen=True)
class Rank:
    """What the Guard of a rank wrote last.

    ``silent_s`` is how much longer ago that was than for the rank that wrote last; ``pass_s`` the
    mean time of a forward and backward pass since its start, ``own_s`` that of the Guard itself.
    """

    rank: int
    host: str
    step: int
    silent_s: float
    pass_s: float
    own_s: float
    behind: bool


@dataclass(frozen=True)
class Live:
    """The state of a run at one moment; ``as_dict`` returns it ready for JSON.

    ``step_s`` is the mean time of its latest steps, in seconds; ``statuses`` counts incidents by
    ``incidents.STATUSES``.
    """

    name: str
    state: State
    step: int
    steps_wanted: int | None
    loss: float | None
    grad_norm: float | None
    losses: dict[int, float]
    step_s: float | None
    injected: int
    statuses: dict[str, int]
    latest: list[Event]
    smps: list[Record]
    ranks: list[Rank]
    coverage: Record | None
    events: int = 0
    fresh: list[Event] = field(default_factory=list)

    @property
    def left_s(self) -> float | None:
        """The time that the rest of the run will take, in seconds, if that is known."""
        if self.step_s is None or self.steps_wanted is None:
            return None
        return max(0, self.steps_wanted - self.step) * self.step_s

    def as_dict(self) -> dict[str, object]:
        """Return the values that a program needs, without curves."""
        return {
            "name": self.name,
            "state": self.state.kind,
            "reason": self.state.reason,
            "last_sign_s": self.state.last_sign_s,
            "step": self.step,
            "steps_wanted": self.steps_wanted,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "step_s": self.step_s,
            "left_s": self.left_s,
            "events": self.events,
            "injected": self.injected,
            "statuses": self.statuses,
            "latest": [event.as_dict() for event in self.latest],
            "smps": self.smps,
            "ranks": [vars(rank) for rank in self.ranks],
        }


class LiveRun:
    """Reads what a run writes; each call of ``read`` continues where the last one ended.

    Args:
        run_dir: Directory of a run.

    Raises:
        ConfigError: The directory holds no run.
    """

    def __init__(self, run_dir: Path) -> None:
        if not sources.is_run(run_dir):
            raise ConfigError(
                f"{run_dir} holds no run (yet): no {', no '.join(sources.MARKS)} in it; give the "
                "directory of a run that has begun"
            )
        self._run_dir = run_dir
        self._tail, self._ledgers = sources.MetricsTail(run_dir), sources.Ledgers(run_dir)
        self._metrics = sources.Metrics()
        self._lines: list[sources.StepLine] = []
        self._events: list[Event] = []
        self._statuses: dict[str, int] = {}

    def read(self, latest: int = 8) -> Live:
        """Return the present state, with the latest events."""
        lines, fresh = list(self._tail.read()), list(self._ledgers.read())
        self._metrics.take(lines)
        self._lines = [*self._lines, *lines][-RECENT_LINES:]
        self._events += fresh
        if fresh:
            found = incidents_of(self._events)
            self._statuses = dict(Counter(incident.status for incident in found))
        settings, smps = sources.read_settings(self._run_dir), sources.read_smps(self._run_dir)
        results = sources.read_results(self._run_dir)
        summaries = sources.read_summaries(self._run_dir)
        newest = self._lines[-1] if self._lines else None
        step = max([self._metrics.steps_done, *(each["step"] for each in summaries)])
        return Live(
            name=self._run_dir.name,
            state=state_of(self._run_dir, settings, results, smps),
            step=step,
            steps_wanted=settings.get("steps"),
            loss=newest.loss if newest else None,
            grad_norm=newest.grad_norm if newest else None,
            losses=self._metrics.loss,
            step_s=mean(line.seconds for line in self._lines) if self._lines else None,
            injected=sum(event.kind == EventKind.INJECTED for event in self._events),
            statuses=self._statuses,
            latest=self._events[-latest:],
            smps=smps,
            ranks=_ranks(summaries, self._lines),
            coverage=sources.coverage_of(results or summaries),
            events=len(self._events),
            fresh=fresh,
        )


def _ranks(summaries: Sequence[Record], lines: Sequence[sources.StepLine]) -> list[Rank]:
    newest_s = max((each["time_s"] for each in summaries), default=time.time())
    step_s = median(line.seconds * line.steps for line in lines) if lines else 0.0
    patience_s = max(SILENT_S, SILENT_STEPS * step_s)
    furthest = max((each["step"] for each in summaries), default=0)
    found = []
    for each in summaries:
        steps, silent_s = max(1, each["steps"]), newest_s - each["time_s"]
        pass_s, own_s = (each["seconds"].get(name, 0.0) / steps for name in ("passes", "guard"))
        behind = each["step"] < furthest and silent_s > patience_s
        place = each["rank"], each["host"], each["step"]
        found.append(Rank(*place, silent_s, pass_s, own_s, behind))
    return found
