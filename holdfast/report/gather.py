"""Reading the report on the run, the demo or the campaign in a directory."""

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from holdfast.errors import ConfigError
from holdfast.report.markup import Markup
from holdfast.report.page import render
from holdfast.report.run import RunReport, gather_run
from holdfast.report.run_sections import run_sections
from holdfast.report.sources import is_run
from holdfast.report.verdict import Verdict, verdict_of

CALM, STORM = "calm", "storm"  # the names of the two runs of holdfast demo
READERS = "holdfast.reports"


class Report(Protocol):
    """A report on something other than a run, made by an entry point of ``holdfast.reports``.

    The entry point is a function of a path that returns such a report, or None if the path holds
    nothing that it can read.
    """

    name: str
    made_s: float

    def verdict(self) -> Verdict:
        """Judge what was read."""

    def sections(self) -> Sequence[Markup]:
        """Render the sections of the page, in order."""

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain values."""


def gather(path: Path, baseline: Path | None = None) -> RunReport | Report:
    """Read the report on a run, on both runs of ``holdfast demo``, or on a campaign.

    Args:
        path: Directory of a run, of a demo or of a campaign, or a file of a campaign's results.
        baseline: Directory of a run to compare a run with. The storm of a demo is compared with its
            calm run by default.

    Raises:
        ConfigError: The path holds none of these, or it cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}: give the directory of a run or a campaign")
    run_dir, found = _run_in(path)
    if run_dir is not None:
        return gather_run(run_dir, baseline or found)
    for reader in entry_points(group=READERS):
        report: Report | None = reader.load()(path)
        if report is None:
            continue
        if baseline is not None:
            raise ConfigError(f"--baseline {baseline} needs a run to compare with: {path} has none")
        return report
    raise ConfigError(f"{path} holds neither a run nor a campaign: {_hint(path)}")


def page(report: RunReport | Report) -> str:
    """Render a report as one HTML page that needs no other files and no network."""
    sections = run_sections(report) if isinstance(report, RunReport) else report.sections()
    return render(report.name, report.made_s, verdict(report), sections)


def verdict(report: RunReport | Report) -> Verdict:
    """Return the verdict of a report: a level, one sentence, and further lines."""
    return verdict_of(report) if isinstance(report, RunReport) else report.verdict()


def _run_in(path: Path) -> tuple[Path | None, Path | None]:
    """Find the directory of the run and, in a demo, that of the run to compare it with."""
    if not path.is_dir():
        return None, None
    if is_run(path):
        return path, None
    both = path / CALM, path / STORM
    return (both[1], both[0]) if all(map(is_run, both)) else (None, None)


def _hint(path: Path) -> str:
    if not path.is_dir():
        return "give a directory, or a .json, .jsonl, .csv or .parquet file of a campaign"
    inner = sorted(child.name for child in path.iterdir() if child.is_dir() and is_run(child))
    if inner:
        return f"there are runs in it, give one of them: {', '.join(inner[:5])}"
    if (path / "trials.jsonl").exists():
        return "it has the trials of a script's campaign, which have no page; read trials.csv"
    return "give the directory of a run or a campaign"
