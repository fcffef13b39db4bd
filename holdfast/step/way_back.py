"""Whether a result that no healthy program should give is the program's own, shown by roll-backs.

Repetition confirms such a result (a loss that is not finite, or a million times its past) also if
its cause is a damaged weight, and a snapshot that was begun after the damage holds the damage too.
The result is the program's own if a state from before another step leads to the same bits.
"""


class WayBack:
    """The results of one step that were refused, and the snapshots that were tried for it.

    Attributes:
        start: Step of the snapshot that was restored last; None before the first roll-back.
        restored: Steps of all snapshots that were restored for the present step, in order.
        genuine: Digests of the results that are the program's own.
    """

    def __init__(self) -> None:
        self.start: int | None = None
        self.restored: list[int] = []
        self.genuine: set[str] = set()
        self._refused: dict[int, str] = {}
        self._repeated = ""

    def refuse(self, step: int, digest: str) -> None:
        """Note a refused result; the digest is empty if no result was confirmed at all."""
        again = bool(digest) and self._refused.get(step) == digest
        # Between the snapshot and this step lies a step that went well.
        from_before = self.start is not None and self.start < step
        self._repeated = digest if again and from_before else ""
        self._refused[step] = digest

    def rolled_back(self, step: int) -> None:
        """Note the snapshot from which the step is tried next."""
        self.start = step
        self.restored.append(step)

    def tried(self) -> str:
        """Say which snapshots were tried for the present step, as part of a sentence."""
        count, steps = len(self.restored), ", ".join(map(str, self.restored))
        times = "1 roll-back" if count == 1 else f"{count} roll-backs"
        return f", also after {times} (to step {steps})" if count else ""

    @property
    def repeated(self) -> bool:
        """True if the result refused last is that of an earlier attempt, from an older state."""
        return bool(self._repeated)

    def accept(self) -> None:
        """Accept the result refused last, as no snapshot is left that could show another one."""
        self.genuine.add(self._repeated)

    def arrived(self) -> None:
        """Note that the step is done."""
        self.start, self._repeated = None, ""
        self.restored.clear()
        self._refused.clear()
