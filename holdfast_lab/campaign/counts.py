"""Counts of the faults that were injected, detected and repaired in a cell of a campaign."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import torch

from holdfast_lab.campaign.effects import EFFECTS

# A cell ends after this many tries for each wanted fault, when hardly any element can have it.
PATIENCE = 8


@dataclass(frozen=True)
class Counts:
    """The counts of one cell, which is one combination of a campaign's axes.

    Attributes:
        trials: Number of injected faults; fewer than planned where too few elements can have the
            fault.
        detected: Faults that the verification pass suspected.
        masked, below_rounding, harmless, harmful: Faults that were not detected, by effect.
        would_harm: Faults with a harmful effect, detected or not.
        replayed: Trials that also ran end to end.
        replayed_detected: Trials that reported an event end to end.
        replayed_corrected: Trials that reported an event and ended with the result of a clean run,
            bit for bit.
        disagreements: Trials that were detected in only one of the verification pass and the run
            end to end.
        clean_rows: Number of verified rows of clean products.
        clean_suspects: Clean rows that were suspected.
        false_alarms: Events that were reported of clean rows.
        seconds: Wall time of the cell.
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


def by_effect(effects: torch.Tensor) -> dict[str, int]:
    """Count faults by effect, given the class of each."""
    found = effects.long().bincount(minlength=len(EFFECTS)).tolist()
    return dict(zip(EFFECTS, found, strict=True))


def settled(found: bool, right: bool, effect: Callable[[], int]) -> Counts:
    """Return the counts of one fault that went through detection and repair.

    ``right`` says that the results are those without the fault. ``effect`` returns the fault's
    class and is called if it was not detected.
    """
    missed = {} if found else {tuple(EFFECTS)[effect()]: 1}
    return Counts(
        trials=1,
        detected=int(found),
        replayed=1,
        replayed_detected=int(found),
        replayed_corrected=int(found and right),
        **missed,
    )
