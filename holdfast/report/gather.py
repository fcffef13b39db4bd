"""What a path holds, and the report on it."""

from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.report.campaign import CampaignReport, campaign_verdict, gather_campaign
from holdfast.report.campaign_files import is_campaign
from holdfast.report.page import campaign_page, run_page
from holdfast.report.run import RunReport, gather_run
from holdfast.report.sources import is_run
from holdfast.report.verdict import Verdict, verdict_of

CALM, STORM = "calm", "storm"  # what holdfast demo names its two runs


def gather(path: Path, baseline: Path | None = None) -> RunReport | CampaignReport:
    """The report on a run, on both runs of ``holdfast demo``, or on a campaign.

    Args:
        path: a run's directory, a demo's, a campaign's, or a file of a campaign's results.
        baseline: a run to compare a run with; a demo's storm is compared with its calm.

    Raises:
        ConfigError: there is nothing of this kind, or it cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}: give the directory of a run or a campaign")
    run_dir, found = _run_in(path)
    if run_dir is not None:
        return gather_run(run_dir, baseline or found)
    if not is_campaign(path):
        raise ConfigError(f"{path} holds neither a run nor a campaign: {_hint(path)}")
    if baseline is not None:
        raise ConfigError(f"--baseline {baseline} needs a run to compare with, not a campaign")
    return gather_campaign(path)


def page(report: RunReport | CampaignReport) -> str:
    """The report as one HTML page without external parts."""
    return run_page(report) if isinstance(report, RunReport) else campaign_page(report)


def verdict(report: RunReport | CampaignReport) -> Verdict:
    """What the report says first."""
    if isinstance(report, RunReport):
        return verdict_of(report)
    return campaign_verdict(report)


def _run_in(path: Path) -> tuple[Path | None, Path | None]:
    """The run's directory and, of a demo, the run to compare it with."""
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
    return "give the directory of a run or a campaign"
