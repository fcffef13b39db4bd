"""The results of a campaign: one row a trial, and their rates with intervals."""

import csv
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.inject.statistics import Rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = ("masked", "corrected", "detected", "silent", "crash", "hang")
BY = ("layer", "what", "fault")


@dataclass(frozen=True)
class Results:
    """The trials of a campaign; ``print`` shows their summary.

    Attributes:
        rows: Of each trial its number, place (``layer``, ``what``, ``name``, ``call``, ``index`` of
            the first changed element, number of ``elements``), ``fault``, ``batch``, that element
            ``before`` and ``after``, ``outcome``, and ``detail``: the error or the kinds of events.
    """

    rows: list[dict[str, Any]]

    def rate(self, outcome: str, **where: object) -> Rate:
        """Return the rate of an outcome among injected faults, such as ``what="weight"`` only."""
        rows = [row for row in self.rows if where.items() <= row.items()]
        injected = [row["outcome"] for row in rows if row["outcome"] != "not_injected"]
        return Rate(injected.count(outcome), len(injected))

    def summary(self, *by: str) -> list[dict[str, Any]]:
        """Return a row for each value of these columns, by default layer, what and fault.

        Each has the number of injected ``trials``, the count of every outcome, and the rate of
        silent corruptions as ``silent_rate`` with its 95 % Wilson interval, ``silent_low`` to
        ``silent_high``. Layers that a row pools count alike, whatever their size.
        """
        by, sums = by or BY, []
        counts: defaultdict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
        for row in self.rows:
            counts[tuple(row[name] for name in by)][row["outcome"]] += 1
        for key, found in counts.items():
            rate = Rate(found["silent"], found.total() - found["not_injected"])
            numbers = {name: found[name] for name in self.outcomes}
            interval = dict(zip(("silent_low", "silent_high"), rate.interval, strict=True))
            each = {"trials": rate.trials, **numbers, "silent_rate": rate.value, **interval}
            sums.append(dict(zip(by, key, strict=True)) | each)
        return sums

    @property
    def outcomes(self) -> list[str]:
        """The outcomes in a fixed order: those of ``campaign``, then classes of the user's own."""
        return [*CLASSES, *sorted({row["outcome"] for row in self.rows} - {*CLASSES})]

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows as CSV."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(self.rows[0]) if self.rows else [])
            writer.writeheader()
            writer.writerows(self.rows)

    def to_parquet(self, path: str | PathLike[str]) -> None:
        """Write the rows as Parquet; raises ConfigError without pyarrow."""
        _need("pyarrow", "lab")
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(self.rows), path)

    def plot(self, path: str | PathLike[str] | None = None, by: str = "layer") -> "Figure":
        """Draw the share of each outcome by a column, and write it to a file if one is named.

        Raises:
            ConfigError: matplotlib is missing.
        """
        _need("matplotlib", "plot")
        from matplotlib.figure import Figure

        sums = self.summary(by)
        figure = Figure(figsize=(7, 1 + 0.25 * len(sums)), layout="constrained")
        axes, left = figure.subplots(), [0.0] * len(sums)
        for outcome in self.outcomes:
            shares = [each[outcome] / max(1, each["trials"]) for each in sums]
            axes.barh([str(each[by]) for each in sums], shares, left=left, label=outcome)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("share of trials")
        axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        return self.table("what", "fault") + "\n\n" + self.table()

    def table(self, *by: str) -> str:
        """Return ``summary`` as text, without the outcomes that never occurred."""
        sums, by = self.summary(*by), by or BY
        shown = [name for name in self.outcomes if any(each[name] for each in sums)]
        lines = [[*by, "trials", *shown, "silent, 95 %"]]
        for each in sums:
            rate = "{silent_rate:.1%} ({silent_low:.1%}–{silent_high:.1%})".format_map(each)
            lines.append([str(each[name]) for name in lines[0][:-1]] + [rate])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _need(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"this needs {package}: pip install 'torch-holdfast[{extra}]'")
