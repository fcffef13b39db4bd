"""What a coverage report says of its sites."""

from holdfast.protection import CoverageReport


def covered(report: CoverageReport) -> dict[str, int]:
    """Calls of each covered site."""
    return {site.site: site.calls for site in report.sites if site.covered}


def uncovered(report: CoverageReport) -> dict[str, str]:
    """Reasons of the sites that are not covered."""
    return {site.site: site.reason for site in report.sites if not site.covered}
