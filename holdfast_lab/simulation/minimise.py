"""The fewest faults that still break an invariant: delta debugging over the faults of a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Each attempt is a whole run of the seed.
MOST_RUNS = 60


def minimised(
    faults: Sequence[int], fails: Callable[[Sequence[int]], bool], most_runs: int = MOST_RUNS
) -> list[int]:
    """Return a small part of ``faults`` for which ``fails`` still returns true.

    Source: ddmin of Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input"
    (2002).

    Args:
        faults: numbers of faults, for which ``fails`` returns true.
        fails: runs the seed with some of them.
        most_runs: after so many runs the smallest part found so far is returned.
    """
    kept, parts, runs = list(faults), 2, 0
    while kept and runs < most_runs:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            runs += 1
            if fails(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
            if runs >= most_runs:
                return kept
        else:
            if size == 1:
                return kept
            parts = min(len(kept), 2 * parts)
    return kept
