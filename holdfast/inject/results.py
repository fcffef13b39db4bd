"""The results of a campaign: one row a trial, and their rates with intervals."""

import csv
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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
Rows = Sequence[Mapping[str, Any]]


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

        Each has the number of ``trials``, the count of every outcome, and the rate of silent
        corruptions as ``silent_rate`` with its 95 % Wilson interval, ``silent_low`` to
        ``silent_high``. With ``"trial"`` left out of no column, as in ``summary("fault")``, rates
        of several layers are pooled: each layer counts alike, whatever its size.
        """
        by = by or ("layer", "what", "fault")
        counts: defaultdict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
        for row in self.rows:
            counts[tuple(row[name] for name in by)][row["outcome"]] += 1
        return [dict(zip(by, key, strict=True)) | self._counted(n) for key, n in counts.items()]

    def _counted(self, counts: Counter[str]) -> dict[str, Any]:
        trials = counts.total() - counts["not_injected"]
        silent = Rate(counts["silent"], trials)
        low, high = silent.interval
        rate = {"silent_rate": silent.value, "silent_low": low, "silent_high": high}
        return {"trials": trials} | {name: counts[name] for name in self.outcomes} | rate

    @property
    def outcomes(self) -> list[str]:
        """The outcomes in a fixed order: those of ``campaign``, then classes of the user's own."""
        return [*CLASSES, *sorted({row["outcome"] for row in self.rows} - {*CLASSES})]

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the rows as CSV."""
        write_csv(self.rows, Path(path))

    def to_parquet(self, path: str | PathLike[str]) -> None:
        """Write the rows as Parquet; raises ConfigError without pyarrow."""
        check_parquet()
        write_parquet(self.rows, Path(path))

    def plot(self, path: str | PathLike[str] | None = None, by: str = "layer") -> "Figure":
        """Draw the share of each outcome by a column, and write it to a file if one is named.

        Raises:
            ConfigError: matplotlib is missing.
        """
        if find_spec("matplotlib") is None:
            raise ConfigError("plots need matplotlib: pip install 'torch-holdfast[plot]'")
        from matplotlib.figure import Figure

        sums = self.summary(by)
        figure = Figure(figsize=(7, 1 + 0.25 * len(sums)), layout="constrained")
        axes, names = figure.subplots(), [str(each[by]) for each in sums]
        left = [0.0] * len(sums)
        for outcome in self.outcomes:
            shares = [each[outcome] / max(1, each["trials"]) for each in sums]
            axes.barh(names, shares, left=left, label=outcome)
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
        sums, by = self.summary(*by), by or ("layer", "what", "fault")
        shown = [name for name in self.outcomes if any(each[name] for each in sums)]
        lines = [[*by, "trials", *shown, "silent, 95 %"]]
        for each in sums:
            rate = "{silent_rate:.1%} ({silent_low:.1%}–{silent_high:.1%})".format_map(each)
            lines.append([str(each[name]) for name in lines[0][:-1]] + [rate])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        pad = lambda line: "  ".join(map(str.ljust, line, widths)).rstrip()  # noqa: E731
        return "\n".join(map(pad, lines))


def parquet_available() -> bool:
    """Return whether pyarrow is installed, which the extra ``lab`` contains."""
    return find_spec("pyarrow") is not None


def check_parquet() -> None:
    """Raise ConfigError if pyarrow is missing, so that Parquet files cannot be written."""
    if not parquet_available():
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed: pip install 'torch-holdfast[lab]', or "
            "do without, as the same rows are written as CSV"
        )


def write_csv(rows: Rows, path: Path) -> None:
    """Write rows that have the same columns as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(rows: Rows, path: Path) -> None:
    """Write rows that have the same columns as Parquet."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
