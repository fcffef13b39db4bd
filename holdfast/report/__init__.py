"""Reports on runs and campaigns: gathered as plain values, shown as one page or as metrics.

``gather`` reads a directory and changes nothing; ``page`` makes one HTML file of it that needs no
network; ``RunCollector`` serves a live run's counters to Prometheus.
"""

from typing import TYPE_CHECKING

from holdfast.report.gather import gather, page, verdict

if TYPE_CHECKING:
    from holdfast.report.exporter import RunCollector

__all__ = ["RunCollector", "gather", "page", "verdict"]


def __getattr__(name: str) -> object:
    if name == "RunCollector":  # it needs prometheus_client, which is an extra
        from holdfast.report.exporter import RunCollector

        return RunCollector
    raise AttributeError(f"module 'holdfast.report' has no attribute {name!r}")
