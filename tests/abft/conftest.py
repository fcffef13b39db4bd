"""What the operators' tests share: cases that can be imported, and nothing armed or logged."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import events, sites
from holdfast.abft import policy

# The modules of cases beside the tests, whatever the import mode.
sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No event from before, no hook left behind."""
    events.clear()
    yield
    sites.disarm()
    events.clear()


@pytest.fixture
def detecting() -> Iterator[None]:
    """Faults are detected and not corrected, in whatever belongs to no protection."""
    policy.set_correction("detect")
    yield
    policy.set_correction("recompute")
