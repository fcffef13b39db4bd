"""The journal of a campaign's cells, by which a killed campaign is continued."""

from pathlib import Path

from holdfast.inject.journal import Journal
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.plan import Plan

JOURNAL_NAME = "cells.jsonl"


def open_journal(directory: Path, plan: Plan) -> Journal:
    """Open the journal of a plan in a directory; raises what ``Journal`` raises."""
    header = {"plan": plan.digest(), "cells": len(plan.cells)}
    return Journal(directory / JOURNAL_NAME, header)


def counts_in(journal: Journal) -> dict[str, Counts]:
    """Return the counts of the cells that are done, by key."""
    return {key: Counts(**values) for key, values in journal.done.items()}
