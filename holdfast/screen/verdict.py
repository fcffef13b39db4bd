"""The answer of a screening: healthy, suspect or unable, and what it rests on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast import events
from holdfast.inject.statistics import rule_of_three
from holdfast.screen.judge import Finding
from holdfast.screen.observation import Observation, Round
from holdfast.screen.units import Unit

HEALTHY, SUSPECT, UNABLE = "healthy", "suspect", "unable"
EVENT = "screen_fault"
EXIT_CODES = {HEALTHY: 0, SUSPECT: 1, UNABLE: 3}


@dataclass(frozen=True)
class Trouble:
    """Why a unit was not screened to the end.

    ``suspicious`` if a healthy core would not do so: it crashed by itself, or hung computing.
    """

    unit: str
    what: str
    suspicious: bool = False


@dataclass
class UnitWork:
    """What one unit has done: by op the executions, seconds and work (flop or bytes)."""

    unit: Unit
    rounds: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    executions: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    work: Counter[str] = field(default_factory=Counter)
    units: dict[str, str] = field(default_factory=dict)

    def take(self, message: Observation | Round) -> None:
        """Count what a worker tells."""
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
        """CPU time over wall time of the rounds; NaN before the first one ended."""
        return self.cpu_s / self.wall_s if self.wall_s else float("nan")

    def speed(self, unit: str, op: str | None = None) -> float:
        """Work ("flop" or "B") a second, of all such ops or of one; 0 if none ran."""
        ops = [each for each, of in self.units.items() if of == unit and op in (None, each)]
        seconds = sum(self.seconds[each] for each in ops)
        return sum(self.work[each] for each in ops) / seconds if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As plain values, speeds by op included."""
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
    """What a screening found.

    Args:
        findings: results that were wrong; troubles: units that were not screened to the end.
        work: by unit; comparisons: made by each finder.
        seconds: that the units worked; first_s: until the first sign of a fault, or None.
        memory_bytes: that each unit walked over; notes: what else is to be known.
        emulated: whether faults were emulated, so that nothing here is about the machine.
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
        """``healthy``, ``suspect`` or ``unable``; what was found outweighs what could not be."""
        if self.findings or any(trouble.suspicious for trouble in self.troubles):
            return SUSPECT
        return UNABLE if self.troubles else HEALTHY

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 suspect, 3 unable."""
        return EXIT_CODES[self.state]

    @property
    def first_s(self) -> float | None:
        """Seconds from the go-ahead to the first sign of a wrong result."""
        return min((finding.first_s for finding in self.findings), default=None)

    @property
    def compared(self) -> int:
        """Comparisons of all finders."""
        return sum(self.comparisons.values())

    @property
    def false_alarm_bound(self) -> float | None:
        """95 % upper bound of false alarms a comparison, if there was none; else unknown."""
        return rule_of_three(self.compared) if not self.findings and self.compared else None

    def suspects(self) -> list[str]:
        """The names of the units that are suspect, each once."""
        crashed = (trouble.unit for trouble in self.troubles if trouble.suspicious)
        return list(dict.fromkeys([*(each.unit for each in self.findings), *crashed]))

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
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
        """Put the answer, and every finding, into this process's events."""
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
        events.record("screened", detail={**told, "troubles": reasons, "seconds": self.seconds})
