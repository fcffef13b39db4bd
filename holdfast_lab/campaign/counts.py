"""How many faults of one combination of a campaign's axes were injected, detected and repaired."""

from dataclasses import asdict, dataclass, fields

# A cell ends after this many tries for each fault it wants: the bit that is to flip is then
# (nearly) never 0, or never 1, there.
PATIENCE = 8


@dataclass(frozen=True)
class Counts:
    """The counts of one cell.

    Args:
        trials: faults injected; fewer than planned where too few elements can have the fault.
        detected: of these, those that the verification pass suspected.
        masked, below_rounding, harmless, harmful: undetected faults by effect.
        would_harm: faults of harmful effect, detected or not.
        replayed: trials that also ran end to end; replayed_detected: reported there;
            replayed_corrected: reported, and the result was a clean run's, bit for bit;
            disagreements: reported end to end and not suspected in one pass, or the reverse.
        clean_rows: rows of clean products verified; clean_suspects: of these, suspected;
            false_alarms: events reported of them.
        seconds: wall time of the cell.
    """

    trials: int = 0
    detected: int = 0
    masked: int = 0
    below_rounding: int = 0
    harmless: int = 0
    harmful: int = 0
    would_harm: int = 0
    replayed: int = 0
    replayed_detected: int = 0
    replayed_corrected: int = 0
    disagreements: int = 0
    clean_rows: int = 0
    clean_suspects: int = 0
    false_alarms: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, object]:
        """Return the counts as plain values in the order of the fields."""
        return asdict(self)
