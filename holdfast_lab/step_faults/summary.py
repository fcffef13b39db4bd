"""What has become of the faults: counts with intervals, and the table of the documentation."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.inject.statistics import Rate
from holdfast_lab.step_faults.calls import DURATIONS
from holdfast_lab.step_faults.operators import CLASSES, DATA
from holdfast_lab.step_faults.trials import OUTCOMES

Row = Mapping[str, Any]


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how often each outcome was, of the trials whose fault changed something."""
    found = Counter(row["outcome"] for row in rows if row["outcome"] in OUTCOMES)
    silent = Rate(found["silent"], found.total())
    known: dict[str, Any] = {"n": found.total(), **{each: found[each] for each in OUTCOMES}}
    known |= {"silent_interval": silent.interval, "silent_upper": silent.upper}
    named = sorted(row["named"] for row in rows if row["named"])
    if named:  # number of the step, of the struck ones, in which an event first said so
        high = named[-(-95 * len(named) // 100) - 1]
        known["named_step"] = {"median": statistics.median(named), "p95": high, "last": named[-1]}
    return known


def summaries(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return for each mode and duration the counts of all, by class, and by class and damage."""
    return [
        {"mode": mode, "duration": duration, "all": counts(those), "classes": _classes(those)}
        | {"but_data": counts([each for each in those if each["class"] != DATA])}
        | {"models": [*_by(those, "model")]}
        for mode, found in _by(rows, "mode").items()
        for duration, those in _by(found, "duration").items()
    ]


def _classes(rows: Sequence[Row]) -> dict[str, Any]:
    classes = _by(rows, "class").items()
    damages = {kind: {d: counts(e) for d, e in _by(of, "damage").items()} for kind, of in classes}
    return {kind: counts(of) | {"damage": damages[kind]} for kind, of in classes}


def _by(rows: Iterable[Row], key: str) -> dict[str, list[Row]]:
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row[key]].append(row)
    return dict(sorted(found.items()))


def table(rows: Iterable[Row]) -> str:
    """Return the newest recorded counts of each mode and duration as tables in Markdown."""
    newest = {(row["mode"], row["duration"]): row for row in rows}
    lines = []
    for mode in dict.fromkeys(mode for mode, _ in newest):
        shown = [duration for duration in DURATIONS if (mode, duration) in newest]
        found = [newest[mode, duration] for duration in shown]
        lines += [f"**{mode}**", "", f"| class | {' | '.join(shown)} |"]
        lines += ["|" + " --- |" * (1 + len(shown))]
        for kind in CLASSES:
            cells = [_cell(row["classes"].get(kind)) for row in found]
            lines += [f"| {kind} | {' | '.join(cells)} |"] if any(cells) else []
        cells = [_cell(row["but_data"]) for row in found]
        lines += [f"| all but data | {' | '.join(cells)} |", ""]
    return "\n".join(lines)


def _cell(found: Mapping[str, Any] | None) -> str:
    if not found or not found["n"]:
        return ""
    low, high = found["silent_interval"]
    rate = f"{low:.1%} to {high:.1%}" if found["silent"] else f"≤ {found['silent_upper']:.2%}"
    return f"{found['n']}: {' / '.join(str(found[each]) for each in OUTCOMES)} ({rate})"
