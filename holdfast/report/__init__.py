"""Reports on runs and campaigns: gathered as plain values, shown as one page or as metrics.

``gather`` reads a directory and changes nothing; ``page`` makes one HTML file of it that needs no
network; ``holdfast.report.exporter`` serves a live run's counters to Prometheus.
"""

from holdfast.report.gather import gather, page, verdict

__all__ = ["gather", "page", "verdict"]
