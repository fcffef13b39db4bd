"""The verdict of a screening, healthy, suspect or unable, with the counts that support it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast import events
from holdfast.events import EventKind
from holdfast.inject.statistics import rule_of_three
from holdfast.screen.judge import Finding
from holdfast.screen.messages import Observation, Round, Trouble
from holdfast.screen.units import Unit

HEALTHY, SUSPECT, UNABLE = "healthy", "suspect", "unable"
EVENT = EventKind.SCREEN_FAULT
EXIT_CODES = {HEALTHY: 0, SUSPECT: 1, UNABLE: 3}


@dataclass
class UnitWork:
    """The work of one unit: by op the executions, the seconds, and the flop or bytes."""

    unit: Unit
    rounds: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    executions: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    work: Counter[str] = field(default_factory=Counter)
    units: dict[str, str] = field(default_factory=dict)

    def take(self, message: Observation | Round) -> None:
        """Add a message of the unit's worker to the counts."""
        if isinstance(message, Round):
            self.rounds, self.wall_s = message.rounds, message.wall_s
            self.cpu_s = message.cpu_s
            return
        self.executions[message.op] += message.count
        self.seconds[message.op] += message.seconds  # type: ignore[assignment]
        self.work[message.op] += message.work  # type: ignore[assignment]
        self.units[message.op] = message.work_unit

    @property
    def utilisation(self) -> float:
        """CPU time over wall time of the completed rounds; NaN before the first one."""
        return self.cpu_s / self.wall_s if self.wall_s else float("nan")

    def speed(self, unit: str, op: str | None = None) -> float:
        """Return the work per second in "flop" or "B", of one op or of all; 0 if none ran."""
        ops = [each for each, of in self.units.items() if of == unit and op in (None, each)]
        seconds = sum(self.seconds[each] for each in ops)
        return sum(self.work[each] for each in ops) / seconds if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all counts and speeds as plain values."""
        ops = {
            op: {
                "executions": self.executions[op],
                "seconds": self.seconds[op],
                f"{self.units[op]}_s": self.speed(self.units[op], op),
            }
            for op in self.units
        }
        return {
            **asdict(self.unit),
            "rounds": self.rounds,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "utilisation": self.utilisation,
            "flop_s": self.speed("flop"),
            "bytes_s": self.speed("B"),
            "ops": ops,
        }


@dataclass(frozen=True)
class Verdict:
    """The result of a screening.

    Args:
        findings: Units and workloads with wrong results.
        troubles: Units that were not screened to the end.
        work: Executions, times and speeds of each unit.
        comparisons: Number of comparisons that each finder made.
        seconds: Time that the units worked.
        memory_bytes: Memory that each unit filled with patterns.
        notes: Remarks for the user.
        emulated: True if faults were emulated, so that the verdict is not about the machine.
    """

    findings: Sequence[Finding]
    troubles: Sequence[Trouble]
    work: Sequence[UnitWork]
    comparisons: Mapping[str, int]
    seconds: float
    memory_bytes: int
    notes: Sequence[str] = ()
    emulated: bool = False

    @property
    def state(self) -> str:
        """``suspect`` if any unit is, else ``unable`` if any was not screened, else ``healthy``."""
        if self.findings or any(trouble.suspicious for trouble in self.troubles):
            return SUSPECT
        return UNABLE if self.troubles else HEALTHY

    @property
    def exit_code(self) -> int:
        """Exit code of the command line: 0 healthy, 1 suspect, 3 unable."""
        return EXIT_CODES[self.state]

    @property
    def first_s(self) -> float | None:
        """Seconds from the start to the first sign of a wrong result; None without one."""
        return min((finding.first_s for finding in self.findings), default=None)

    @property
    def compared(self) -> int:
        """Number of comparisons of all finders."""
        return sum(self.comparisons.values())

    @property
    def false_alarm_bound(self) -> float | None:
        """95 % upper bound of the false alarms per comparison; None if there was an alarm."""
        return rule_of_three(self.compared) if not self.findings and self.compared else None

    def suspects(self) -> list[str]:
        """Return the names of the suspect units, each once."""
        crashed = (trouble.unit for trouble in self.troubles if trouble.suspicious)
        return list(dict.fromkeys([*(each.unit for each in self.findings), *crashed]))

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return {
            "verdict": self.state,
            "exit_code": self.exit_code,
            "suspects": self.suspects(),
            "findings": [asdict(finding) for finding in self.findings],
            "troubles": [asdict(trouble) for trouble in self.troubles],
            "units": [work.as_dict() for work in self.work],
            "seconds": self.seconds,
            "first_s": self.first_s,
            "memory_bytes": self.memory_bytes,
            "comparisons": dict(self.comparisons),
            "false_alarm_bound_95": self.false_alarm_bound,
            "notes": list(self.notes),
            "emulated": self.emulated,
        }

    def record(self) -> None:
        """Record an event for every finding and one for the verdict."""
        for finding in self.findings:
            bits = sorted({bit for each in finding.differences for bit in each.bits})
            events.record(
                EVENT,
                op=finding.op,
                device=finding.unit,
                detector=finding.finders[0],
                detail={
                    "unit": finding.unit,
                    "finders": list(finding.finders),
                    "wrong": finding.wrong,
                    "executions": finding.executions,
                    "bits": bits,
                    "emulated": self.emulated,
                },
            )
        told = {"verdict": self.state, "suspects": self.suspects(), "units": len(self.work)}
        reasons = [f"{trouble.unit}: {trouble.what}" for trouble in self.troubles]
        events.record(
            EventKind.SCREENED, detail={**told, "troubles": reasons, "seconds": self.seconds}
        )
