"""Reports on runs and campaigns, as one HTML page, as plain values, or as Prometheus metrics.

``gather`` reads a directory without changing it; ``page`` renders the report as one HTML file that
needs no network; ``RunCollector`` serves a live run's counters to Prometheus.
"""

from typing import TYPE_CHECKING

from holdfast.lazy import on_first_use
from holdfast.report.gather import gather, page, verdict

if TYPE_CHECKING:
    from holdfast.report.exporter import RunCollector

__all__ = ["RunCollector", "gather", "page", "verdict"]

# It needs prometheus_client, which is an extra.
__getattr__ = on_first_use(__name__, {"RunCollector": "holdfast.report.exporter"})
