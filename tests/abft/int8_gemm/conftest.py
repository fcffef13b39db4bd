"""A quiet ledger, one thread, and int8_cases importable whatever the import mode."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import events, sites

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No event from before, no hook left behind, and one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    events.clear()
    yield
    sites.disarm()
    events.clear()
    torch.set_num_threads(threads)
