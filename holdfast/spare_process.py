"""Whether this process is a spare of a run: it takes no part in it, and computes its audits."""

import os

SPARE_VARIABLE = "HOLDFAST_SPARE"


def is_spare() -> bool:
    """Return True in a process of ``holdfast spare``."""
    return SPARE_VARIABLE in os.environ
