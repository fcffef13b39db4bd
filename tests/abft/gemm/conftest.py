"""A quiet ledger before every test, and nothing armed after it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import events, sites

sys.path.insert(0, str(Path(__file__).parent))  # for gemm_cases, whatever the import mode


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No event from before, no hook left behind."""
    events.clear()
    yield
    sites.disarm()
    events.clear()
