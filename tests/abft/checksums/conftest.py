"""One thread, and checksum_cases importable whatever the import mode."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    return
