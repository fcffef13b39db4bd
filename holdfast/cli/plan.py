"""``holdfast plan``: compute how often to check, to snapshot and to persist."""

import argparse

from holdfast.cli import plan_attention, plan_ladder, plan_snapshots


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``plan`` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        description="Compute how often to look for faults and to save, from failure rates, sizes "
        "and costs. No training is run.",
    )
    subjects = parser.add_subparsers(dest="subject", metavar="SUBJECT", required=True)
    plan_ladder.register(subjects)
    plan_attention.register(subjects)
    plan_snapshots.register(subjects)
