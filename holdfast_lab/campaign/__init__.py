"""Fault-injection campaigns: inject every kind of fault at every site and count detections.

``make_plan`` lists the cells, ``run_campaign`` runs those that are not done yet, and
``write_results`` and ``plot_bits`` write the results.
"""

from holdfast.inject.schedule import TILE_SITES
from holdfast.inject.worker_pool import WorkerFailed
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.models import FAULTS
from holdfast_lab.campaign.plan import (
    DISTRIBUTIONS,
    DTYPES,
    FULL,
    OPERATORS,
    QUICK,
    SITES,
    Cell,
    Filters,
    Plan,
    make_plan,
)
from holdfast_lab.campaign.plots import plot_bits
from holdfast_lab.campaign.results import (
    broken_claims,
    check_parquet,
    group_of,
    summed,
    total,
    write_results,
)
from holdfast_lab.campaign.runner import CellResult, finished, run_campaign

__all__ = [
    "DISTRIBUTIONS",
    "DTYPES",
    "FAULTS",
    "FULL",
    "OPERATORS",
    "QUICK",
    "SITES",
    "TILE_SITES",
    "Cell",
    "CellResult",
    "Counts",
    "Filters",
    "Plan",
    "WorkerFailed",
    "broken_claims",
    "check_parquet",
    "finished",
    "group_of",
    "make_plan",
    "plot_bits",
    "run_campaign",
    "summed",
    "total",
    "write_results",
]
